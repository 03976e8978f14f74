"""`agentserve bench kernels`: every kernel and the whole model beside this machine's limits."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.output import fail
from agentserve.config import load
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from agentserve.bench.kernels.cases import Findings
    from agentserve.bench.kernels.subject import Choice
    from agentserve.bench.report import Row

PLAIN_WIDTH = 160  # characters


def bench_kernels(
    *,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[
        str | None, typer.Option(help="stored or expanded.", show_default="both, in alternation")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="float or int8.", show_default="both, where the backend can")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto, bf16, fp16, fp32 or int8.", show_default="auto")
    ] = None,
    page_size: Annotated[str | None, typer.Option(help="Tokens per KV page.", show_default="16")] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    results: Annotated[Path | None, typer.Option(help="Write kernels.json into this folder.")] = None,
) -> None:
    """Measure every kernel, whole decode and prefill steps, and what is outside kernels, beside limits.

    Memory and products are measured in the same run, in between. Takes under three minutes on two cores.
    """
    from agentserve.server.workers.supervisor import worker_environment

    # As in `agentserve bench`: kernel threads must wait as a worker's do, so before torch is loaded.
    os.environ.update(worker_environment())
    from agentserve.bench import report
    from agentserve.bench.kernels import run

    flags = {"model": model, "dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size, "threads": threads}
    config = load({**flags, "weights": weights, "activations": activations}, None)
    settings = run.Settings(
        model=config.model.name,
        dtype=config.model.dtype,
        choices=_choices(weights, activations),
        kv_dtype=config.engine.kv_dtype,
        threads=config.workers.threads or usable_cores(),
        page_size=config.engine.page_size,
    )
    progress = Console(stderr=True)
    try:
        found = run.measure(settings, lambda stage: progress.print(f"{stage} ..."))
    except (ValueError, OSError) as error:
        fail(str(error))
    show(found, _console())
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report(
            "kernels", command, report.machine(), report.versions(), found.rows, found.notes, found.skipped
        )
        typer.echo(f"written to {report.write(document, results)}")


def _choices(weights: str | None, activations: str | None) -> tuple[Choice, ...]:
    """The variants that the flags leave."""
    from agentserve.bench.kernels.subject import ALL

    return tuple(
        choice
        for choice in ALL
        if weights in (None, choice.weights) and activations in (None, choice.activations)
    )


def _console() -> Console:
    """As wide as the terminal; into files and pipes as wide as the tables."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def show(found: Findings, console: Console) -> None:
    """One table per group of rows; the variants of a row stand side by side."""
    for group in dict.fromkeys(row.group for row in found.rows):
        console.print(_table(group, [row for row in found.rows if row.group == group]))
        console.print()
    console.print("% of the limit that is named beside it, measured in between the same runs", style="dim")
    for name, reason in found.skipped.items():
        console.print(f"not measured: {name}: {reason}", soft_wrap=True)
    for note in found.notes:
        console.print(note, soft_wrap=True)


def _table(group: str, rows: list[Row]) -> Table:
    variants = list(dict.fromkeys(row.variant for row in rows))
    cells = {(row.name, row.variant): row for row in rows}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(group, no_wrap=True)
    for variant in variants:
        table.add_column(variant, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
    for name in dict.fromkeys(row.name for row in rows):
        columns = [_cells(cells.get((name, variant))) for variant in variants]
        table.add_row(name, *(cell for column in columns for cell in column))
    return table


def _cells(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    beside = [f"{row.fraction:.0%} {row.limit_name}"] if row.fraction else []
    if len(row.runs) == 1 and row.group != "machine":  # whose single values are the best of many
        beside.append("1 run")
    return f"{row.value:,.4g} {row.unit}", ", ".join(beside)
