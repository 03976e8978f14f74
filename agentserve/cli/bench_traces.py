"""`agentserve bench traces`: scheduling policies over scaled traces, on the real engine in real time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from agentserve.cli import traces_options as options
from agentserve.cli.output import fail
from agentserve.cli.traces_options import Pace

if TYPE_CHECKING:
    from agentserve.bench.traces.agreement import Agreement
    from agentserve.sim.experiment.study import TraceStudy

SCALE = 1 / 16  # agents of 80K tokens and 20 turns come to 6.4K: what SmolLM2's context of 8K holds


def traces(
    *,
    only: Annotated[str, typer.Option(help="Traces that are drawn: chat, long, agents, mix.")] = "",
    trace: Annotated[
        list[Path] | None, typer.Option(help="A recorded one: Mooncake's .jsonl, or a .csv; may be repeated.")
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Policies, each also with @TOKENS per step.", show_default="the ladder")
    ] = "",
    scale: Annotated[
        float, typer.Option(help="What all lengths are multiplied by.", show_default="1/16")
    ] = SCALE,
    sessions: Annotated[int, typer.Option(min=10, help="Sessions of a trace.")] = 30,
    tenants: Annotated[str, typer.Option(help="Tenants and their weights.")] = "blue=1,green=1,red=2",
    rates: Annotated[str, typer.Option(help="Sweep: sessions per second.")] = "0.1,0.2",
    caps: Annotated[str, typer.Option(help="Also sweep concurrency: requests at the server at once.")] = "",
    cap_rate: Annotated[float, typer.Option(min=1e-6, help="The rate of that sweep.")] = 0.2,
    attempts: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 1,
    agree: Annotated[bool, typer.Option(help="Simulate this machine, too, and compare.")] = False,
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
    seed: Annotated[int, typer.Option(min=0)] = 1,
    model: Annotated[str, typer.Option()] = "smollm2-135m",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32.", show_default="bf16")] = None,
    weights: Annotated[str | None, typer.Option(help="expanded or stored.", show_default="stored")] = None,
    threads: Annotated[str | None, typer.Option(show_default="all cores")] = None,
    max_batched_tokens: Annotated[str | None, typer.Option(help="Tokens per step.")] = None,
    step_model: Annotated[
        str | None, typer.Option(help="What steps cost, by `agentserve fit`.", show_default="measured")
    ] = None,
    device_kv: Annotated[str, typer.Option(help="KV pool.")] = "512MiB",
    host_kv: Annotated[
        str, typer.Option(help="KV in the host's memory, for policies with tiers.")
    ] = "512MiB",
    disk_kv: Annotated[
        str | None, typer.Option(help="KV on disk, in --data-dir.", show_default="none")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where KV on disk lies.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Write reports here; cells and raw logs, to go on from, too.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with an earlier report (JSON).")] = None,
) -> None:
    """The experiment of `sim traces` on the real engine, lengths scaled. Resumable with --results."""
    from agentserve.server.workers.supervisor import worker_environment

    # The model runs in this process: its kernel threads must wait as a worker's do. Read by libgomp
    # when torch loads it, so before that import.
    os.environ.update(worker_environment())
    from agentserve.bench import report as benchmark
    from agentserve.bench.traces import agreement, engine
    from agentserve.sim.experiment.cells import CellStore
    from agentserve.sim.experiment.engines import LADDER, SloRule, entrant_named, promises
    from agentserve.sim.experiment.record import Pace as Kept
    from agentserve.sim.experiment.report import TracesReport
    from agentserve.sim.experiment.run import Standstill
    from agentserve.sim.experiment.study import Plan, Study
    from agentserve.sim.experiment.synthetic import NAMES

    settings = {
        "model": model, "dtype": dtype, "weights": weights, "threads": threads, "device_kv": device_kv,
        "max_batched_tokens": max_batched_tokens, "step_model": step_model, "host_kv": host_kv,
        "disk_kv": disk_kv, "data_dir": str(data_dir) if data_dir else None,
    }  # fmt: skip
    found: list[TraceStudy] = []
    agreed: list[Agreement] = []
    try:
        drawn = only or ("" if trace else ",".join(NAMES))
        asked = options.traces(
            drawn, trace or (), sessions=sessions, weights=options.tenants(tenants), seed=seed, scale=scale
        )
        entrants = [entrant_named(name) for name in options.names(policies)] or list(LADDER)
        rule = SloRule(ttft=ttft, tbt=tbt, pace=Kept(slo.value))
        plan = Plan(
            knees=False,
            rates=options.numbers(rates, "--rates"),
            caps=tuple(round(cap) for cap in options.numbers(caps, "--caps")),
            cap_rate=cap_rate,
            patience=patience,
            attempts=attempts,
        )
        stage = engine.build({name: value for name, value in settings.items() if value is not None})
        promise, promised = promises(stage.hardware(), rule), str(msgspec.to_builtins(rule))
        store = CellStore(results)
        with options.Bar() as bar:
            study = Study(stage, store, promise, promised, bar.said)
            for each in asked:
                found.append(study.trace(each, entrants, plan))
                if agree:
                    twin = Study(
                        engine.timed(stage, each, promise).imagined(), store, promise, promised, bar.said
                    )
                    agreed += agreement.agreements(found[-1], each, twin, patience)
    except (ValueError, OSError, RuntimeError, Standstill) as error:
        fail(str(error))
    report = TracesReport(
        benchmark="traces",
        command=options.command_line(),
        machine=benchmark.machine(),
        versions=benchmark.versions(),
        stage=stage.label,
        hardware=stage.hardware(),
        slo=rule,
        plan=plan,
        studies=found,
        notes=[f"simulated beside measured: {', '.join(agreement.shown(each))}" for each in agreed],
    )
    options.finish(report, results, against)
    if not all(each.holds for each in agreed):
        fail("the simulation is more than 15 % off what was measured")
