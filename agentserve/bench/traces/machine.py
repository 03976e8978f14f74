"""The real machine of a run: its clock, its executor, its mover of KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentserve.bench.agents.live import Mover
from agentserve.clock import Clock
from agentserve.core.plan import Plan, StepResult
from agentserve.core.ports import Executor
from tiering.types import Change, Transfer, TransferDone

NAP = 0.002  # seconds between looks while copies may be under way
LONG_NAP = 0.05
SHORTEST = 1e-6  # what is left until a moment may be too little to pass


class RealMachine:
    """Its seconds count from when it was made."""

    def __init__(
        self,
        executor: Executor,
        mover: Mover | None,
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._executor = executor
        self._mover = mover
        self._clock = clock
        self._sleep = sleep
        self._began = clock.now()

    def now(self) -> float:
        return self._clock.now() - self._began

    def planned(self) -> None:
        """It took its time already."""

    def run(self, plan: Plan) -> StepResult:
        return self._executor.run(plan)

    def order(self, transfers: Sequence[Transfer], changes: Sequence[Change]) -> None:
        if self._mover is None:
            return
        for transfer in transfers:
            self._mover.submit(transfer)
        for change in changes:
            self._mover.change(change)

    def done(self) -> list[TransferDone]:
        return self._mover.poll() if self._mover is not None else []

    def rest(self, until: float | None) -> bool:
        """With a mover, for a moment only: a transfer may end at any time."""
        if until is None and self._mover is None:
            return False
        left = NAP if until is None else max(until - self.now(), SHORTEST)
        self._sleep(min(left, NAP if self._mover is not None else LONG_NAP))
        return True
