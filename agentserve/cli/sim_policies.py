"""`agentserve sim policies`: every tier policy on the same core, over the same agents, in virtual time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentserve.cli.output import fail

if TYPE_CHECKING:
    from agentserve.sim.shootout.contest import Entrant

# Machines that are imagined unless said otherwise; enough time for some hundred turns at every pressure.
SECONDS = {"cpu-smollm2": 400.0, "h200-llama-8b": 200.0}
DEFAULT_SECONDS = 300.0
WIDTH = 140  # of tables that no terminal bounds
TUNED_AT = 4.0  # oversubscription


def policies(
    *,
    only: Annotated[str, typer.Option(help="Policies, with commas between.", show_default="all")] = "",
    hardware: Annotated[
        str,
        typer.Option(
            help="Machines to imagine; NAME@FILE has steps by `agentserve fit`.",
            show_default=", ".join(SECONDS),
        ),
    ] = "",
    oversubscription: Annotated[
        str, typer.Option(help="Contexts alive over what the device pool holds.")
    ] = "1,2,4,10",
    hints: Annotated[
        str, typer.Option(help="What clients say: none, honest, noisy, wrong, hostile, mixed.")
    ] = "none",
    events: Annotated[bool, typer.Option(help="Clients signal results before they bring them.")] = False,
    gap: Annotated[
        float | None,
        typer.Option(min=0.01, help="Seconds between bursts of agents.", show_default="by machine"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Traces per setting.")] = 3,
    seed: Annotated[int, typer.Option(min=0, max=900_000, help="The first of them.")] = 1,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Virtual time.", show_default="by machine")
    ] = None,
    tune: Annotated[
        int, typer.Option(min=0, help="Parameter sets tried for each policy, on other seeds. 0: none.")
    ] = 0,
    tune_seeds: Annotated[int, typer.Option(min=1, help="Traces that each set is tried on.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    results: Annotated[Path | None, typer.Option(help="Write JSON and charts into this folder.")] = None,
) -> None:
    """Completed turns/s, resume TTFT, recomputed tokens, bytes moved and regret of every tier policy."""
    from agentserve.bench import report as benchmark
    from agentserve.sim.hardware import HardwareError, hardware_named
    from agentserve.sim.shootout.contest import Setting, Trial, contest
    from agentserve.sim.shootout.contest import tune as sweep
    from agentserve.sim.shootout.entrants import ARENA, entrant_names, entrants
    from agentserve.sim.shootout.report import ShootOut, tables, write_charts
    from agentserve.sim.shootout.world import Outcome
    from agentserve.sim.traces.hints import HintMix

    try:
        machines = [hardware_named(name) for name in _names(hardware) or SECONDS]
        runners = entrants(_names(only) or entrant_names())
        factors = [float(factor) for factor in _names(oversubscription)]
        mixes = [HintMix(name) for name in _names(hints)]
    except (HardwareError, ValueError) as error:
        fail(str(error))
    if not factors or not mixes or not all(0 < factor <= 100 for factor in factors):
        fail("--oversubscription and --hints: at least one of each, the former above 0 and at most 100")
    spans = {each.name: seconds or SECONDS.get(each.name, DEFAULT_SECONDS) for each in machines}
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    field: dict[str, Sequence[Entrant]] = {each.name: runners for each in machines}
    if tune:
        for each in machines:
            field[each.name] = sweep(
                ARENA, each.name, runners, oversubscription=TUNED_AT, budget=tune, seeds=tune_seeds,
                seconds=spans[each.name], jobs=jobs,
            )  # fmt: skip
    settings = [
        Setting(each.name, factor, mix, events, gap)
        for each in machines
        for mix in mixes
        for factor in factors
    ]

    def said(trial: Trial, outcome: Outcome) -> None:
        if console.is_terminal:
            console.print(
                f"[dim]{trial.setting}, seed {trial.seed}, {trial.entrant.name}: {outcome.turns} turns[/]"
            )

    traces = range(seed, seed + seeds)
    standings = contest(
        ARENA, settings, field.__getitem__, traces, seconds=spans.__getitem__, jobs=jobs, progress=said
    )
    found = ShootOut(
        command=shlex.join(["agentserve", *sys.argv[1:]]),
        versions=benchmark.versions(),
        seeds=list(traces),
        seconds=spans,
        tuned=tune,
        hardware=machines,
        standings=standings,
    )
    for table in tables(standings):
        console.print(table)
    if results is not None:
        charts = write_charts(standings, results / "policies")
        typer.echo(f"written to {benchmark.write(found, results)}, {len(charts)} charts beside it")
    if found.wedged:
        fail(f"wedged: {'; '.join(found.wedged)}")


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]
