"""Group commit: one thread writes what has come since its last transaction, so that the event loop
never waits for a disk, and many turns that end together share one sync."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentserve.server.sessions.book import Booking, StorageError
from agentserve.server.sessions.changes import Change, Check, Fold, Forget, Look, Put

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds that a client waits for the disk


@dataclass(frozen=True, slots=True)
class Failure:
    """The disk does not take what it is given."""

    since: float  # Unix time
    reason: str


@dataclass(frozen=True, slots=True)
class _Order:
    changes: tuple[Change, ...]
    lasting: bool  # to be made up for when the disk is back
    done: Booking


class GroupWriter:
    """Writes in the order of `put`. All of a group fails together; what lasts is written again with
    the next group, before it."""

    def __init__(
        self,
        write: Callable[[Sequence[Change]], None],
        wall: Callable[[], float],
        patience: float = PATIENCE,
        *,
        what: str = "sessions",
    ) -> None:
        """`write`: all or nothing, synced; StorageError. `wall`: Unix time. `patience`: seconds that
        whoever waits for a change should wait. `what` it keeps, for the log."""
        self._what = what
        self._write = write
        self._wall = wall
        self._patience = patience
        self._state = threading.Condition()
        self._orders: list[_Order] = []
        self._closed = False
        self._writing = False
        self._owed: list[Change] = []  # the thread's own
        self._thread: threading.Thread | None = None
        self.failure: Failure | None = None  # changed under `_state`, read by anybody
        self.hung = False  # somebody's patience ended during the transaction that runs now
        self.short = 0  # bytes that did not fit; the disk is well when it takes as much

    def put(self, *changes: Change, lasting: bool) -> Booking:
        """Takes changes for the next group. After `close` they fail."""
        done = Booking(self._patience, self._overdue)
        done.set_running_or_notify_cancel()  # nobody can take it back
        with self._state:
            if self._closed:
                done.set_exception(StorageError("the server is shutting down"))
                return done
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._what, daemon=True)
                self._thread.start()
            self._orders.append(_Order(changes, lasting, done))
            self._state.notify()
        return done

    def close(self, patience: float) -> bool:
        """Writes what is left. False if that took longer than `patience` seconds and goes on."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join(patience)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._orders or self._closed)
                orders, self._orders = self._orders, []
                self._writing = bool(orders)
            if not orders:
                return
            self._commit(orders)

    def _commit(self, orders: list[_Order]) -> None:
        changes = _latest([*self._owed, *(change for order in orders for change in order.changes)])
        try:
            self._write(changes)
        except Exception as error:
            if not isinstance(error, StorageError):
                log.exception("writing %s failed", self._what)
                error = StorageError(f"internal error ({type(error).__name__})")
            with self._state:
                self._writing = self.hung = False
                self.short = max(self.short, _size(changes))
                self._failed(str(error))
            lasting = [change for order in orders if order.lasting for change in order.changes]
            self._owed = _latest([*self._owed, *lasting])
            for order in orders:
                order.done.set_exception(error)
            return
        self._owed = []
        with self._state:
            self._writing = self.hung = False
            if self.failure is not None and _size(changes) >= self.short:
                log.warning("%s are kept again", self._what)
                self.failure, self.short = None, 0
        for order in orders:
            order.done.set_result(None)

    def _overdue(self) -> None:
        """Somebody has stopped waiting. The disk has its say all the same, later."""
        with self._state:
            if self._writing:
                self.hung = True
                if self.failure is None:  # else what it said before is the better reason
                    self._failed(f"the disk has not answered for {self._patience:g} s")

    def _failed(self, reason: str) -> None:
        if self.failure is None:
            log.error("%s cannot be kept: %s", self._what, reason)
        since = self.failure.since if self.failure is not None else self._wall()
        self.failure = Failure(since, reason)


def _size(changes: Sequence[Change]) -> int:
    return sum(len(change.content) for change in changes if isinstance(change, Put))


def _latest(changes: Sequence[Change]) -> list[Change]:
    """Only the last word on each record, in the order of these."""
    kept: dict[tuple[object, bytes], Change] = {}
    for change in changes:
        match change:
            case Forget(session) | Fold(session):
                place: tuple[object, bytes] = (type(change), session)
            case Check() | Look():
                place = (type(change), b"")
            case _:
                place = (change.table, change.name)
        kept.pop(place, None)
        kept[place] = change
    return list(kept.values())
