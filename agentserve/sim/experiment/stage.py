"""Where a cell runs: an imagined machine here, the real engine in `bench/traces`."""

from __future__ import annotations

from typing import Protocol

import msgspec

from agentserve.core.cost import StepCost
from agentserve.sim.experiment.cells import Identity, digest_of
from agentserve.sim.experiment.clients import Clients, Load, Promises
from agentserve.sim.experiment.engines import Entrant, build_core
from agentserve.sim.experiment.machine import ImaginedMachine
from agentserve.sim.experiment.run import Enough, Recorded, Run
from agentserve.sim.experiment.script import Trace
from agentserve.sim.hardware import Hardware
from agentserve.sim.shootout.world import VOCAB_SIZE

WARM_UP = 0.1  # of the sessions, the first ones: they do not count
ROOM = 64  # tokens beyond a trace's longest context
MORE = 1.25  # of a resource, to see whether the knee was its doing


class Stage(Protocol):
    @property
    def label(self) -> str:
        """What its figures are of, in a few words: stands beside every one of them."""
        ...

    @property
    def digest(self) -> str:
        """Names all that decides a run on it, but for trace, load and entrant."""
        ...

    def identity(self, trace: Trace) -> Identity: ...

    def play(
        self, entrant: Entrant, trace: Trace, load: Load, promises: Promises, enough: Enough
    ) -> Recorded:
        """Raises ValueError if the trace does not fit, Standstill if it gets stuck."""
        ...


class Imagined(msgspec.Struct, frozen=True):
    """A machine as a cost model. `host`: seconds that its scheduler takes for a step."""

    hardware: Hardware
    host: float = 0.0

    @property
    def label(self) -> str:
        return f"simulated: {self.hardware.name}"

    @property
    def digest(self) -> str:
        return digest_of(self)

    def identity(self, trace: Trace) -> Identity:
        return Identity(
            model=self.hardware.model,
            quantisation="as in the model's line",
            sampler="greedy, no end of sequence",
            graph_capture="none",
            trace=f"{trace.title} {trace.digest}",
        )

    def play(
        self, entrant: Entrant, trace: Trace, load: Load, promises: Promises, enough: Enough
    ) -> Recorded:
        hardware = self.hardware
        if trace.longest + ROOM > hardware.pool_tokens:
            raise ValueError(
                f"{trace.title}: contexts come to {trace.longest} tokens, {hardware.name} holds "
                f"{hardware.pool_tokens}: scale the trace down"
            )
        core = build_core(hardware, entrant, trace.weights, trace.longest + ROOM)
        clients = Clients(trace, load, promises, VOCAB_SIZE, WARM_UP)
        machine = ImaginedMachine(hardware, VOCAB_SIZE, self.host)
        run = Run(
            core, machine, clients, tenants=tuple(trace.weights), block_bytes=hardware.block_bytes,
            enough=enough,
        )  # fmt: skip
        return run.run()

    def with_more(self) -> dict[str, Imagined]:
        """The same with a quarter more of one resource each, by the cause that this would be a cure of."""
        hardware, fitted = self.hardware, self.hardware.fitted
        quick: dict[str, object] = {
            name: getattr(hardware, name) / MORE
            for name in ("fixed", "per_row", "per_token", "per_read", "per_context")
        }
        if fitted is not None:
            quick["fitted"] = quicker(fitted, MORE)
        links: dict[str, object] = {
            name: getattr(hardware, name) * MORE
            for name in ("save_rate", "load_rate", "write_rate", "fetch_rate")
        }
        more: dict[str, dict[str, object]] = {
            "compute": quick,
            "KV": {"device_kv": round(hardware.device_kv * MORE)},
            "swap bandwidth": links,
        }
        found = {
            cause: Imagined(msgspec.structs.replace(hardware, **changes), self.host)
            for cause, changes in more.items()
        }
        if self.host:
            found["host"] = Imagined(hardware, self.host / MORE)
        return found


def quicker(cost: StepCost, times: float) -> StepCost:
    """Steps that take so many times less."""
    return msgspec.structs.replace(cost, pace=cost.pace / times, extra=cost.extra / times)
