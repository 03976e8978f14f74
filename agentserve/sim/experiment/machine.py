"""What a run happens on: clock, device, mover of KV. Imagined here; the real one is in `bench/traces`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentserve.clock import VirtualClock
from agentserve.core.plan import Plan, StepResult
from agentserve.sim.hardware import Hardware
from agentserve.sim.shootout.machine import TimedExecutor, VirtualMover
from tiering.types import Change, Transfer, TransferDone


class Machine(Protocol):
    """Seconds of its clock count from the run's beginning."""

    def now(self) -> float: ...

    def planned(self) -> None:
        """A plan was made: an imagined scheduler takes its time for it here, a real one has."""
        ...

    def run(self, plan: Plan) -> StepResult: ...

    def order(self, transfers: Sequence[Transfer], changes: Sequence[Change]) -> None: ...

    def done(self) -> list[TransferDone]:
        """Transfers that have ended by now."""
        ...

    def rest(self, until: float | None) -> bool:
        """Let time pass until then, or until a transfer ends. False: neither is to come."""
        ...


class ImaginedMachine:
    """Virtual time: a step takes what the hardware's model says, a plan `host` seconds."""

    def __init__(self, hardware: Hardware, vocab_size: int, host: float = 0.0) -> None:
        self._executor = TimedExecutor(hardware, vocab_size)
        self._mover = VirtualMover(hardware)
        self._clock = VirtualClock()
        self._host = host

    def now(self) -> float:
        return self._clock.now()

    def planned(self) -> None:
        self._clock.advance_to(self._clock.now() + self._host)

    def run(self, plan: Plan) -> StepResult:
        result = self._executor.run(plan)
        self._clock.advance_to(self._clock.now() + result.seconds)
        return result

    def order(self, transfers: Sequence[Transfer], changes: Sequence[Change]) -> None:
        self._mover.submit(transfers, self._clock.now())
        self._mover.change(changes)

    def done(self) -> list[TransferDone]:
        return self._mover.done_by(self._clock.now())

    def rest(self, until: float | None) -> bool:
        times = [time for time in (until, self._mover.next_done()) if time is not None]
        if not times:
            return False
        self._clock.advance_to(max(min(times), self._clock.now()))
        return True
