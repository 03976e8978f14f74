"""What holds an event loop up, and for how long, seen from within its process.

A late tick is told with what the process did meanwhile, so that a noisy machine is told apart from a fault
of the server; while the loop stands still a C thread, which needs no lock of Python's, writes down where.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INTERVAL = 0.01  # seconds between ticks
LOOK = 0.045  # so long without a tick, and the stacks of all threads are written down
TOLD = 0.03  # a stall that is kept
MOST = 200  # that are kept: the longest


@dataclass(frozen=True)
class Stall:
    """Seconds. `fault`: what is left when the time is taken off in which the machine was busy with others."""

    late: float
    fault: float
    loop_cpu: float  # that the loop's own thread computed
    process_cpu: float  # that all threads did
    not_run: float  # in which that thread could have run, and the machine ran others
    where: str  # the innermost frames of the loop's thread, while it stood still


class LoopWatch:
    """Start it on the loop; `stalls` has what was found since it was last cleared."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w+")
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.get_native_id()
        self.stalls: list[Stall] = []
        self.ticks = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_native_id()
        self._python_thread = threading.get_ident()
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def take(self) -> list[dict[str, Any]]:
        """The stalls since the last time, the worst first."""
        found, self.stalls = self.stalls, []
        found.sort(key=lambda stall: stall.fault, reverse=True)
        return [asdict(stall) for stall in found]

    # --- inside ---------------------------------------------------------------------------

    def _arm(self) -> None:
        # First, for it waits for the thread of the time before, which may have to wait for a core.
        faulthandler.dump_traceback_later(INTERVAL + LOOK, file=self._file)
        self._before = self._spent()
        self._due = time.monotonic() + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def _tick(self) -> None:
        late = time.monotonic() - self._due
        self.ticks += 1
        if late >= TOLD:
            self._note(late)
        self._arm()

    def _note(self, late: float) -> None:
        cpu, process, waited, others = (
            now - then for now, then in zip(self._spent(), self._before, strict=True)
        )
        # Neither computing nor in line for a core: it slept, for a lock (whose holder may be in line itself)
        # or for the disk; or the machine stood still, and then so did the thread that writes stacks down.
        where, stopped = self._where(late)
        slept = max(0.0, late + INTERVAL - cpu - waited - max(0.0, others) - stopped)
        fault = min(late, max(0.0, cpu + slept))
        self.stalls.append(Stall(*(round(x, 4) for x in (late, fault, cpu, process, waited)), where))
        if len(self.stalls) > 2 * MOST:
            self.stalls.sort(key=lambda stall: stall.fault, reverse=True)
            del self.stalls[MOST:]

    def _spent(self) -> tuple[float, float, float, float]:
        """So far: CPU seconds of the loop's thread and of all; seconds in which it, and the others, could
        have run and did not."""
        waited = _in_line(self._thread)
        others = sum(_in_line(int(task)) for task in os.listdir("/proc/self/task")) - waited
        return time.thread_time(), time.process_time(), waited, others

    def _where(self, late: float) -> tuple[str, float]:
        """The stack from the dump (whose threads each have a heading), and how late that was itself."""
        self._file.flush()
        written = time.time() - os.fstat(self._file.fileno()).st_mtime  # ago
        self._file.seek(0)
        text = self._file.read()
        self._file.seek(0)
        self._file.truncate()
        mark = f"0x{self._python_thread:016x}"
        if mark not in text:
            return "", max(0.0, late - LOOK)
        lines = [line.strip() for line in text.rpartition(mark)[2].split("\n\n")[0].splitlines()[1:13]]
        return " < ".join(map(_short, lines)), max(0.0, late - LOOK - written)


def _in_line(thread: int) -> float:
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _short(line: str) -> str:
    """`File "/a/b/c.py", line 3 in f` -> `b/c.py:3 f`."""
    path, _, rest = line.removeprefix('File "').partition('", line ')
    number, _, name = rest.partition(" in ")
    return f"{'/'.join(path.split('/')[-2:])}:{number} {name}"
