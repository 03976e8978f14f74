"""Between the core and the mover: orders out, results in, and the looks that a policy has asked for.

The core decides and the mover moves; neither knows the other. What comes back and every look at the
clock are entries of the recorded log, so a replay decides the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentserve.clock import Clock
from agentserve.core.record import Entry, Ticked, Transferred
from tiering.types import Transfer, TransferDone

log = logging.getLogger(__name__)

SHORTEST_SLEEP = 0.001  # seconds: a core that always wants to be asked now costs this much rest, not a CPU
CLOSE_SECONDS = 2.0  # for the mover; less than the API process waits for its workers


class TransferCore(Protocol):
    """The engine core, as far as tiers go."""

    def take_transfers(self) -> Sequence[Transfer]:
        """Orders written since the last call."""
        ...

    def finish_transfers(self, done: Sequence[TransferDone], now: float) -> None: ...

    def next_timer(self) -> float | None:
        """When something at rest is to be looked at again; None: not before something happens."""
        ...

    def tick(self, now: float) -> None:
        """Look at what was due by now."""
        ...


class Mover(Protocol):
    """Moves bytes on threads of its own. No call blocks, but for `close`."""

    def submit(self, transfer: Transfer) -> None: ...

    def poll(self) -> Sequence[TransferDone]:
        """Transfers that have ended since the last call, each of the submitted ones once."""
        ...

    def fileno(self) -> int:
        """Readable as long as `poll` has something to give."""
        ...

    def close(self) -> None: ...


class Log(Protocol):
    """Where entries of the recorded log go."""

    def add(self, entry: Entry) -> None: ...


@dataclass(frozen=True, slots=True)
class Tiering:
    """A core that writes orders, and who carries them out."""

    core: TransferCore
    mover: Mover


class Exchange:
    """One worker's traffic between the two. The worker's loop is its only user."""

    def __init__(self, tiering: Tiering, clock: Clock, recorder: Log) -> None:
        self._core = tiering.core
        self._mover = tiering.mover
        self._clock = clock
        self._recorder = recorder
        self._said = ""

    def fileno(self) -> int:
        return self._mover.fileno()

    def hand_out(self) -> None:
        """Give the mover what the core has ordered."""
        for transfer in self._core.take_transfers():
            self._mover.submit(transfer)

    def take_in(self) -> bool:
        """Tell the core what has been moved and what time it is. Whether it was told anything."""
        done = tuple(self._mover.poll())
        due = self._core.next_timer()
        if not done and due is None:
            return False
        now = self._clock.now()
        if done:
            self._recorder.add(Transferred(now, done))
            self._core.finish_transfers(done, now)
            self._say(done)
        ticked = due is not None and due <= now
        if ticked:
            self._recorder.add(Ticked(now))
            self._core.tick(now)
        return bool(done) or ticked

    def _say(self, done: Sequence[TransferDone]) -> None:
        """One line per kind of failure in a row: a disk that is gone fails thousands of times."""
        for each in done:
            if each.error and each.error != self._said:
                self._said = each.error
                log.warning("transfer %d: %s", each.id, each.error)

    def sleep_at_most(self, limit: float | None) -> float | None:
        """Seconds to wait for news: until the next timer, and no longer than `limit`; None: for ever."""
        due = self._core.next_timer()
        if due is None:
            return limit
        left = max(due - self._clock.now(), SHORTEST_SLEEP)
        return left if limit is None else min(left, limit)

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the mover. A disk that does not answer keeps nobody: its thread dies with the process."""
        closing = threading.Thread(target=self._mover.close, name="closing-tiers", daemon=True)
        closing.start()
        closing.join(patience)
        if closing.is_alive():
            log.warning("a transfer does not end; leaving without it")
