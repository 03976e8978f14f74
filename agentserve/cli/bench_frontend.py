"""`agentserve bench frontend`: what the API process costs, beside what it may."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.output import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentserve.bench.report import Row


def frontend(
    *,
    model: Annotated[str, typer.Option(help="Whose tokenizer and template are used.")] = "smollm2-135m",
    streams: Annotated[int, typer.Option(min=1, max=256, help="At once.")] = 64,
    tokens: Annotated[int, typer.Option(min=20, help="Of each stream.")] = 200,
    tick: Annotated[float, typer.Option(min=0.001, help="Seconds between tokens of a stream.")] = 0.025,
    history: Annotated[int, typer.Option(min=1000, help="Tokens of the long history.")] = 100_000,
    runs: Annotated[int, typer.Option(min=1, help="The median counts.")] = 3,
    results: Annotated[Path | None, typer.Option(help="Write frontend.json into this folder.")] = None,
) -> None:
    """Measure streams of a paced model over real sockets, and the way of a long history to its tokens.

    Half a minute; the machine should be quiet.
    """
    from agentserve.bench import report
    from agentserve.bench.frontend.run import measure
    from agentserve.bench.frontend.streams import StreamSizes

    progress = Console(stderr=True)
    try:
        rows = measure(model, StreamSizes(streams, tokens, tick), history, runs, progress.print)
    except (ValueError, OSError) as error:
        fail(str(error))
    show(rows, Console())
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report("frontend", command, report.machine(), report.versions(), rows)
        typer.echo(f"written to {report.write(document, results)}")


def show(rows: Sequence[Row], console: Console) -> None:
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column(group, no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("asked", no_wrap=True)
        for row in rows:
            if row.group == group:
                table.add_row(row.name, f"{row.value:,.3g} {row.unit}", row.asked)
        console.print(table)
        console.print()
