"""The real machine of the experiment, with a clock and an executor that keep to a model: then all that is
recorded is what the simulation records, since all else is the same code."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from agentserve.bench.agents.live import Mover
from agentserve.bench.traces.machine import LONG_NAP, NAP, RealMachine
from agentserve.clock import VirtualClock
from agentserve.core.plan import Plan, StepResult
from agentserve.core.ports import Executor
from agentserve.sim.experiment.clients import Clients, Load
from agentserve.sim.experiment.engines import SloRule, build_core, entrant_named, promises
from agentserve.sim.experiment.machine import ImaginedMachine, Machine
from agentserve.sim.experiment.run import Recorded, Run, Standstill
from agentserve.sim.experiment.synthetic import Lengths, draw
from agentserve.sim.hardware import hardware_named
from agentserve.sim.shootout.machine import TimedExecutor
from tiering.types import Change, Move, Transfer, TransferDone

TINY = msgspec.structs.replace(hardware_named("tiny"), device_kv=4_000_000)
TRACE = draw(
    "agents",
    8,
    lengths=Lengths(shared_prefix=16, own_prefix=80, agent_turns=3, agent_append=16, agent_output=4),
)


class Modelled:
    """An executor that takes its time on a clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._timed = TimedExecutor(TINY, 1000)

    def run(self, plan: Plan) -> StepResult:
        result = self._timed.run(plan)
        self._clock.advance_to(self._clock.now() + result.seconds)
        return result


def played(machine: Machine) -> Recorded:
    core = build_core(TINY, entrant_named("chunked"), TRACE.weights, 400)
    clients = Clients(TRACE, Load(2.0), promises(TINY, SloRule()), 1000)
    run = Run(core, machine, clients, tenants=tuple(TRACE.weights), block_bytes=TINY.block_bytes)
    return run.run()


def test_a_real_machine_that_keeps_to_the_model_is_the_simulation() -> None:
    clock = VirtualClock(1000.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance_to(clock.now() + seconds)

    real = played(RealMachine(cast(Executor, Modelled(clock)), None, clock, sleep))
    imagined = played(ImaginedMachine(TINY, 1000))
    assert len(real.requests) == len(imagined.requests) == TRACE.requests
    for mine, theirs in zip(real.requests, imagined.requests, strict=True):
        assert (mine.session, mine.turn, mine.status) == (theirs.session, theirs.turn, theirs.status)
        assert mine.arrival_ts == pytest.approx(theirs.arrival_ts, abs=1e-4)
        assert mine.every_token_ts == pytest.approx(theirs.every_token_ts, abs=1e-4)
        assert mine.prefix_hit_tokens == theirs.prefix_hit_tokens
    assert [each.served for each in real.iterations] == [each.served for each in imagined.iterations]
    assert max(slept) <= LONG_NAP


class Shelf:
    """A mover whose transfers end when it is looked at for the second time."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._moving: list[Transfer] = []

    def submit(self, transfer: Transfer) -> None:
        self._moving.append(transfer)

    def change(self, change: Change) -> None:
        self.changes.append(change)

    def poll(self) -> list[TransferDone]:
        ended, self._moving = self._moving, []
        return [TransferDone(each.id, (True,) * len(each.blocks), 0.1) for each in ended]


def test_with_a_mover_it_rests_for_moments_only() -> None:
    clock = VirtualClock()
    slept: list[float] = []
    mover = Shelf()
    machine = RealMachine(cast(Executor, Modelled(clock)), cast(Mover, mover), clock, slept.append)
    machine.order([Transfer(1, Move.SAVE, ())], [])
    assert [each.id for each in machine.done()] == [1]
    assert machine.done() == []
    assert machine.rest(None)
    assert machine.rest(100.0)
    assert slept == [NAP, NAP]


def test_where_nothing_will_happen_it_says_so() -> None:
    machine = RealMachine(cast(Executor, Modelled(VirtualClock())), None, VirtualClock())
    assert not machine.rest(None)


def test_a_standstill_is_told_and_not_waited_for() -> None:
    """Nothing can be planned, and no time is to come: as if pages were lost."""

    class Stuck(ImaginedMachine):
        def rest(self, until: float | None) -> bool:
            return False

    with pytest.raises(Standstill, match="turns wait, and nothing will happen"):
        played(Stuck(TINY, 1000))
