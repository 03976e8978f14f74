"""What keeps sessions beyond the life of the process, as the directory sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.session_record import CommittedTurn, Session


class StorageError(OSError):
    """A disk that does not take what it is given; one line for the operator."""


class Book(Protocol):
    """Is told of changes in their order. No call blocks; what it gives back is done when the change
    cannot be lost any more, and fails with a StorageError.

    A change that failed is made up for with the next one that succeeds, but for `add`: a turn that
    could not be kept is rolled back.
    """

    def keep(self, session: Session, since: float | None) -> Future[None]:
        """A session as it is now, but for its turns; it waits for tools `since` (None: it does not)."""
        ...

    def open(self, session: Session, beginning: CommittedTurn, since: float | None) -> Future[None]:
        """A fork that has not begun a turn of its own."""
        ...

    def add(self, session: Session, turn: CommittedTurn, words: bytes) -> Future[None]:
        """A turn that is about to be committed; the session is as before it, and runs it. `words`: its
        transcript after it (empty: it has none)."""
        ...

    def words(self, session: Session, words: bytes) -> Future[None]:
        """Its transcript as it is now; empty: there is none any more."""
        ...

    def undo(self, session: Session, turn: int, since: float | None) -> Future[None]:
        """As `keep`, and that turn was not committed after all."""
        ...

    def forget(self, session: Session) -> Future[None]: ...


class Booking(Future[None]):
    """A change on its way to disk."""

    def __init__(self, patience: float, overdue: Callable[[], None]) -> None:
        """`patience`: seconds to wait for it; `overdue` is told of whoever did so in vain."""
        super().__init__()
        self.patience = patience
        self.overdue = overdue


async def booked(change: Future[None] | None) -> None:
    """Wait until a change cannot be lost. StorageFailed if the disk did not take it, or not in time: then
    it may still do so."""
    if change is None:
        return
    patience = change.patience if isinstance(change, Booking) else None
    try:
        # Whoever stops waiting does not undo it. (`wait_for` would lose a cancel that comes with the answer.)
        async with asyncio.timeout(patience):
            await asyncio.shield(asyncio.wrap_future(change))
    except TimeoutError as error:
        if isinstance(change, Booking):
            change.overdue()
        raise StorageFailed(f"the disk has not answered for {patience:g} s") from error
    except StorageError as error:
        raise StorageFailed(str(error)) from error
