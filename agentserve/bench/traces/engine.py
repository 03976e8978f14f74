"""The real engine as a stage: one model, loaded once; for each cell a core, and tiers, anew."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from agentserve.bench import report
from agentserve.bench.agents.tiers import TierOptions, with_tiers
from agentserve.bench.traces.machine import RealMachine
from agentserve.clock import WallClock
from agentserve.config import load
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.scheduling.settings import DEFAULT_POLICY
from agentserve.executor.calibrate import Bounds, measure_cost
from agentserve.machine import usable_cores
from agentserve.messages import ResetPrefixCache
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import worker_spec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.experiment.cells import Identity, digest_of
from agentserve.sim.experiment.clients import Clients, Load, Promises
from agentserve.sim.experiment.engines import Entrant, configured
from agentserve.sim.experiment.run import Enough, Recorded, Run
from agentserve.sim.experiment.script import Trace
from agentserve.sim.experiment.stage import ROOM, WARM_UP, Imagined
from agentserve.sim.hardware import Hardware, hardware_named
from agentserve.values import size

FEW = 4  # sessions
CPU = "cpu-smollm2"  # whose copy rates are taken for a simulation of this machine


@dataclass(frozen=True)
class RealEngine:
    """built: with the cost of its steps. settings: as they were asked for. host: seconds that a plan takes
    here, for a simulation of it."""

    built: BuiltEngine
    tiers: TierOptions
    settings: Mapping[str, str]
    name: str  # of the model
    host: float = 0.0

    @property
    def label(self) -> str:
        return f"measured: {self.name} on {report.machine()['processor']}"

    @property
    def digest(self) -> str:
        hello = msgspec.structs.replace(self.built.hello, pid=0)
        settings = {name: value for name, value in self.settings.items() if name != "data_dir"}
        return digest_of({"hello": hello, "settings": settings, "machine": report.machine()})

    def identity(self, trace: Trace) -> Identity:
        hello = self.built.hello
        return Identity(
            model=f"{self.name} {hello.weights_digest[:16]}",
            quantisation=(
                f"weights {hello.weights}, {hello.dtype}, activations {hello.activations}, "
                f"KV {hello.kv_dtype}"
            ),
            sampler="greedy, no end of sequence",
            graph_capture="none",
            trace=f"{trace.title} {trace.digest}",
        )

    def play(
        self, entrant: Entrant, trace: Trace, load: Load, promises: Promises, enough: Enough
    ) -> Recorded:
        built = self.built
        config = configured(cast(CoreConfig, built.config), entrant, trace.weights)
        if trace.longest + ROOM > built.hello.max_model_len:
            raise ValueError(
                f"{trace.title}: contexts come to {trace.longest} tokens, the engine holds "
                f"{built.hello.max_model_len}: give more with --device-kv, or scale the trace down"
            )
        with ExitStack() as stack:
            options = self.tiers if entrant.tiers else TierOptions()
            core, mover = with_tiers(replace(built, config=config), options, stack)
            core.handle(ResetPrefixCache(0), 0.0)
            clients = Clients(trace, load, promises, built.hello.vocab_size, WARM_UP)
            machine = RealMachine(built.executor, mover, WallClock())
            run = Run(
                core, machine, clients, tenants=tuple(trace.weights), block_bytes=self.block_bytes,
                enough=enough,
            )  # fmt: skip
            return run.run()

    @property
    def block_bytes(self) -> int:
        return self.built.hello.kv_bytes // self.built.hello.pages

    def hardware(self) -> Hardware:
        """This machine with this model as a cost model: steps as fitted here, copies as on the CPU that comes
        with the package."""
        hello, config = self.built.hello, cast(CoreConfig, self.built.config)
        return msgspec.structs.replace(
            hardware_named(CPU),
            name="this machine",
            model=self.name,
            how=("steps: as fitted or measured here", "copies: as cpu-smollm2"),
            fitted=self.built.cost,
            kv_token_bytes=self.block_bytes // hello.page_size,
            page_size=hello.page_size,
            device_kv=hello.kv_bytes,
            host_kv=self.tiers.host,
            disk_kv=self.tiers.disk,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
        )  # fmt: skip

    def imagined(self) -> Imagined:
        return Imagined(self.hardware(), self.host)


def with_cost(built: BuiltEngine) -> BuiltEngine:
    """The same, with what its steps take, measured if it does not know."""
    if built.cost != StepCost():
        return built
    hello, config = built.hello, cast(CoreConfig, built.config)
    bounds = Bounds(
        groups=len(built.groups),
        pages=min(built.pages),
        page_size=config.page_size,
        positions=hello.max_model_len,
        rows=config.max_num_seqs,
        tokens=config.max_batched_tokens,
        vocab_size=hello.vocab_size,
    )
    return replace(built, cost=measure_cost(built.executor, bounds))


def median_host(recorded: Recorded) -> float:
    """Seconds between two steps of which the second could begin at once."""
    return (
        statistics.median(each.host_ms for each in recorded.iterations) / 1e3 if recorded.iterations else 0.0
    )


def timed(stage: RealEngine, trace: Trace, promises: Promises) -> RealEngine:
    """The stage with what a plan costs here, from playing the trace's first sessions a second apart."""
    few = msgspec.structs.replace(trace, sessions=trace.sessions[:FEW])
    plain = Entrant("timed", DEFAULT_POLICY)
    recorded = stage.play(plain, few, Load(1.0), promises, lambda clients, now: False)
    return replace(stage, host=median_host(recorded))


def build(settings: Mapping[str, str]) -> RealEngine:
    """settings: as `agentserve serve` takes them. Raises ValueError or OSError, in one line."""
    below = {name: settings[name] for name in ("host_kv", "disk_kv", "data_dir") if name in settings}
    flags: dict[str, str | None] = {name: value for name, value in settings.items() if name not in below}
    options = TierOptions(
        host=size(below["host_kv"]) if "host_kv" in below else 0,
        disk=size(below["disk_kv"]) if "disk_kv" in below else 0,
        data_dir=Path(below["data_dir"]) if "data_dir" in below else None,
    )
    spec = worker_spec(load(flags, None), 0, "", os.getpid(), usable_cores())
    return RealEngine(with_cost(build_engine(spec)), options, settings, Path(settings["model"]).name)
