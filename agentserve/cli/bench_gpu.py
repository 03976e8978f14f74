"""`agentserve bench gpu-check`: all that is to be known of a GPU before anything is served on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentserve.cli.output import fail


def gpu_check(
    *,
    interpreter: Annotated[
        bool, typer.Option("--interpreter", help="Run the same on a CPU, in little, to see that it runs.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option(help="A part by name; may be repeated.", show_default="all")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Write gpu-KIND.json into this folder.")] = None,
) -> None:
    """Check every kernel on the GPU and time it; move KV, run a model, put agents under pressure.

    At most five minutes. Ends with status 1 where a part fails; the others run all the same.
    """
    from agentserve.bench import report
    from agentserve.bench.gpu import check
    from agentserve.bench.gpu.device import find
    from agentserve.bench.gpu.parts import PARTS
    from kernels.triton.tuning import DEFAULT, kind_of

    names = part or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        fail(f"--part {unknown[0]}: there are {', '.join(PARTS)}")
    try:
        device = find(interpreter).name
        if results is not None:
            report.writable(results)
    except (RuntimeError, OSError) as error:
        fail(str(error))
    kind = check.INTERPRETER if interpreter else kind_of(device)
    if kind == DEFAULT:
        kind = "-".join(device.lower().split())
    typer.echo(device)
    parts = check.check(interpreter, lambda one: typer.echo("\n".join(check.lines(one))), names)
    if results is not None:
        typer.echo(f"written to {report.write(check.document(device, kind, parts), results)}")
    bad = [one.name for one in parts if not one.good]
    typer.echo(f"not good: {', '.join(bad)}" if bad else "all good")
    raise SystemExit(1 if bad else 0)
