"""The step log on disk: of bounded size, and never in the way of a step.

Full, the file becomes `NAME.1`, that one `NAME.2` and so on; the oldest goes. What an earlier worker left
under the name is put there first. A disk that takes no more ends the log, with one line that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from agentserve.core.plan import Plan, StepResult
from agentserve.core.timing.iterations import Line, LogHeader, Recording, encode_line
from agentserve.core.timing.tally import EVERYTHING, Attention, load_of
from agentserve.messages import WorkerView

log = logging.getLogger(__name__)

KEPT = 4  # older files beside the one that is written
PENDING = 64 << 10  # bytes that may wait to be written


class BoundedLines:
    """Lines in a file and its predecessors, of at most (`KEPT` + 1) x `size` bytes in all."""

    def __init__(self, path: Path, size: int, first: bytes) -> None:
        """first: what each file begins with. OSError if there can be no such file."""
        self._path = path
        self._size = size
        self._first = first
        self._pending: list[bytes] = []
        self._waiting = 0
        self._file: BinaryIO | None = self._open()

    def add(self, line: bytes) -> None:
        if self._file is None:
            return
        if self._written + self._waiting + len(line) > self._size and self._waiting + self._written > len(
            self._first
        ):
            self._guarded(self._turn_over)
        self._pending.append(line)
        self._waiting += len(line)
        if self._waiting >= PENDING:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._pending:
            self._guarded(self._write)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _guarded(self, act: Callable[[], None]) -> None:
        if self._file is None:
            return
        try:
            act()
        except OSError as error:
            log.error("the step log %s ends here: %s", self._path, error.strerror or error)
            self._pending.clear()
            self._waiting = 0
            self._file.close()
            self._file = None

    def _write(self) -> None:
        assert self._file is not None
        data = b"".join(self._pending)
        self._pending.clear()
        self._waiting = 0
        self._file.write(data)
        self._written += len(data)

    def _turn_over(self) -> None:
        assert self._file is not None
        if self._pending:
            self._write()
        self._file.close()
        self._file = self._open()

    def _open(self) -> BinaryIO:
        for number in range(KEPT, 0, -1):
            older = self._path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        file = open(self._path, "xb", buffering=0)  # noqa: SIM115  (closed by its owner)
        file.write(self._first)
        self._written = len(self._first)
        return file

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


class StepLog:
    """Where a worker's steps are recorded; without lines they go nowhere."""

    def __init__(self, lines: BoundedLines | None, attention: Attention) -> None:
        self._lines = lines
        self._attention = attention
        self._recording = Recording()

    @classmethod
    def at(cls, path: Path, size: int, header: LogHeader, attention: Attention) -> StepLog:
        """OSError if the file cannot be had."""
        return cls(BoundedLines(path, size, encode_line(header)), attention)

    @property
    def active(self) -> bool:
        return self._lines is not None

    def add(self, plan: Plan, result: StepResult, view: WorkerView, now: float) -> None:
        """A plan has run; view: of the worker after it."""
        if self._lines is None:
            return
        load = plan.load if plan.load is not None else load_of(plan.chunks, plan.copies, self._attention)
        line: Line = self._recording.record(plan, load, result, view, now)
        self._lines.add(encode_line(line))

    def flush(self) -> None:
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


NO_STEP_LOG = StepLog(None, EVERYTHING)
