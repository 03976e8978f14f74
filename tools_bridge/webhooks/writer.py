"""Group commit: one thread writes what has come since its last transaction, so that the event loop never
waits for a disk, and what comes together shares one sync."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tools_bridge.webhooks.store import Change, Damaged, StorageError, Table

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """The disk does not take what it is given."""

    since: float  # Unix time
    reason: str


class Disk(Protocol):
    """`Store`, and what fails in tests. StorageError."""

    def write(self, changes: Sequence[Change]) -> None: ...

    def rebuild(self, changes: Sequence[Change], reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Order:
    changes: Sequence[Change]
    lasting: bool  # to be made up for when the disk is back
    done: Future[None]
    rebuild: str | None = None  # why; all there is, instead of changes


class Writer:
    """Writes in the order of `put`. All of a group fails together; what lasts is written again with the next
    group, before it."""

    def __init__(self, disk: Disk, now: Callable[[], float], damaged: Callable[[str], None]) -> None:
        """`damaged`: called on the writer's thread when the file has to be made again."""
        self._disk = disk
        self._now = now
        self._damaged = damaged
        self._state = threading.Condition()
        self._orders: list[_Order] = []
        self._closed = False
        self._owed: dict[tuple[Table, bytes], bytes | None] = {}  # the thread's own
        self._thread: threading.Thread | None = None
        self.failure: Failure | None = None  # read by anybody
        self.hung = False  # somebody's patience ended during the transaction that runs now

    def put(self, changes: Sequence[Change], lasting: bool) -> Future[None]:
        """After `close` it fails."""
        return self._order(changes, lasting, None)

    def rebuild(self, changes: Sequence[Change], reason: str) -> Future[None]:
        """All that there is now; what was put before is part of it."""
        return self._order(changes, False, reason)

    def overdue(self) -> None:
        """Somebody has stopped waiting. The disk has its say all the same, later."""
        with self._state:
            if self._thread is not None:
                self.hung = True
                self._failed("the disk does not answer")

    def close(self, patience: float) -> bool:
        """Writes what is left. False if that took longer than `patience` seconds and goes on."""
        with self._state:
            self._closed = True
            self._state.notify()
        if self._thread is not None:
            self._thread.join(patience)
        return self._thread is None or not self._thread.is_alive()

    def _order(self, changes: Sequence[Change], lasting: bool, rebuild: str | None) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # nobody can take it back
        with self._state:
            if self._closed:
                done.set_exception(StorageError("the server is shutting down"))
                return done
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
                self._thread.start()
            self._orders.append(_Order(changes, lasting, done, rebuild))
            self._state.notify()
        return done

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._orders or self._closed)
                orders, self._orders = self._orders, []
            if not orders:
                return
            self._commit(orders)

    def _commit(self, orders: list[_Order]) -> None:
        owed = dict(self._owed)
        for order in orders:
            owed.update({(table, name): content for table, name, content in order.changes})
        # What was put behind a rebuild is newer than what it has, and what was put before is part of it.
        reasons = [order.rebuild for order in orders if order.rebuild is not None]
        changes: list[Change] = [(table, name, content) for (table, name), content in owed.items()]
        try:
            if reasons:
                self._disk.rebuild([change for change in changes if change[2] is not None], reasons[-1])
            else:
                self._disk.write(changes)
        except Exception as error:
            self._fail(orders, error)
            return
        self._owed = {}
        with self._state:
            self.hung = False
            if self.failure is not None:
                log.warning("webhooks are kept again")
                self.failure = None
        for order in orders:
            order.done.set_result(None)

    def _fail(self, orders: list[_Order], error: Exception) -> None:
        if not isinstance(error, StorageError):
            log.exception("writing webhooks failed")
            error = StorageError(f"internal error ({type(error).__name__})")
        with self._state:
            self.hung = False
            self._failed(str(error))
        for order in orders:
            if order.lasting:
                self._owed.update({(table, name): content for table, name, content in order.changes})
        for order in orders:
            order.done.set_exception(error)
        if isinstance(error, Damaged):
            self._damaged(str(error))

    def _failed(self, reason: str) -> None:
        if self.failure is None:
            log.error("webhooks cannot be kept: %s", reason)
            self.failure = Failure(self._now(), reason)
