"""When sessions at rest are to be looked at again: for each, the last time that was set counts."""

from __future__ import annotations

import heapq

from agentserve.core.ledger import Known, Ledger, Stage
from agentserve.types import SessionId


class Timers:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap: list[tuple[float, int, SessionId]] = []
        self._last = 0

    def set(self, known: Known, when: float) -> None:
        self._last += 1
        known.timer = self._last
        heapq.heappush(self._heap, (when, self._last, known.id))

    @property
    def next(self) -> float | None:
        """The earliest one."""
        while self._heap and self._whose() is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Known | None:
        """A session whose time has come; None: there is no other."""
        while self._heap and self._heap[0][0] <= now:
            known = self._whose()
            heapq.heappop(self._heap)
            if known is not None:
                return known
        return None

    def _whose(self) -> Known | None:
        """The session of the first one, if it still counts."""
        _, number, session = self._heap[0]
        known = self._ledger.known.get(session)
        return known if known and known.timer == number and known.stage is Stage.RESTING else None
