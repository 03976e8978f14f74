"""What an operator reads of faults of KV on disk: the first at once, those that follow it as one line.

A damaged file makes thousands of blocks unusable, each found when it is wanted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tiering.types import TierFault

log = logging.getLogger(__name__)

BURST = 10.0  # seconds for which faults are only counted after a line about them


class FaultLog:
    def __init__(self) -> None:
        self._silent_until = 0.0
        self._held: Counter[TierFault] = Counter()

    def add(self, faults: Sequence[TierFault], now: float) -> None:
        """Say what was found, or keep it for the burst's next line."""
        self._held.update(faults)
        self.look(now)

    @property
    def due(self) -> float | None:
        """When `look` has something to say; None: not before there is more."""
        return self._silent_until if self._held else None

    def look(self, now: float) -> None:
        """Say what was kept, if the time for it has come."""
        if self._held and now >= self._silent_until:
            self.flush()
            self._silent_until = now + BURST

    def flush(self) -> None:
        """Say what was kept, now."""
        if self._held:
            told = ", ".join(f"{count} {fault.value}" for fault, count in self._held.items())
            log.warning("faults of KV on disk since the last such line: %s", told)
            self._held.clear()
