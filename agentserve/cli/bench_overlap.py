"""`agentserve bench overlap`: what it brings to deliver results while the next step computes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentserve.cli.bench_frontend import show
from agentserve.cli.output import fail
from agentserve.config import load
from agentserve.machine import usable_cores


def overlap(
    *,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    device_kv: Annotated[str, typer.Option(help="KV pool of each of the two workers.")] = "512MiB",
    turns: Annotated[
        list[int] | None, typer.Option(min=1, help="At a time, of the model.", show_default="1, 16")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of with, without, without, with.")] = 4,
    results: Annotated[Path | None, typer.Option(help="Write overlap.json into this folder.")] = None,
) -> None:
    """Measure steps with and without overlap, in alternation, and compare every token: of the model, and of
    devices that compute by themselves for as long as a GPU does.

    Some minutes; the machine should be quiet.
    """
    from agentserve.bench import report
    from agentserve.bench.overlap import TURNS, measure, subjects
    from agentserve.server.workers.spec import worker_spec
    from agentserve.server.workers.supervisor import WorkerFailed

    settings = load({"model": model, "threads": threads, "device_kv": device_kv}, None)
    spec = worker_spec(settings, 0, "", os.getpid(), usable_cores())
    progress = Console(stderr=True)
    try:
        rows = measure(subjects(spec, turns or TURNS), rounds, progress.print)
    except (ValueError, OSError, WorkerFailed) as error:
        fail(str(error))
    show(rows, Console())
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report("overlap", command, report.machine(), report.versions(), rows)
        typer.echo(f"written to {report.write(document, results)}")
