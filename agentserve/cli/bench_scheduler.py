"""`agentserve bench scheduler`: what a step costs in the core, by policy."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentserve.cli.bench_frontend import show
from agentserve.cli.output import fail


def scheduler(
    *,
    policy: Annotated[list[str] | None, typer.Option(help="Only these.", show_default="all")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps per figure and batch.")] = 50,
    results: Annotated[Path | None, typer.Option(help="Write scheduler.json into this folder.")] = None,
) -> None:
    """Measure the core without a model: CPU time of a plan and of booking its results, up to 512 turns that
    run and 4,000 that wait, and how it grows.

    Five minutes; one with a single policy. The machine should be quiet.
    """
    from agentserve.bench import report
    from agentserve.bench.scheduler import measure
    from agentserve.core.scheduling.registry import policy_names

    known = policy_names()
    for name in policy or ():
        if name not in known:
            fail(f"--policy {name[:64]}: there are {', '.join(known)}")
    progress = Console(stderr=True)
    rows = measure(policy or known, steps, progress.print)
    show(rows, Console())
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report("scheduler", command, report.machine(), report.versions(), rows)
        typer.echo(f"written to {report.write(document, results)}")
