"""Writes sessions again whose records were lost while the server has them in memory.

A session is written as one record that stands for all its turns so far. One that runs a turn is written
at once without that turn, and again when it is over: what is on its way may need records that were lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.session_record import Session
from agentserve.types import SessionId, SessionState

log = logging.getLogger(__name__)

_BATCH = 64  # sessions that share a sync
_PAUSE = 0.1  # seconds between looks at sessions that run


@dataclass(frozen=True, slots=True)
class Known:
    """A session as the book was last told of it."""

    session: Session
    since: float | None

    @property
    def waits_since(self) -> float | None:
        """Since when it waits for tools; a turn that was committed has begun a wait that nobody told of."""
        session = self.session
        if session.running is not None or session.state is not SessionState.WAITING_TOOL:
            return None
        return session.active if self.since is None else self.since


class Mender:
    def __init__(self, write: Callable[[Known], Future[None]]) -> None:
        """`write`: put a whole session on its way to disk."""
        self.known: dict[SessionId, Known] = {}
        self._write = write
        self._lost: set[SessionId] = set()
        self._later: set[SessionId] = set()  # written, and to be written again when their turn is over
        self._task: asyncio.Task[None] | None = None

    def lost(self, names: Iterable[bytes]) -> None:
        """On the event loop: these have to be written again."""
        self._lost |= {SessionId(name.decode("ascii", "replace")) for name in names}
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._mend())

    async def _mend(self) -> None:
        count = 0
        while self._lost or self._later:
            count += len(self._lost & self.known.keys())
            while self._lost:
                await self._written([self._lost.pop() for _ in range(min(_BATCH, len(self._lost)))])
            over = {key for key in self._later if not self._runs(key)}
            self._later -= over
            self._lost |= over
            if self._later and not self._lost:
                await asyncio.sleep(_PAUSE)
        if count:
            log.warning("what was lost of %d session(s) was written again from memory", count)

    async def _written(self, keys: Iterable[SessionId]) -> None:
        self._later |= {key for key in keys if self._runs(key)}
        found = [self.known[key] for key in keys if key in self.known]
        writes = [self._write(known) for known in found if known.session.committed]
        for write in writes:
            with suppress(StorageError):  # it is written again with what comes
                await asyncio.shield(asyncio.wrap_future(write))

    def _runs(self, key: SessionId) -> bool:
        known = self.known.get(key)
        return known is not None and known.session.running is not None

    async def close(self) -> None:
        """Write what is left as it is now."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for key in (self._lost | self._later) & self.known.keys():
            if self.known[key].session.committed:
                self._write(self.known[key])
