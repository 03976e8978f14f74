"""`agentserve fit`: the cost model of a machine and model, from the steps that a server recorded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentserve.cli.output import fail

if TYPE_CHECKING:
    from agentserve.core.timing.fitting import Quality
    from agentserve.records.reader import Records


def fit(
    recordings: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `serve --recording`, or files of iterations in them.", metavar="RECORDING..."
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the model here.")],
    bound: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Share of steps that shall keep to the bound.")
    ] = 0.99,
) -> None:
    """Fit what steps cost to recorded ones; `serve --step-model` and `sim run --step-model` read it.

    Three fifths of the steps are fitted to and one gives the bound; the last is held out, and judges both.
    Where steps were predicted when they ran, it is said how well.
    """
    from agentserve.core.timing import fitting
    from agentserve.core.timing.saved import SavedCost, encode_saved
    from agentserve.records.steps import as_they_ran, timed_steps, whose_steps

    read = [_read(path) for path in recordings]
    iterations = [each for records in read for each in records.iterations]
    steps, left_out = timed_steps(iterations)
    try:
        fingerprint = whose_steps(read)
        found = fitting.fit(steps, bound)
    except ValueError as error:
        fail(str(error))
    saved = SavedCost(fingerprint=fingerprint, cost=found.cost, steps=found.steps, held_out=found.held_out)
    try:
        output.write_bytes(encode_saved(saved))
    except OSError as error:
        fail(f"{output}: {error.strerror or error}")
    left_out += sum(records.damaged for records in read)
    if left_out:
        typer.echo(
            f"left out, as they could not be read or do not say what was in the step: {left_out} lines"
        )
    typer.echo(f"{found.steps} steps of {fingerprint.device}, {fingerprint.machine}")
    live = as_they_ran(iterations)
    if live is not None:
        typer.echo(_told("as it ran", live))
    typer.echo(_told("fitted to", found.inside))
    typer.echo(_told("held out", found.held_out))
    if found.unseen:
        typer.echo(f"no step had any of: {', '.join(found.unseen)}; predicted to cost nothing")
    typer.echo(f"written to {output}")


def _read(path: Path) -> Records:
    from agentserve.records.reader import read_records

    try:
        return read_records(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}")


def _told(name: str, found: Quality) -> str:
    return (
        f"{name:10} {found.steps:6} steps: off by {found.mape:.1%} on average (median {found.median:.1%}, "
        f"P95 {found.p95:.1%}); {found.exceeded:.1%} beyond the bound, which is {found.width:.2f} x predicted"
    )
