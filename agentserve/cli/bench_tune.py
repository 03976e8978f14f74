"""`agentserve bench tune-kernels`: a table of choices for the GPU at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentserve.cli.output import fail

if TYPE_CHECKING:
    from agentserve.bench.gpu.tune import Trial


def tune_kernels(
    *,
    kind: Annotated[
        str | None, typer.Option(help="What the table is called.", show_default="by the GPU's name")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel by name; may be repeated.", show_default="all")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where tables are.", show_default="kernels/triton/tuned")
    ] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Write default.json from the kernels' own choices instead.")
    ] = False,
) -> None:
    """Try every candidate of every tunable kernel on this GPU and write the fastest that compute the same.

    Nothing is tuned while serving: servers read the tables. Another table is another `numerics`, so KV on
    disk that was computed with the one of before is not used again.
    """
    from agentserve.bench import report
    from agentserve.bench.gpu.device import find
    from agentserve.bench.gpu.tune import tune
    from kernels.triton import tuning
    from kernels.triton.tunables import tunables

    folder = folder or tuning.TUNED
    listed = [one for one in tunables() if kernel is None or one.kernel in kernel]
    if not listed:
        fail(f"--kernel: there are {', '.join(sorted({one.kernel for one in tunables()}))}")
    try:
        if defaults:
            typer.echo(f"written to {tuning.write(tuning.default_table(tunables()), folder)}")
            return
        on = find(interpreted=False)
        kind = kind or tuning.kind_of(on.name, folder)
        if kind == tuning.DEFAULT:
            fail(f"{on.name} has no table yet: name it with --kind, by a word of that name")
        tuning.check_kind(kind, on.name)
        report.writable(folder)
        progress = Console(stderr=True, highlight=False)
        table = tune(
            listed, on, kind, lambda trial: progress.print(shown(trial), markup=False, soft_wrap=True)
        )
        typer.echo(f"written to {tuning.write(table, folder)}")
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))


def shown(trial: Trial) -> str:
    """A trial in one line."""
    choice = trial.choice
    tiles = "".join(f", {name} {size}" for name, size in choice.tiles.items())
    outcome = trial.refused or f"{trial.seconds * 1e6:,.1f} us"
    return f"{trial.kernel} {trial.key}: {choice.warps} warps, {choice.stages} stages{tiles}: {outcome}"
