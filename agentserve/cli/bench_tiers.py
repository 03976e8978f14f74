"""`agentserve bench tiers`: what tiers give and cost on this machine, beside what it allows."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.bench_kernels import PLAIN_WIDTH
from agentserve.cli.output import fail
from agentserve.values import ConfigError, size

if TYPE_CHECKING:
    from agentserve.bench.tiers.findings import Findings
    from agentserve.bench.tiers.run import EngineSettings


class Part(StrEnum):
    MOVES = "moves"
    RESUME = "resume"
    STEPS = "steps"


def tiers_bench(
    *,
    data_dir: Annotated[Path, typer.Option(help="A folder on the disk to measure; nothing stays there.")],
    only: Annotated[
        list[Part] | None, typer.Option(help="A part; may be repeated.", show_default="all")
    ] = None,
    block: Annotated[str, typer.Option(help="Moves: bytes of a block, one page of all layers.")] = "360KiB",
    blocks: Annotated[int, typer.Option(min=1, help="Moves: blocks per transfer.")] = 256,
    compressed: Annotated[bool, typer.Option(help="Moves: compress on disk (zstd, level 1).")] = False,
    runs: Annotated[int, typer.Option(min=1, help="Rounds of moves and resumes; the median counts.")] = 5,
    context: Annotated[int, typer.Option(min=64, help="Resumes: tokens of the session.")] = 4096,
    result: Annotated[int, typer.Option(min=1, help="Resumes: tokens of the tool's result.")] = 32,
    model: Annotated[str | None, typer.Option(show_default="smollm2-135m")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str, typer.Option(help="expanded or stored.")] = "expanded",
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    tier_policy: Annotated[str, typer.Option(help="Steps: who decides where KV goes.")] = "priced",
    results: Annotated[Path | None, typer.Option(help="Write tiers.json into this folder.")] = None,
) -> None:
    """Measure moving KV (beside memcpy and LMDB), resuming from every tier, and steps while nothing waits.

    Under four minutes; the machine should be quiet.
    """
    from agentserve.server.workers.supervisor import worker_environment

    # The model runs in this process: its kernel threads must wait as a worker's do. Read by libgomp
    # when torch loads it, so before that import.
    os.environ.update(worker_environment())
    from agentserve.bench import report
    from agentserve.bench.tiers import moves, run

    parts = set(only or Part)
    flags = {
        "model": model, "dtype": dtype, "weights": weights, "threads": threads, "tier_policy": tier_policy,
    }  # fmt: skip
    progress = Console(stderr=True)
    try:
        sizes = moves.Sizes(size(block), blocks, runs, compressed)
        engine = _engine({k: v for k, v in flags.items() if v is not None}, parts, (context, result, runs))
        found = run.measure(
            data_dir,
            sizes if Part.MOVES in parts else None,
            engine,
            lambda stage: progress.print(f"{stage} ..."),
        )
    except ConfigError as error:
        fail(f"--block: {error}, got {block!r}")
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))
    _show(found)
    if results is not None:
        command = shlex.join(["agentserve", *sys.argv[1:]])
        document = report.Report(
            "tiers", command, report.machine(), report.versions(), found.rows, found.notes, found.skipped
        )
        typer.echo(f"written to {report.write(document, results)}")


def _engine(flags: dict[str, str], parts: set[Part], sizes: tuple[int, int, int]) -> EngineSettings | None:
    """sizes: tokens of the session, of the result, rounds. None: no part needs the engine."""
    from agentserve.bench.tiers import resume, run, steps

    if not parts - {Part.MOVES}:
        return None
    return run.EngineSettings(
        flags,
        resume.Plan(*sizes) if Part.RESUME in parts else None,
        steps.Plans() if Part.STEPS in parts else None,
    )


def _show(found: Findings) -> None:
    table = Table(box=None, header_style="bold")
    for title, side in (
        ("", "left"), ("median", "right"), ("limit", "right"), ("of limit", "right"), ("asked", "left"),
    ):  # fmt: skip
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in found.rows:
        limit = f"{row.limit:,.2f} ({row.limit_name})" if row.limit else ""
        fraction = f"{row.fraction:.0%}" if row.fraction else ""
        table.add_row(row.name, f"{row.value:,.3g} {row.unit}", limit, fraction, row.asked)
    (Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)).print(table)
    for name, reason in found.skipped.items():
        typer.echo(f"not measured: {name}: {reason}")
    for note in found.notes:
        typer.echo(note)
