"""A session environment in memory, whose disk fails, waits and dies as a test says."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.changes import Change, Delete, Fold, Forget, Put, turn_name
from agentserve.server.sessions.damage import Damage
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.store import Stored


class MemoryStore:
    def __init__(self) -> None:
        self.records: dict[tuple[Table, bytes], bytes] = {}
        self.groups: list[list[Change]] = []  # as they were written
        self.error = ""  # fail with this
        self.room: int | None = None  # bytes that a group may put; more is an error
        self.applies_anyway = False  # a write that fails reaches the disk all the same
        self.open = threading.Event()  # cleared: writes wait
        self.open.set()
        self.asked = threading.Semaphore(0)  # one up for each write that began
        self.waiting: list[Change] = []  # the last that was asked for
        self.closed = False
        self.damages: list[Damage] = []
        self.lost: set[bytes] = set()  # sessions whose records are gone

    def take_lost(self) -> set[bytes]:
        lost, self.lost = self.lost, set()
        return lost

    @property
    def kept_aside(self) -> int:
        return len(self.damages)

    def write(self, changes: Sequence[Change]) -> None:
        self.waiting = list(changes)
        self.asked.release()
        assert self.open.wait(30), "a test forgot to let the disk go on"
        size = sum(len(change.content) for change in changes if isinstance(change, Put))
        if self.room is not None and size > self.room:
            raise StorageError("No space left on device")
        if not self.error or self.applies_anyway:
            self.groups.append(list(changes))
            for change in changes:
                self._apply(change)
        if self.error:
            raise StorageError(self.error)

    def _apply(self, change: Change) -> None:
        match change:
            case Put(table, name, content):
                self.records[table, name] = content
            case Delete(table, name):
                self.records.pop((table, name), None)
            case Forget(session):
                for place in self._of(session):
                    del self.records[place]
            case Fold(session, last):
                for table, name in self._of(session):
                    if table is Table.TURNS and name <= turn_name(session, last):
                        del self.records[table, name]

    def _of(self, session: bytes) -> list[tuple[Table, bytes]]:
        tables = (Table.HEADS, Table.TURNS, Table.WORDS)
        return [(t, name) for t, name in self.records if t in tables and name.split(b"\0")[0] == session]

    def words(self, session: bytes) -> bytes:
        return self.records.get((Table.WORDS, session), b"")

    def read(self, *, words: bool = True) -> dict[bytes, Stored]:
        found: dict[bytes, Stored] = {}
        for (table, name), content in self.records.items():
            session, _, number = name.partition(b"\0")
            if table is Table.HEADS:
                found.setdefault(session, Stored()).head = content
            elif table is Table.WORDS:
                found.setdefault(session, Stored()).words = content if words else b""
            elif table is Table.TURNS:
                found.setdefault(session, Stored()).turns[int.from_bytes(number, "big")] = content
        return found

    def set_aside(self, session: bytes) -> None:
        for table, name in self._of(session):
            self.records[Table.DAMAGED, name] = self.records.pop((table, name))

    def close(self) -> None:
        self.closed = True
