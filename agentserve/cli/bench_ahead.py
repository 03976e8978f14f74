"""`agentserve bench kernels-aot`: every GPU kernel compiled for GPUs that need not be there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentserve.cli.output import fail
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from kernels.triton.aot import Compiled


def kernels_aot(
    *,
    target: Annotated[
        list[int] | None, typer.Option(help="80, 90 or 100; may be repeated.", show_default="all")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="A case by name; may be repeated.", show_default="some of each")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All cases: an hour on two cores.")] = False,
    decode: Annotated[bool, typer.Option(help="All cases that are in decode steps.")] = False,
    kernel: Annotated[
        list[str] | None, typer.Option(help="All cases of a kernel, as the table calls it; may be repeated.")
    ] = None,
    add: Annotated[
        bool,
        typer.Option(help="Keep what aot.json in --results has of other cases: for tables made in parts."),
    ] = False,
    processes: Annotated[int | None, typer.Option(min=1, show_default="all cores")] = None,
    results: Annotated[Path | None, typer.Option(help="Write aot.json into this folder.")] = None,
    readme: Annotated[Path | None, typer.Option(help="Write the table into this file.")] = None,
) -> None:
    """Compile GPU kernels ahead of time and read registers, spills, shared memory. Needs no GPU.

    At most four cases of each kernel, in some ten minutes, unless others are asked for.

    Ends with status 1 where a case does not compile or fit, or a decode kernel spills registers.
    """
    from agentserve.bench import report
    from agentserve.bench.gpu import ahead
    from kernels.triton import aot, catalogue
    from kernels.triton.targets import TARGETS

    chosen = tuple(target or TARGETS)
    if unknown := sorted(set(chosen) - set(TARGETS)):
        fail(f"--target: there is no {', '.join(map(str, unknown))}")
    try:
        if results is not None:
            report.writable(results)
    except OSError as error:
        fail(str(error))
    known = catalogue.cases(chosen[0])
    names = case or (list(known) if every else catalogue.selected(known))
    if decode or kernel:
        chosen_kernels = kernel or list(dict.fromkeys(map(catalogue.kernel_name, known.values())))
        names = catalogue.of_kernels(known, chosen_kernels, decode=decode)
        if not names:
            fail("there is no such case")
    progress, done = Console(stderr=True, highlight=False), 0
    total = len(names) * len(chosen)

    def told(one: Compiled) -> None:
        nonlocal done
        done += 1
        progress.print(f"[{done}/{total}] {shown(one)}", markup=False, soft_wrap=True)

    try:
        found = aot.compile_all(chosen, names, processes=processes or usable_cores(), told=told)
    except (ValueError, RuntimeError) as error:
        fail(str(error))
    document = ahead.report(shlex.join(["agentserve", *sys.argv[1:]]), found)
    if add and results is not None:
        try:
            document = ahead.joined(ahead.read(results / "aot.json"), document, list(known))
        except (ValueError, OSError) as error:
            fail(f"--add: {error}")
    typer.echo(ahead.table(document))
    if results is not None:
        typer.echo(f"written to {report.write(document, results)}")
    if readme is not None:
        try:
            readme.write_text(ahead.into(readme.read_text(), ahead.table(document)))
        except (ValueError, OSError) as error:
            fail(f"{readme}: {error}")
    wrong = [one for one in found if one.fault]
    for one in wrong:
        typer.echo(f"{one.case} on sm_{one.capability}: {one.fault}", err=True)
    raise SystemExit(1 if wrong else 0)


def shown(one: Compiled) -> str:
    """A case on a target, in one line."""
    figures = (
        f"{one.registers} registers, {one.spilled} B spilled, {one.shared} B shared, "
        f"{one.blocks} blocks of {one.warps} warps ({one.bound})"
    )
    return f"{one.case} sm_{one.capability}: {one.error or figures}"
