"""Lines to files of bounded size, written beside whoever has something to record.

`add` costs a microsecond and waits for nothing; a thread encodes and writes a few times a second. What comes
faster than that is counted and left out. Where the disk does not take it, recording ends: one line in the
log, and nobody else notices.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from agentserve.records.lines import Gap, Line, Opened, encode_line
from tiering.stores.private import FILE, make_folder

log = logging.getLogger(__name__)

WAITING = 20_000  # lines that wait to be written
GATHER = 0.2  # seconds between writes


class Bounds(msgspec.Struct, frozen=True):
    """What a series of lines may take on disk: `files` of `file_bytes` each."""

    file_bytes: int = 64 << 20
    files: int = 8


class Series:
    """The file that is written, `name.jsonl`, and those before it: `name.1.jsonl` is the youngest of them."""

    def __init__(self, path: Path, bounds: Bounds, opened: Callable[[], Opened]) -> None:
        """OSError. A last line that an earlier process left torn is ended."""
        self._path = path
        self._bounds = bounds
        self._opened = opened
        self._file = -1
        self._size = 0
        self._open()

    def write(self, lines: list[bytes]) -> None:
        """OSError; the lines that were whole by then stay."""
        batch = bytearray()
        for line in lines:
            if self._size + len(batch) + len(line) > self._bounds.file_bytes and self._size + len(batch):
                self._append(bytes(batch))
                batch.clear()
                self._rotate()
            batch += line
        self._append(bytes(batch))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, FILE)
        try:
            self._size = _own(self._file).st_size
            torn = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"
            self._append((b"\n" if torn else b"") + encode_line(self._opened()))
        except OSError:
            self.close()
            raise

    def _append(self, data: bytes) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:
            whole = data.rfind(b"\n", 0, done) + 1
            os.ftruncate(self._file, self._size + whole)
            self._size += whole
            raise
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        for number in range(self._bounds.files - 1, 0, -1):
            newer = self._path if number == 1 else self._numbered(number - 1)
            if newer.exists():
                newer.replace(self._numbered(number))
        if self._bounds.files == 1:
            self._path.unlink(missing_ok=True)
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")


def _own(file: int) -> os.stat_result:
    """A plain file that nobody else owns or has another name for: in a folder that others may write in, they
    can lay out what is opened there. OSError."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        raise PermissionError(errno.EPERM, "not a file of this user alone")
    return found


class LineWriter:
    """One series and its thread. `add` is for one thread at a time."""

    def __init__(
        self, path: Path, bounds: Bounds, opened: Callable[[], Opened], waiting: int = WAITING
    ) -> None:
        """Raises nothing: what cannot be written is told in the log, and counted."""
        self._path = path
        self._waiting = waiting
        self._longest = bounds.file_bytes // 2
        self._lines: deque[Line] = deque()
        self._some = threading.Event()
        self._leaving = threading.Event()
        self._left_out = 0  # by `add`
        self._unwritten = 0  # by the thread
        self._told = 0  # of those left out, how many the file and the log tell of
        self.failure = ""  # why nothing is recorded any more
        self._series: Series | None = None
        try:
            make_folder(path.parent)
            self._series = Series(path, bounds, opened)
        except OSError as error:
            self._fail(error)
            return
        self._thread = threading.Thread(target=self._write_all, name=f"record {path.stem}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not recorded, since the start."""
        return self._left_out + self._unwritten

    def add(self, line: Line) -> None:
        if self.failure or len(self._lines) >= self._waiting:
            self._left_out += 1
            return
        self._lines.append(line)
        if not self._some.is_set():
            self._some.set()

    def close(self, seconds: float = 5.0) -> None:
        """Write what is waiting, for so long at most. Idempotent."""
        self._leaving.set()
        self._some.set()
        if self._series is not None:
            self._thread.join(seconds)

    def _write_all(self) -> None:
        series = self._series
        assert series is not None
        batch: list[bytes] = []
        try:
            while not self._leaving.is_set() or self._lines:
                self._some.wait()
                self._leaving.wait(GATHER)
                self._some.clear()
                batch = self._batch()
                series.write(batch)
        except OSError as error:
            self._unwritten += len(batch)
            self._fail(error)
        finally:
            series.close()

    def _batch(self) -> list[bytes]:
        batch: list[bytes] = []
        if missing := self._left_out - self._told:
            self._told += missing
            log.warning("%s: %d line(s) came too fast and are missing", self._path, missing)
            batch.append(encode_line(Gap(missing)))
        for _ in range(len(self._lines)):
            try:
                line = encode_line(self._lines.popleft())
                if len(line) > self._longest:
                    raise ValueError(f"it has {len(line)} bytes")
            except (msgspec.MsgspecError, ValueError) as error:  # ValueError: a name that is no text, too
                self._unwritten += 1
                log.error("%s: a line cannot be written: %s", self._path, error)
            else:
                batch.append(line)
        return batch

    def _fail(self, error: OSError) -> None:
        self.failure = error.strerror or str(error)
        log.error("%s cannot be written, recording ends: %s", self._path, self.failure)
        self._unwritten += len(self._lines)
        self._lines.clear()
