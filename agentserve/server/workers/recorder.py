"""The ordered log of a worker, as a file."""

from __future__ import annotations

from typing import BinaryIO

from agentserve.core.plan import Plan
from agentserve.core.record import Entry, Planned, encode_entry, plan_digest


class Recorder:
    """Writes the ordered log; without a file it does nothing.

    Entries are kept until `flush`, which turns them into bytes: that costs as much as planning, and can be
    done while a model computes.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._entries: list[Entry | tuple[float, Plan | None]] = []

    @property
    def active(self) -> bool:
        return self._file is not None

    def add(self, entry: Entry) -> None:
        if self._file is not None:
            self._entries.append(entry)

    def planned(self, now: float, plan: Plan | None) -> None:
        """`begin_step(now)` gave this plan."""
        if self._file is not None:
            self._entries.append((now, plan))

    def flush(self) -> None:
        """Write what was added."""
        if self._file is None:
            return
        entries, self._entries = self._entries, []
        for entry in entries:
            if isinstance(entry, tuple):
                entry = Planned(entry[0], plan_digest(entry[1]))
            self._file.write(encode_entry(entry))

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None
