"""Agents and their sessions on disk: an LMDB of their own under the data directory.

The file, its one writer and its group commit are those of sessions (`sessions/store.py`): a record is
believed only with its digest, and what a running server's file lost is written again from memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from agentserve.server.sessions.book import booked
from agentserve.server.sessions.changes import Delete, Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.store import SessionStore
from agentserve.server.sessions.writer import Failure, GroupWriter

log = logging.getLogger(__name__)

_TABLE = Table.WORDS  # one record a thing
LAST_PATIENCE = 10.0  # seconds the last writes may take when the server leaves


class Disk:
    """A `AgentsBook`. Its methods are called on the event loop, or before there is one."""

    def __init__(
        self,
        folder: Path,
        wall: Callable[[], float],
        patience: float,
        open_store: Callable[[Path], SessionStore] = SessionStore,
    ) -> None:
        """ValueError, in one line, where nothing can be kept there. `patience`: seconds that a client waits
        for the disk."""
        self._store = open_store(folder)
        self._writer = GroupWriter(self._store.write, wall, patience)
        self.content_of: Callable[[str], bytes | None] = lambda name: None  # of a record, as it is now

    @property
    def failure(self) -> Failure | None:
        return self._writer.failure

    def read(self) -> dict[str, bytes]:
        """All records that are there."""
        found = self._store.read().items()
        return {name.decode(errors="replace"): stored.words for name, stored in found if stored.words}

    def put(self, name: str, content: bytes) -> Future[None]:
        for lost in self._store.take_lost():
            now = self.content_of(lost.decode(errors="replace"))
            if now is not None:
                self._writer.put(Put(_TABLE, lost, now), lasting=True)
        return self._writer.put(Put(_TABLE, name.encode(), content), lasting=True)

    def drop(self, name: str) -> Future[None]:
        return self._writer.put(Delete(_TABLE, name.encode()), lasting=True)

    async def close(self) -> None:
        """Write what is left, and let another server in."""
        if not self._writer.hung:
            with suppress(StorageFailed, TimeoutError):
                owed = self._writer.put(Put(Table.META, b"tried", b""), lasting=False)  # and all before it
                await asyncio.wait_for(booked(owed), LAST_PATIENCE)
        if await asyncio.to_thread(self._writer.close, LAST_PATIENCE):
            self._store.close()
        else:
            log.error("the disk takes too long: the last items of agents may be lost")
