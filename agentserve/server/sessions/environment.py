"""The LMDB of a server's sessions as a file: its tables, how its records are sealed, how it is opened,
whether it is sound, and what can be read of one that is not."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Any

from agentserve.server.sessions.pages import Meta, PageFile
from agentserve.server.sessions.survey import Survey
from agentserve.server.sessions.tally import TALLY_NAME, Tally, Told

FIRST_MAP = 64 << 20  # bytes of address space; doubled when full, so the disk is the limit
DATA = "data.mdb"
FRESH = "data.new.mdb"  # one that is being made
FORMAT = 1
FORMAT_NAME = b"format"
DIGEST_BYTES = 8

Open = Callable[..., Any]
"""As `lmdb.open`."""


class Table(Enum):
    META = b"meta"
    HEADS = b"heads"
    TURNS = b"turns"
    WORDS = b"words"  # transcripts
    DAMAGED = b"damaged"


OF_SESSIONS = (Table.HEADS, Table.TURNS, Table.WORDS)
Record = tuple[Table, bytes, bytes]


@dataclass(slots=True)
class Found:
    """What a file has in it."""

    problem: str | None = None  # in one line; None: LMDB may open it
    whole: bool = True  # all of it was looked at
    tally: Tally = field(default_factory=Tally)  # of the sessions' records that are there and whole
    broken: int = 0  # records that are there and are not what was written
    told: Told | None = None  # what it says of itself; None: it does not
    transaction: int = 0
    records: list[Record] = field(default_factory=list)  # where they were asked for
    format: bytes | None = None

    @property
    def missing(self) -> int | None:
        """How many records were written and are not there; None: nobody can say, for the file is not what it
        says that it is, or does not say it."""
        told = self.told
        if told is None or told.transaction != self.transaction:
            return None
        if told.rows <= self.tally.rows and not self.tally.agrees(told):
            return None  # some are old
        return told.rows - self.tally.rows

    @property
    def worth(self) -> tuple[bool, int, int]:
        """Of two ways to read one file, the larger is to be believed."""
        return self.missing == 0, self.transaction, self.tally.rows


def attach(path: Path, opener: Open, map_size: int) -> tuple[Any, dict[Table, Any]]:
    """Open an environment without locks of its own, and its tables. lmdb.Error."""
    env = opener(str(path), subdir=False, map_size=map_size, max_dbs=len(Table), mode=0o600, lock=False)
    try:
        return env, {table: env.open_db(table.value) for table in Table}
    except BaseException:
        env.close()
        raise


def inspected(path: Path, seconds: float | None = None) -> Found:
    """Look at every page of a file, or at some, if that takes longer than `seconds`. OSError if it cannot
    be opened."""
    until = None if seconds is None else time.monotonic() + seconds
    with PageFile(path) as file:
        problem = file.head_problem()
        if problem is None:
            found, survey = _read(file, file.metas[0], until=until)
            found.problem = survey.problems[0] if survey.problems else None
            return found
        return Found(problem)


def salvaged(path: Path) -> Found:
    """All that can be believed of a damaged file. OSError if it cannot be opened.

    A record counts with its digest only. Where a meta is damaged, the roots that older and newer ones
    may have named are tried too: one whose records add up to what it says is as it was.
    """
    with PageFile(path) as file:
        if file.head_problem() is None:
            return _kept(file, file.metas[0])
        best, newest = Found(), 0
        for meta in (*file.metas, *file.roots()):
            found = _kept(file, meta)
            newest = max(newest, 0 if found.told is None else found.told.transaction)
            if found.worth > best.worth:
                best = found
        if best.transaction < newest:
            best.told = None  # something was written after it
        return best


def set_aside(path: Path) -> list[Record]:
    """What was set aside in a file, as it is. OSError if it cannot be opened."""
    with PageFile(path) as file:
        if file.head_problem() is not None:
            return []
        # The first of all tables.
        rows = takewhile(lambda row: row[0] == Table.DAMAGED.value, Survey(file, file.metas[0]).rows())
        return [(Table.DAMAGED, name, sealed) for _, name, sealed in rows]


def _kept(file: PageFile, meta: Meta) -> Found:
    found, survey = _read(file, meta, keep=True)
    if meta.transaction is None:
        found.transaction = 0 if found.told is None else found.told.transaction
    else:
        _take_strays(found, survey)
    return found


def seal(table: Table, name: bytes, content: bytes) -> bytes:
    """The content behind a digest that binds it to its place."""
    return _digest(table, name, content) + content


def unsealed(table: Table, name: bytes, sealed: bytes) -> bytes | None:
    """The content; None where it is not what was sealed."""
    content = sealed[DIGEST_BYTES:]
    return content if sealed[:DIGEST_BYTES] == _digest(table, name, content) else None


def _digest(table: Table, name: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=table.value)
    digest.update(len(name).to_bytes(4, "little"))
    digest.update(name)
    digest.update(content)
    return digest.digest()


def _read(
    file: PageFile, meta: Meta, *, keep: bool = False, until: float | None = None
) -> tuple[Found, Survey]:
    """`keep`: the records too. `until`: monotonic clock, when to give up."""
    found, survey = Found(transaction=meta.transaction or 0), Survey(file, meta)
    tables = {table.value: table for table in Table}
    for value, name, sealed in survey.rows():
        if until is not None and time.monotonic() >= until:
            found.whole = False
            break
        table = tables.get(value)
        if table in OF_SESSIONS:
            if unsealed(table, name, sealed) is None:
                found.broken += 1
                continue
            found.tally.add(name, sealed)
            if keep:
                found.records.append((table, name, sealed))
        elif table is Table.DAMAGED and keep:
            found.records.append((table, name, sealed))
        elif table is Table.META and name == FORMAT_NAME:
            found.format = sealed
        elif table is Table.META and name == TALLY_NAME:
            found.told = Told.read(unsealed(table, name, sealed))
    return found, survey


def _take_strays(found: Found, survey: Survey) -> None:
    known = {(table, name) for table, name, _ in found.records}
    for name, sealed in survey.strays():
        for table in OF_SESSIONS:
            if (table, name) not in known and unsealed(table, name, sealed) is not None:
                known.add((table, name))
                found.tally.add(name, sealed)
                found.records.append((table, name, sealed))
        if found.told is None and (content := unsealed(Table.META, name, sealed)) and name == TALLY_NAME:
            found.told = Told.read(content)
