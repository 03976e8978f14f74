"""`agentserve bench compare`: AgentServe beside another engine on this machine, as ratios."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentserve.cli.output import fail
from agentserve.machine import usable_cores

if TYPE_CHECKING:
    from agentserve.bench.compare.result import Comparison, ScenarioRatios


class PeerName(StrEnum):
    VLLM = "vllm"
    OPENVINO = "openvino"
    LLAMACPP = "llamacpp"


def compare(
    *,
    peer: Annotated[PeerName, typer.Option(help="The engine to compare with.")],
    peers_dir: Annotated[Path, typer.Option(help="The folder with the peers' environments and models.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A .gguf file for libraries, a folder for servers.", show_default="the one in --peers-dir"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Ours: bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str | None, typer.Option(help="Ours: stored or expanded.")] = None,
    activations: Annotated[
        str | None, typer.Option(help="Ours: float or int8; int8 runs both, beside libraries.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Ours.")] = None,
    max_batched_tokens: Annotated[str | None, typer.Option(help="Ours: tokens per step.")] = None,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV pool of each, in GiB.")] = 1,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each per scenario; medians count.")] = 5,
    only: Annotated[str, typer.Option(help="Only scenarios with this in their names.")] = "",
    start_limit: Annotated[float, typer.Option(min=1, help="Seconds that a start may take.")] = 600,
    run_limit: Annotated[float, typer.Option(min=1, help="Seconds that one run may take.")] = 300,
    results: Annotated[Path | None, typer.Option(help="Write JSON into this folder.")] = None,
) -> None:
    """Run a peer and AgentServe in alternation: above 1, ours is so much faster. Takes up to 10 minutes."""
    from agentserve.bench import report
    from agentserve.bench.compare.contest import PeerFailed
    from agentserve.bench.compare.peers import compare_with
    from agentserve.bench.compare.result import portable
    from agentserve.bench.compare.settings import Settings

    given = {
        "dtype": dtype,
        "weights": weights,
        "activations": activations,
        "kv_dtype": kv_dtype,
        "max_batched_tokens": max_batched_tokens,
    }
    settings = Settings(
        peers=peers_dir.absolute(),
        model=model,
        flags={name: value for name, value in given.items() if value is not None},
        kv_gib=kv_gib,
        threads=usable_cores(),
        start_limit=start_limit,
        run_limit=run_limit,
    )
    command = shlex.join(["agentserve", *sys.argv[1:]])
    try:
        found = compare_with(peer.value, settings, runs=runs, only=only, command=command, say=_progress)
    except (PeerFailed, OSError) as error:
        fail(str(error))
    _show(found)
    if results is not None:
        names = {
            str(peers_dir.absolute()): "PEERS_DIR",
            str(peers_dir): "PEERS_DIR",
            sys.executable: "python",
        }
        typer.echo(f"written to {report.write(portable(found, names), results)}")


def _progress(row: ScenarioRatios) -> None:
    typer.echo(f"{row.name}: " + ", ".join(f"x {ratio:.2f}" for ratio in row.ratios.values()), err=True)


def _show(found: Comparison) -> None:
    first = found.setups[0]  # who runs is the same in all
    peer = first.peer.name
    table = Table(box=None, header_style="bold")
    table.add_column("")
    table.add_column(peer, justify="right")
    for ours in first.ours:
        table.add_column(ours.name, justify="right")
        table.add_column("ratio", justify="right")
    for row in found.rows:
        cells = [_cell(row, peer)]
        for ours in first.ours:
            cells += [_cell(row, ours.name), f"{row.ratios[ours.name]:.2f}"]
        table.add_row(row.name, *cells)
    Console().print(table)
    typer.echo(f"{peer} {first.peer.version}, agentserve {first.ours[0].version}")
    typer.echo("tokens/s, and ms per decode step; ratio: ours / peer, above 1 ours is faster")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _cell(row: ScenarioRatios, contestant: str) -> str:
    step = row.milliseconds(contestant)
    rate = f"{row.medians[contestant]:,.0f}"
    return rate if step is None else f"{rate} ({step:,.1f} ms)"
