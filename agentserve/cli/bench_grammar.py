"""`agentserve bench grammar`: what holding a reply to a form costs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentserve.cli.bench_frontend import show
from agentserve.cli.output import fail


def grammar(
    *,
    model: Annotated[str, typer.Option(help="Whose vocabulary is used.")] = "smollm2-135m",
    texts: Annotated[int, typer.Option(min=1, help="Drawn of each kind of grammar.")] = 20,
    results: Annotated[Path | None, typer.Option(help="Write grammar.json into this folder.")] = None,
) -> None:
    """Measure the mask per token and compile times, for the model's vocabulary and one of 150,000 tokens.

    Half a minute; the machine should be quiet.
    """
    from agentserve.bench import report
    from agentserve.bench.grammars import measure

    progress = Console(stderr=True)
    try:
        rows = measure(model, texts, progress.print)
    except (ValueError, OSError) as error:
        fail(str(error))
    show(rows, Console())
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report("grammar", command, report.machine(), report.versions(), rows)
        typer.echo(f"written to {report.write(document, results)}")
