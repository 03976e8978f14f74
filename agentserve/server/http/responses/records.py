"""Responses, conversations and spent approvals on disk: an LMDB of their own under the data directory.

The file, its one writer and its group commit are those of sessions (`sessions/store.py`): a record is
believed only with its digest, damage costs the records that it hit, and what a running server's file lost
is written again from memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from agentserve.server.http.responses.conversations import HEAD, PART, Entry, Head, named_part
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.responses.spent import SPENT, SpentApproval
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.changes import Delete, Put
from agentserve.server.sessions.damage import Damage
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.errors import StorageFailed
from agentserve.server.sessions.retry import Retry
from agentserve.server.sessions.store import SessionStore
from agentserve.server.sessions.writer import Failure, GroupWriter

log = logging.getLogger(__name__)

_TABLE = Table.WORDS  # one record a thing
LAST_PATIENCE = 10.0  # seconds the last writes may take when the server leaves


class Records:
    """A `ResponseBook`. Its methods are called on the event loop, or before there is one."""

    def __init__(self, folder: Path, wall: Callable[[], float], patience: float) -> None:
        """ValueError, in one line, where they cannot be kept there. `patience`: seconds that a client waits
        for the disk."""
        self._store = SessionStore(folder)
        self._writer = GroupWriter(self._store.write, wall, patience, what="responses")
        self._retry = Retry(self._writer, lambda change: self._writer.put(change, lasting=False))
        self.content_of: Callable[[str], bytes | None] = lambda name: None  # of a record, as it is now
        self.skipped = 0  # records that could not be read at the start
        self.responses: list[Kept] = []
        self.conversations: list[Head] = []
        self.parts: dict[str, dict[int, list[Entry]]] = {}  # by conversation, and number of the first item
        self.spent: list[SpentApproval] = []
        self._read()

    @property
    def failure(self) -> Failure | None:
        return self._writer.failure

    @property
    def damages(self) -> Sequence[Damage]:
        """What was wrong with the file, since the start."""
        return self._store.damages

    async def ready(self) -> None:
        """Try a disk that failed once more. StorageFailed if it still does."""
        await self._retry.ready()

    def retry(self) -> None:
        """As `ready`; nobody waits for it."""
        self._retry.again()

    def put(self, name: str, content: bytes) -> Future[None]:
        return self.write([(name, content)])

    def drop(self, name: str) -> Future[None]:
        return self.write([(name, None)])

    def write(self, records: Sequence[tuple[str, bytes | None]]) -> Future[None]:
        self._mend()
        changes = (_change(name, content) for name, content in records)
        return self._writer.put(*changes, lasting=True)

    async def close(self) -> None:
        """Write what is left, and let another server in."""
        if not self._writer.hung:
            with suppress(StorageFailed, TimeoutError):
                owed = self._writer.put(Put(Table.META, b"tried", b""), lasting=False)  # and all before it
                await asyncio.wait_for(booked(owed), LAST_PATIENCE)
        if await asyncio.to_thread(self._writer.close, LAST_PATIENCE):
            self._store.close()
        else:
            log.error("the disk takes too long: the last responses may be lost")

    def _read(self) -> None:
        for name, stored in self._store.read().items():
            try:
                self._take(name.decode(), stored.words)
            except ValueError:  # msgspec's and Unicode's are, too
                self.skipped += 1

    def _take(self, name: str, content: bytes) -> None:
        if name.startswith(HEAD):
            self.conversations.append(msgspec.msgpack.decode(content, type=Head))
        elif name.startswith(PART):
            id_, first = named_part(name)
            self.parts.setdefault(id_, {})[first] = msgspec.msgpack.decode(content, type=list[Entry])
        elif name.startswith(SPENT):
            self.spent.append(msgspec.msgpack.decode(content, type=SpentApproval))
        else:
            self.responses.append(msgspec.msgpack.decode(content, type=Kept))

    def _mend(self) -> None:
        """What the file lost while it was in use is written again."""
        for name in self._store.take_lost():
            content = self.content_of(name.decode())
            if content is not None:
                self._writer.put(Put(_TABLE, name, content), lasting=True)


def _change(name: str, content: bytes | None) -> Put | Delete:
    return Delete(_TABLE, name.encode()) if content is None else Put(_TABLE, name.encode(), content)
