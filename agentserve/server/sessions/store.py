"""The session environment: an LMDB of its own under the data directory, with one writer.

What is committed here is the truth after a crash: every transaction is synced before it counts. A
record carries a digest over its name and content, for neither LMDB nor the file system looks at them
again; one that does not agree is set aside in a table of its own. An environment that LMDB cannot
read is renamed, and what could be read of it goes into a new one. Neither stops a start.

LMDB's own locks are not used: a lock on a file beside it, which dies with its process, keeps a second
server out, and within the server there is one thread at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.environment import (
    DATA,
    FIRST_MAP,
    Open,
    Record,
    Table,
    attach,
    damage,
    salvaged,
)

log = logging.getLogger(__name__)

FORMAT = 1
_FORMAT_NAME = b"format"
_OF_SESSIONS = (Table.HEADS, Table.TURNS, Table.WORDS)
_DIGEST_BYTES = 8
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
    """A session's head and all its turns."""

    session: bytes


Change = Put | Delete | Forget


@dataclass(slots=True)
class Stored:
    """What is known of one session; `damaged` counts records that could not be believed. A transcript
    that could not is none."""

    head: bytes | None = None
    turns: dict[int, bytes] = field(default_factory=dict)
    damaged: int = 0
    words: bytes = b""


def turn_name(session: bytes, turn: int) -> bytes:
    return session + b"\0" + turn.to_bytes(_NUMBER_BYTES, "big")


class SessionStore:
    """One environment, open. Used by one thread at a time."""

    def __init__(
        self, folder: Path, opener: Open = lmdb.open, check: Callable[[Path], str | None] = damage
    ) -> None:
        """Opens or makes it. ValueError, in one line, if another server has it, its format is not ours
        or the folder cannot be used. `check` says what is wrong with an environment."""
        self._folder = folder
        self._open = opener
        self._check = check
        self._env: Any = None
        self._tables: dict[Table, Any] = {}
        self._lock = -1
        self._map = FIRST_MAP
        try:
            _make(folder)
            self._lock = _locked(folder)
            self._start()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise ValueError(f"{folder}: cannot keep sessions here: {_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def read(self) -> dict[bytes, Stored]:
        """Everything, by session. StorageError."""
        found: dict[bytes, Stored] = {}
        try:
            with self._env.begin() as txn:
                for table in _OF_SESSIONS:
                    with txn.cursor(self._tables[table]) as cursor:
                        for name, sealed in cursor:
                            _file(found, table, name, sealed)
        except lmdb.Error as error:
            raise StorageError(f"{self._folder}: {_line(error)}") from error
        return found

    def write(self, changes: Sequence[Change]) -> None:
        """All of it, in order and synced, or nothing: StorageError."""
        self._transact(lambda txn: self._apply(txn, changes))

    def set_aside(self, session: bytes) -> None:
        """Put a session's records where no start reads them, as they are. StorageError."""
        self._transact(lambda txn: self._move_aside(txn, session))

    def _transact(self, work: Callable[[Any], None]) -> None:
        try:
            if self._env is None:
                self._attach()
            while True:
                try:
                    with self._env.begin(write=True) as txn:
                        work(txn)
                    return
                except lmdb.MapFullError:
                    self._map *= 2
                    self._env.set_mapsize(self._map)
        except (lmdb.Error, OSError, ValueError) as error:
            self._drop()  # LMDB refuses all work after some failures until it is opened again
            raise StorageError(f"{self._folder}: {_line(error)}") from error

    def close(self) -> None:
        """Idempotent. Lets another server in."""
        self._drop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _start(self) -> None:
        """Open the environment; one that LMDB cannot read is replaced."""
        reason = self._check(self._folder)
        if reason is None:
            self._attach()
        else:
            self._replace(reason, salvaged(self._folder))

    def _attach(self) -> None:
        self._env, self._tables = attach(self._folder, self._open, self._map)
        self._map = int(self._env.info()["map_size"])
        self._check_format()
        _sync(self._folder)

    def _check_format(self) -> None:
        with self._env.begin(write=True) as txn:
            meta = self._tables[Table.META]
            found = txn.get(_FORMAT_NAME, db=meta)
            if found is None:
                txn.put(_FORMAT_NAME, b"%d" % FORMAT, db=meta)
            elif found != b"%d" % FORMAT:
                shown = found[:20].decode("ascii", "replace")
                raise ValueError(
                    f"{self._folder}: its sessions have format {shown}, this version knows {FORMAT}; "
                    "move the folder away, or use the version that wrote it"
                )

    def _replace(self, reason: str, records: Sequence[Record]) -> None:
        """Begin anew with what could be read; the old file stays beside the new one."""
        data = self._folder / DATA
        count = len(list(self._folder.glob("damaged-*.mdb")))
        aside = self._folder / f"damaged-{count + 1}.mdb"
        with suppress(FileNotFoundError):
            data.rename(aside)
        log.error("the sessions in %s cannot all be read (%s): kept as %s", self._folder, reason, aside.name)
        self._attach()
        self._transact(lambda txn: self._put_back(txn, records))

    def _put_back(self, txn: Any, records: Sequence[Record]) -> None:
        for table, name, sealed in records:
            if 0 < len(name) <= self._env.max_key_size():
                txn.put(name, sealed, db=self._tables[table])

    def _apply(self, txn: Any, changes: Sequence[Change]) -> None:
        for change in changes:
            match change:
                case Put(table, name, content):
                    txn.put(name, _seal(table, name, content), db=self._tables[table])
                case Delete(table, name):
                    txn.delete(name, db=self._tables[table])
                case Forget(session):
                    for table in _OF_SESSIONS:
                        for name in _names(txn, self._tables[table], session):
                            txn.delete(name, db=self._tables[table])

    def _move_aside(self, txn: Any, session: bytes) -> None:
        damaged = self._tables[Table.DAMAGED]
        for table in _OF_SESSIONS:
            for name in _names(txn, self._tables[table], session):
                txn.put(table.value + b" " + name, txn.get(name, db=self._tables[table]), db=damaged)
                txn.delete(name, db=self._tables[table])

    def _drop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _names(txn: Any, table: Any, session: bytes) -> list[bytes]:
    """The names in a table that are the session's."""
    found: list[bytes] = []
    with txn.cursor(table) as cursor:
        if cursor.set_range(session):
            for name in cursor.iternext(values=False):
                if name != session and not name.startswith(session + b"\0"):
                    break
                found.append(name)
    return found


def _file(found: dict[bytes, Stored], table: Table, name: bytes, sealed: bytes) -> None:
    session, _, number = name.partition(b"\0") if table is Table.TURNS else (name, b"", b"")
    stored = found.setdefault(session, Stored())
    content = _unsealed(table, name, sealed)
    if table is Table.WORDS:
        stored.words = content or b""
    elif content is None:
        stored.damaged += 1
    elif table is Table.HEADS:
        stored.head = content
    else:
        stored.turns[int.from_bytes(number, "big")] = content


def _seal(table: Table, name: bytes, content: bytes) -> bytes:
    """The content behind a digest that binds it to its place."""
    return _digest(table, name, content) + content


def _unsealed(table: Table, name: bytes, sealed: bytes) -> bytes | None:
    content = sealed[_DIGEST_BYTES:]
    return content if sealed[:_DIGEST_BYTES] == _digest(table, name, content) else None


def _digest(table: Table, name: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=table.value)
    digest.update(len(name).to_bytes(4, "little"))
    digest.update(name)
    digest.update(content)
    return digest.digest()


def _make(folder: Path) -> None:
    """The folder, for its owner alone (it holds what users said), and synced into its parents."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _locked(folder: Path) -> int:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"{folder}: another server has these sessions open") from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
