"""The outbox on disk: an LMDB of its own, with one writer, every transaction synced.

A start reads all of the file in a process of its own (LMDB ends its process at some damaged pages) and
writes it anew: what this process has open, it has made. So a damaged file costs the records that it hit,
and no start; it is kept beside the new one. What is there is in memory as well (it is bounded), so a file
that is damaged or gone while the server runs is made again from there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import lmdb

from tools_bridge.webhooks.reading import read_file

log = logging.getLogger(__name__)

FIRST_MAP = 16 << 20  # bytes of address space; doubled when full, so the disk is the limit
DATA, FRESH = "data.mdb", "data.new.mdb"
FORMAT = b"1"
MOST_KEPT = 4  # damaged files
_FORMAT_NAME = b"format"
_DIGEST = 8  # bytes


class Table(Enum):
    META = b"meta"
    ENDPOINTS = b"endpoints"
    DELIVERIES = b"deliveries"
    BODIES = b"bodies"


Change = tuple[Table, bytes, bytes | None]
"""A record's content; None: it goes."""

Open = Callable[..., Any]
"""As `lmdb.open`."""


class StorageError(Exception):
    """In one line. Nothing of what was to be written counts, though it may be there."""


class Damaged(StorageError):
    """The file has to be made again (`rebuild`)."""


_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.MapResizedError,  # nobody else writes here
    lmdb.PageFullError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.BadDbiError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)


class Store:
    """One environment, open. Used by one thread at a time."""

    def __init__(self, folder: Path, opener: Open = lmdb.open) -> None:
        """ValueError, in one line: another server has it, it is of another format, or the folder cannot be
        used."""
        self.found: list[tuple[Table, bytes, bytes]] = []  # at the start
        self.damages: list[str] = []  # since the start; only ever added to
        self._folder = folder
        self._data = folder / DATA
        self._open = opener
        self._env: Any = None
        self._tables: dict[Table, Any] = {}
        self._map = FIRST_MAP
        self._file: tuple[int, int] | None = None  # device and number of ours
        self._size = 0
        self._lock = -1
        try:
            _make(folder)
            self._lock = _locked(folder)
            self._start()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise ValueError(f"{folder}: cannot keep webhooks here: {_one_line(error)}") from error
        except BaseException:
            self.close()
            raise

    def write(self, changes: Sequence[Change]) -> None:
        """All of it and synced, or nothing: StorageError."""
        try:
            self._be_there()
            self._commit(changes)
        except _DAMAGE as error:
            self._drop()
            self._file = None
            raise Damaged(_one_line(error)) from error
        except (lmdb.Error, OSError) as error:
            self._drop()  # LMDB refuses all work after some failures until it is opened again
            raise StorageError(f"{self._folder}: {_one_line(error)}") from error

    def rebuild(self, changes: Sequence[Change], reason: str) -> None:
        """Make the file anew with these records. StorageError."""
        try:
            self._drop()
            _make(self._folder)
            self._hold_lock()
            kept = self._fill(changes, keep=True)
        except (lmdb.Error, OSError, ValueError) as error:
            self._drop()
            raise StorageError(f"{self._folder}: {_one_line(error)}") from error
        self._note(reason, kept)

    def close(self) -> None:
        """Idempotent. Lets another server in."""
        self._drop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- the start -------------------------------------------------------------------

    def _start(self) -> None:
        if not self._data.exists():
            self._fill([], keep=False)
            return
        rows, whole = read_file(self._data, [table.value for table in Table])
        broken = 0
        for value, name, sealed in rows:
            table = Table(value)
            content = _unsealed(table, name, sealed)
            if content is None:
                broken += 1
            elif (table, name) == (Table.META, _FORMAT_NAME):
                self._check_format(content)
            else:
                self.found.append((table, name, content))
        damaged = not whole or broken > 0
        kept = self._fill(self.found, keep=damaged)
        if damaged:
            self._note("the file is damaged" if not whole else f"{broken} damaged record(s)", kept)

    def _check_format(self, found: bytes) -> None:
        if found != FORMAT:
            shown = found[:20].decode("ascii", "replace")
            raise ValueError(
                f"{self._folder}: its webhooks have format {shown}, this version knows {FORMAT.decode()}; "
                "move the folder away, or use the version that wrote it"
            )

    def _fill(self, changes: Iterable[Change], keep: bool) -> Path | None:
        """A file with these records takes the place of the one that is there, which is kept: its name."""
        fresh = self._folder / FRESH
        with suppress(FileNotFoundError):
            fresh.unlink()
        self._attach(fresh)
        self._commit([*changes, (Table.META, _FORMAT_NAME, FORMAT)])
        kept = _keep_aside(self._data) if keep and self._data.exists() else None
        fresh.replace(self._data)
        _sync(self._folder)
        found = self._data.stat()
        self._file, self._size = (found.st_dev, found.st_ino), found.st_size
        return kept

    def _attach(self, path: Path) -> None:
        self._env = self._open(
            str(path), subdir=False, map_size=self._map, max_dbs=len(Table), mode=0o600, lock=False
        )
        self._tables = {table: self._env.open_db(table.value) for table in Table}

    # --- writing ---------------------------------------------------------------------

    def _be_there(self) -> None:
        """Ours is open, and where it was."""
        if self._file is None:
            raise Damaged("the file was damaged while it was in use")
        try:
            found = self._data.stat()
        except FileNotFoundError:
            self._drop()
            self._file = None
            raise Damaged("the file was deleted or moved away while it was in use") from None
        if (found.st_dev, found.st_ino) != self._file:
            raise OSError(f"another file has taken the place of {DATA}; move it away, or start again with it")
        if found.st_size < self._size:
            self._drop()
            self._file = None
            raise Damaged("the file was cut while it was in use")
        if self._env is None:
            self._attach(self._data)

    def _commit(self, changes: Sequence[Change]) -> None:
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    for table, name, content in changes:
                        if content is None:
                            txn.delete(name, db=self._tables[table])
                        else:
                            txn.put(name, _seal(table, name, content), db=self._tables[table])
            except lmdb.MapFullError:
                self._map *= 2
                self._env.set_mapsize(self._map)
                continue
            if self._file is not None:
                self._size = max(self._size, self._data.stat().st_size)
            return

    def _hold_lock(self) -> None:
        """The one that another server would meet: the folder may be a new one. ValueError."""
        path, held = self._folder / "lock", os.fstat(self._lock)
        if path.exists() and os.path.samestat(path.stat(), held):
            return
        lock = _locked(self._folder)
        os.close(self._lock)
        self._lock = lock

    def _note(self, reason: str, kept: Path | None) -> None:
        aside = f" (kept as {kept.name})" if kept is not None else ""
        self.damages.append(reason + aside)
        log.error("the webhooks in %s were damaged: %s%s", self._folder, reason, aside)

    def _drop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _seal(table: Table, name: bytes, content: bytes) -> bytes:
    """The content behind a digest that binds it to its place."""
    return _digest(table, name, content) + content


def _unsealed(table: Table, name: bytes, sealed: bytes) -> bytes | None:
    content = sealed[_DIGEST:]
    return content if sealed[:_DIGEST] == _digest(table, name, content) else None


def _digest(table: Table, name: bytes, content: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST, person=table.value)
    digest.update(len(name).to_bytes(4, "little") + name)
    digest.update(content)
    return digest.digest()


def _make(folder: Path) -> None:
    """For its owner alone: it holds secrets. Synced into its parents."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync(path.parent)


def _locked(folder: Path) -> int:
    """A descriptor that keeps other servers out while it is open, or its process lives."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"{folder}: another server has these webhooks open") from None
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


def _keep_aside(data: Path) -> Path:
    """A second name for a damaged file, `damaged-<n>.mdb`. Of many, the oldest go."""
    kept = {
        int(path.stem[8:]): path for path in data.parent.glob("damaged-*.mdb") if path.stem[8:].isdecimal()
    }
    for number in sorted(kept)[: max(0, len(kept) + 1 - MOST_KEPT)]:
        kept[number].unlink(missing_ok=True)
    path = data.parent / f"damaged-{max(kept, default=0) + 1}.mdb"
    with suppress(OSError):  # a file system without hard links: it is only for somebody to look at
        os.link(data, path)
    return path


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
