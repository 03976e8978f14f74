"""Rows of a benchmark beside what they ought to come to, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.bench_kernels import PLAIN_WIDTH

if TYPE_CHECKING:
    from agentserve.bench.report import Row


def show_rows(rows: Sequence[Row], notes: Sequence[str]) -> None:
    """As wide as the terminal; into files and pipes as wide as the table."""
    table = Table(box=None, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("asked")
    for row in rows:
        table.add_row(row.name, f"{row.value:,.3g} {row.unit}", row.asked)
    (Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)).print(table)
    for note in notes:
        typer.echo(note)
