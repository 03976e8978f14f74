"""Changes to sessions' records, and how a transaction makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lmdb

from agentserve.server.sessions.environment import OF_SESSIONS, Table, seal, unsealed
from agentserve.server.sessions.tally import Tally

_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Put:
    table: Table
    name: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    table: Table
    name: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """A session's head, turns and transcript."""

    session: bytes


@dataclass(frozen=True, slots=True)
class Fold:
    """A session's turns up to a number: another record says all that they said."""

    session: bytes
    last: int


@dataclass(frozen=True, slots=True)
class Check:
    """Changes nothing: every page of the file is looked at before the rest of its group is written, or as
    many as can be in so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Look:
    """Changes nothing: the file has to be where it was. By itself it makes no transaction."""


Change = Put | Delete | Forget | Fold | Check | Look


def turn_name(session: bytes, turn: int) -> bytes:
    return session + b"\0" + turn.to_bytes(_NUMBER_BYTES, "big")


class Draft:
    """An open transaction, and what it does to the tally. lmdb.Error."""

    def __init__(self, txn: Any, tables: Mapping[Table, Any], before: Tally) -> None:
        """`before`: of the records that are there."""
        self.tally = Tally()
        self._before = before
        self._txn = txn
        self._tables = tables

    def apply(self, change: Change) -> None:
        match change:
            case Put(table, name, content):
                self.put(table, name, seal(table, name, content))
            case Delete(table, name):
                self.delete(table, name)
            case Forget(session):
                for table in OF_SESSIONS:
                    for name in self._names(table, session):
                        self.delete(table, name)
                # A page that leads astray hides records; found later, they would bring the session back.
                if self._before.left(session, self.tally):
                    raise lmdb.CorruptedError("records of a session are not where they were put")
            case Fold(session, last):
                for name in self._names(Table.TURNS, session):
                    if name <= turn_name(session, last):
                        self.delete(Table.TURNS, name)
            case Check() | Look():
                pass

    def get(self, table: Table, name: bytes) -> bytes | None:
        found = self._txn.get(name, db=self._tables[table])
        return None if found is None else bytes(found)

    def put(self, table: Table, name: bytes, sealed: bytes) -> None:
        if table in OF_SESSIONS:
            self._count_out(table, name)
            self.tally.add(name, sealed)
        self._txn.put(name, sealed, db=self._tables[table])

    def delete(self, table: Table, name: bytes) -> None:
        if table in OF_SESSIONS:
            self._count_out(table, name)
        self._txn.delete(name, db=self._tables[table])

    def set_aside(self, session: bytes) -> None:
        """Put a session's records where no start reads them, as they are."""
        for table in OF_SESSIONS:
            for name in self._names(table, session):
                self.put(Table.DAMAGED, table.value + b" " + name, self.get(table, name) or b"")
                self.delete(table, name)

    def _count_out(self, table: Table, name: bytes) -> None:
        found = self.get(table, name)
        if found is not None and unsealed(table, name, found) is not None:  # others were never counted
            self.tally.take(name, found)

    def _names(self, table: Table, session: bytes) -> list[bytes]:
        """The names in a table that are the session's."""
        found: list[bytes] = []
        with self._txn.cursor(self._tables[table]) as cursor:
            if cursor.set_range(session):
                for key in cursor.iternext(values=False):
                    name = bytes(key)
                    if name != session and not name.startswith(session + b"\0"):
                        break
                    found.append(name)
        return found
