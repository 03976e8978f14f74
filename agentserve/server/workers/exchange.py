"""Between the core and the mover: orders out, results in, and the looks that a policy has asked for.

The core decides and the mover moves; neither knows the other. What comes back and every look at the
clock are entries of the recorded log, so a replay decides the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentserve.clock import Clock
from agentserve.core.record import Entry, Ordered, Ticked, Transferred, orders_digest
from agentserve.server.workers.fault_log import FaultLog
from tiering.types import NEWS, Change, TierFault, Transfer, TransferDone

log = logging.getLogger(__name__)

SHORTEST_SLEEP = 0.001  # seconds
CLOSE_SECONDS = 1.5  # for each of the mover's threads; the API process waits longer for its workers


class TransferCore(Protocol):
    """The engine core, as far as tiers go."""

    def take_transfers(self) -> Sequence[Transfer]:
        """Orders written since the last call."""
        ...

    def take_changes(self) -> Sequence[Change]:
        """What is to be said of orders in flight, since the last call; orders are taken first."""
        ...

    def finish_transfers(self, done: Sequence[TransferDone], now: float) -> None: ...

    def next_timer(self) -> float | None:
        """When `tick` has something to look at; None: not before something happens."""
        ...

    def tick(self, now: float) -> None:
        """Look at what was due by now; the next timer is later then."""
        ...


class Mover(Protocol):
    """Moves bytes on threads of its own. No call blocks but `close`."""

    def submit(self, transfer: Transfer) -> None: ...

    def change(self, change: Change) -> None:
        """Hurry a transfer or take it back; it is answered all the same."""
        ...

    def poll(self) -> Sequence[TransferDone]:
        """Transfers that have ended since the last call, each of the submitted ones once."""
        ...

    def fileno(self) -> int:
        """Readable as long as `poll` has something to give."""
        ...

    def close(self, timeout: float) -> bool:
        """End its threads, each within `timeout` seconds; False if one hangs. Idempotent."""
        ...


class Log(Protocol):
    """Where entries of the recorded log go; while it is not active they go nowhere."""

    @property
    def active(self) -> bool: ...

    def add(self, entry: Entry) -> None: ...


@dataclass(frozen=True, slots=True)
class Tiering:
    """A core that writes orders, and who carries them out."""

    core: TransferCore
    mover: Mover
    release: Callable[[], None]  # closes the stores, when the mover no longer uses them


class Exchange:
    """One worker's traffic between the two. The worker's loop is its only user."""

    def __init__(self, tiering: Tiering, clock: Clock, recorder: Log) -> None:
        self._core = tiering.core
        self._mover = tiering.mover
        self._release = tiering.release
        self._clock = clock
        self._recorder = recorder
        self._said = ""
        self._faults = FaultLog()

    def fileno(self) -> int:
        return self._mover.fileno()

    def hand_out(self) -> None:
        """Give the mover what the core has ordered."""
        orders, changes = self._core.take_transfers(), self._core.take_changes()
        if (orders or changes) and self._recorder.active:
            self._recorder.add(Ordered(orders_digest(orders, changes)))
        for transfer in orders:
            self._mover.submit(transfer)
        for change in changes:
            self._mover.change(change)

    def take_in(self) -> bool:
        """Tell the core what has been moved and what time it is. Whether anything was moved."""
        done = tuple(self._mover.poll())
        due = self._core.next_timer()
        if not done and due is None and self._faults.due is None:
            return False
        now = self._clock.now()
        self._faults.look(now)
        if done:
            self._recorder.add(Transferred(now, done))
            self._core.finish_transfers(done, now)
            self._say(done, now)
        if due is not None and due <= now:
            self._recorder.add(Ticked(now))
            self._core.tick(now)
        return bool(done)

    def _say(self, done: Sequence[TransferDone], now: float) -> None:
        """One line per kind of failure in a row: a disk that is gone fails thousands of times. What is
        wrong with single blocks is told in sums."""
        for each in done:
            self._faults.add(each.faults, now)
            if each.faults and TierFault.UNREADABLE not in each.faults:
                continue
            if each.error and each.error != self._said:
                self._said = each.error
                log.warning("%s: %s", "the disk" if each.id == NEWS else f"transfer {each.id}", each.error)

    def sleep_at_most(self, limit: float | None) -> float | None:
        """Seconds to wait for news: until the next timer or line of the log, and no longer than `limit`;
        None: for ever."""
        dues = [due for due in (self._core.next_timer(), self._faults.due) if due is not None]
        if not dues:
            return limit
        left = max(min(dues) - self._clock.now(), SHORTEST_SLEEP)
        return left if limit is None else min(left, limit)

    def close(self, patience: float = CLOSE_SECONDS) -> None:
        """Stop the mover, then its stores. Where a transfer does not end they stay as they are: a disk
        that does not answer keeps nobody, its thread dies with the process."""
        self._faults.flush()
        if self._mover.close(patience):
            self._release()
        else:
            log.warning("a transfer does not end; leaving without it")
