"""`agentserve sim traces`: scheduling policies over traces at full size, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli import traces_options as options
from agentserve.cli.output import fail
from agentserve.cli.traces_options import Pace

if TYPE_CHECKING:
    from agentserve.sim.experiment.script import Trace
    from agentserve.sim.experiment.stage import Imagined
    from agentserve.sim.experiment.study import KneeCause, Plan, Study, TraceStudy

# Sessions per second that knees are looked for from.
GUESS = {"chat": 8.0, "long": 0.1, "agents": 0.05, "mix": 2.0}


def traces(
    *,
    only: Annotated[str, typer.Option(help="Traces that are drawn: chat, long, agents, mix.")] = "",
    trace: Annotated[
        list[Path] | None, typer.Option(help="A recorded one: Mooncake's .jsonl, or a .csv; may be repeated.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Policies, each also with @TOKENS per step.", show_default="the ladder")
    ] = "",
    hardware: Annotated[
        str, typer.Option(help="The machine to imagine; NAME@FILE: with steps as `agentserve fit` found.")
    ] = "h200-llama-8b",
    scale: Annotated[float, typer.Option(help="What all lengths are multiplied by.")] = 1.0,
    sessions: Annotated[
        int | None, typer.Option(min=10, help="Sessions of a trace.", show_default="by trace")
    ] = None,
    tenants: Annotated[str, typer.Option(help="Tenants and their weights.")] = "blue=1,green=1,red=2",
    rates: Annotated[
        str, typer.Option(help="Sweep, in multiples of the best knee (--no-knees: sessions/s).")
    ] = "0.5,0.75,1,1.25,1.5",
    caps: Annotated[str, typer.Option(help="Also sweep concurrency: requests at the server at once.")] = "",
    cap_rate: Annotated[float, typer.Option(min=1e-6, help="The rate of that sweep, like --rates.")] = 1.0,
    steps: Annotated[
        str, typer.Option(help="Tokens per step, of which each policy gets its best.")
    ] = "512,2048,8192",
    knees: Annotated[bool, typer.Option(help="Look for every policy's knee.")] = True,
    causes: Annotated[bool, typer.Option(help="Say what the knee of ours is due to, and confirm it.")] = True,
    ttft: Annotated[
        float | None, typer.Option(min=1e-6, help="SLO of all requests (s).", show_default="5 x unloaded")
    ] = None,
    tbt: Annotated[
        float | None, typer.Option(min=1e-6, help="SLO of gaps, P99 (s).", show_default="5 x unloaded")
    ] = None,
    slo: Annotated[
        Pace, typer.Option(help="How TBT is promised: for gaps (P99), or as a deadline of each token.")
    ] = Pace.GAPS,
    patience: Annotated[
        float | None, typer.Option(min=1e-3, help="Seconds after which clients give a request up.")
    ] = None,
    page: Annotated[
        int | None, typer.Option(min=1, help="Tokens per page.", show_default="the machine's")
    ] = None,
    host: Annotated[
        float, typer.Option(min=0.0, help="Seconds that the scheduler takes for a step.")
    ] = 0.0003,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    results: Annotated[
        Path | None, typer.Option(help="Write reports here; cells and raw logs, to go on from, too.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with an earlier report (JSON).")] = None,
) -> None:
    """Goodput, latency, fairness and knees of scheduling policies over traces. Resumable with --results."""
    from agentserve.bench import report as benchmark
    from agentserve.sim.experiment.cells import CellStore
    from agentserve.sim.experiment.claims import claims
    from agentserve.sim.experiment.engines import LADDER, SloRule, entrant_named, promises
    from agentserve.sim.experiment.record import Pace as Kept
    from agentserve.sim.experiment.report import TracesReport
    from agentserve.sim.experiment.run import Standstill
    from agentserve.sim.experiment.stage import Imagined
    from agentserve.sim.experiment.study import Plan, Study
    from agentserve.sim.experiment.synthetic import NAMES
    from agentserve.sim.hardware import HardwareError, hardware_named

    found: list[TraceStudy] = []
    due: list[KneeCause] = []
    try:
        drawn = only or ("" if trace else ",".join(NAMES))
        asked = options.traces(
            drawn, trace or (), sessions=sessions, weights=options.tenants(tenants), seed=seed, scale=scale
        )
        entrants = [entrant_named(name) for name in options.names(policies)] or list(LADDER)
        imagined = hardware_named(hardware)
        base, at, file = hardware.partition("@")
        imagined = msgspec.structs.replace(imagined, name=f"{base}{at}{Path(file).name}")
        stage = Imagined(msgspec.structs.replace(imagined, page_size=page or imagined.page_size), host)
        rule = SloRule(ttft=ttft, tbt=tbt, pace=Kept(slo.value))
        plan = Plan(
            knees=knees,
            rates=options.numbers(rates, "--rates"),
            caps=tuple(round(cap) for cap in options.numbers(caps, "--caps")),
            cap_rate=cap_rate,
            steps=tuple(round(step) for step in options.numbers(steps, "--steps")),
            patience=patience,
        )
        with options.Bar() as bar:
            study = Study(
                stage,
                CellStore(results),
                promises(stage.hardware, rule),
                str(msgspec.to_builtins(rule)),
                bar.said,
            )
            for each in asked:
                near = msgspec.structs.replace(plan, guess=each.own_rate or GUESS.get(each.name, 1.0))
                found.append(study.trace(each, entrants, near))
                if knees and causes:
                    due += _causes(study, found[-1], each, near, stage)
    except (HardwareError, ValueError, OSError, Standstill) as error:
        fail(str(error))
    report = TracesReport(
        benchmark=f"traces-{base}",
        command=options.command_line(),
        machine={},
        versions=benchmark.versions(),
        stage=stage.label,
        hardware=stage.hardware,
        slo=rule,
        plan=plan,
        studies=found,
        causes=due,
        claims=claims(found),
    )
    options.finish(report, results, against)


def _causes(study: Study, found: TraceStudy, trace: Trace, plan: Plan, stage: Imagined) -> list[KneeCause]:
    """Of the last entrant, which of the ladder is ours."""
    stand = found.stands[-1]
    if stand.knee is None or not stand.knee.found:
        return []
    return [study.cause(trace, stand.entrant, stand.knee, plan, dict(stage.with_more()))]
