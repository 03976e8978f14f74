"""`agentserve bench tiers`: how fast KV moves between its tiers, beside memcpy and LMDB alone."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.bench_kernels import PLAIN_WIDTH
from agentserve.cli.output import fail
from agentserve.values import ConfigError, size

if TYPE_CHECKING:
    from agentserve.bench.tiers import Findings


def tiers_bench(
    *,
    data_dir: Annotated[Path, typer.Option(help="A folder on the disk to measure; nothing stays there.")],
    block: Annotated[str, typer.Option(help="Bytes of a block: one page of all layers.")] = "360KiB",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks per transfer.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Runs per figure; the median counts.")] = 3,
    compressed: Annotated[bool, typer.Option(help="Compress on disk (zstd, level 1).")] = False,
    results: Annotated[Path | None, typer.Option(help="Write tiers.json into this folder.")] = None,
) -> None:
    """Measure saving, loading, writing and fetching KV, beside memcpy and LMDB alone. Some seconds."""
    from agentserve.bench import report, tiers

    progress = Console(stderr=True)
    try:
        settings = tiers.Settings(data_dir, size(block), blocks, runs, compressed)
        found = tiers.measure(settings, lambda stage: progress.print(f"{stage} ..."))
    except ConfigError as error:
        fail(f"--block: {error}, got {block!r}")
    except (ValueError, OSError) as error:
        fail(str(error))
    _show(found)
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report(
            "tiers", command, report.machine(), report.versions(), found.rows, found.notes, found.skipped
        )
        typer.echo(f"written to {report.write(document, results)}")


def _show(found: Findings) -> None:
    table = Table(box=None, header_style="bold")
    for title, side in (("", "left"), ("median", "right"), ("limit", "right"), ("of limit", "right")):
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in found.rows:
        limit = f"{row.limit:,.2f} ({row.limit_name})" if row.limit else ""
        fraction = f"{row.fraction:.0%}" if row.fraction else ""
        table.add_row(row.name, f"{row.value:,.2f} {row.unit}", limit, fraction)
    (Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)).print(table)
    for name, reason in found.skipped.items():
        typer.echo(f"not measured: {name}: {reason}")
    for note in found.notes:
        typer.echo(note)
