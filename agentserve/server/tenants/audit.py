"""Who did what, written down: one JSON line a request, never a body and never a key.

A thread of its own writes, so that no request waits for the disk; what it cannot keep up with is counted
and left out. Files are bounded by rotation. What strangers are refused goes into a file of its own, so
that they cannot push out what those did who were let in.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tiering.stores.private import make_folder, new_file

log = logging.getLogger(__name__)

FOLDER = "audit"  # below the data directory
FILE_BYTES = 16 << 20
FILES = 8  # of each kind, the one that is written included
WAITING = 10_000  # lines


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request."""

    at: float  # Unix time, at its end
    request: str  # its id
    method: str
    status: int
    seconds: float
    tenant: str | None = None
    key: str | None = None  # the id of the key, not the key
    route: str | None = None  # as it was declared, without the ids in it; None: there is none
    session: str | None = None
    address: str | None = None  # that it came from
    about: str | None = None  # the key (its id) or tenant that an admin's request was about

    @property
    def let_in(self) -> bool:
        return self.key is not None


class Journal:
    """One kind of lines: the file that is written, and those before it, each a number older."""

    def __init__(self, path: Path, most: int = FILE_BYTES, files: int = FILES) -> None:
        self._path = path
        self._most = most
        self._files = files
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, line: bytes) -> None:
        """OSError."""
        if self._size and self._size + len(line) > self._most:
            self._rotate()
        with open(self._path, "ab", opener=new_file) as file:
            file.write(line)
        self._size += len(line)

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            older = self._numbered(number)
            newer = self._path if number == 1 else self._numbered(number - 1)
            if newer.exists():
                newer.replace(older)
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")


class AuditLog:
    def __init__(self, folder: Path, most: int = FILE_BYTES, files: int = FILES) -> None:
        """OSError where nothing can be written there."""
        make_folder(folder)
        self._let_in = Journal(folder / "audit.jsonl", most, files)
        self._refused = Journal(folder / "refused.jsonl", most, files)
        self._lines: queue.Queue[Entry | None] = queue.Queue(WAITING)
        self._failing = False
        self.lost = 0
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def __call__(self, entry: Entry) -> None:
        try:
            self._lines.put_nowait(entry)
        except queue.Full:
            self.lost += 1

    def close(self, seconds: float = 5.0) -> None:
        """Write what is waiting, for so long at most."""
        try:
            self._lines.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _write_all(self) -> None:
        while (entry := self._lines.get()) is not None:
            try:
                (self._let_in if entry.let_in else self._refused).write(msgspec.json.encode(entry) + b"\n")
                self._failing = False
            except OSError as error:
                self.lost += 1
                if not self._failing:
                    log.error("the audit log cannot be written: %s", error.strerror or error)
                self._failing = True


Audit = Callable[[Entry], None]


def to_log(entry: Entry) -> None:
    """Where nothing is kept on disk."""
    _audit.info("%s", msgspec.json.encode(entry).decode())


_audit = logging.getLogger("agentserve.audit")
