"""Group commit: one thread writes what has come since its last transaction, so that the event loop
never waits for a disk, and many turns that end together share one sync."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.store import Change, Forget

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """The disk does not take what it is given."""

    since: float  # Unix time
    reason: str


@dataclass(frozen=True, slots=True)
class _Order:
    changes: tuple[Change, ...]
    lasting: bool  # to be made up for when the disk is back
    done: Future[None] = field(default_factory=Future)


class GroupWriter:
    """Writes in the order of `put`. All of a group fails together; what lasts is written again with
    the next group, before it."""

    def __init__(self, write: Callable[[Sequence[Change]], None], wall: Callable[[], float]) -> None:
        """`write`: all or nothing, synced; StorageError. `wall`: Unix time."""
        self._write = write
        self._wall = wall
        self._state = threading.Condition()
        self._orders: list[_Order] = []
        self._closed = False
        self._owed: list[Change] = []  # the thread's own
        self._thread: threading.Thread | None = None
        self.failure: Failure | None = None  # set by the thread, read by anybody

    def put(self, *changes: Change, lasting: bool) -> Future[None]:
        """Takes changes for the next group. After `close` they fail."""
        order = _Order(changes, lasting)
        order.done.set_running_or_notify_cancel()  # nobody can take it back
        with self._state:
            if self._closed:
                order.done.set_exception(StorageError("the server is shutting down"))
                return order.done
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
                self._thread.start()
            self._orders.append(order)
            self._state.notify()
        return order.done

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
            if not orders:
                return
            self._commit(orders)

    def _commit(self, orders: list[_Order]) -> None:
        changes = [change for order in orders for change in order.changes]
        try:
            self._write(_latest([*self._owed, *changes]))
        except Exception as error:
            if not isinstance(error, StorageError):
                log.exception("writing sessions failed")
                error = StorageError(f"internal error ({type(error).__name__})")
            self._failed(str(error))
            lasting = [change for order in orders if order.lasting for change in order.changes]
            self._owed = _latest([*self._owed, *lasting])
            for order in orders:
                order.done.set_exception(error)
            return
        self._owed = []
        if self.failure is not None:
            log.warning("sessions are kept again")
            self.failure = None
        for order in orders:
            order.done.set_result(None)

    def _failed(self, reason: str) -> None:
        if self.failure is None:
            log.error("sessions cannot be kept: %s", reason)
        since = self.failure.since if self.failure is not None else self._wall()
        self.failure = Failure(since, reason)


def _latest(changes: Sequence[Change]) -> list[Change]:
    """Only the last word on each record, in the order of these."""
    kept: dict[tuple[object, bytes], Change] = {}
    for change in changes:
        place = ("all", change.session) if isinstance(change, Forget) else (change.table, change.name)
        kept.pop(place, None)
        kept[place] = change
    return list(kept.values())
