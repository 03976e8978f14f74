"""What holds an event loop up, and for how long, seen from within its process.

A late tick is told with what the process did meanwhile, so that a noisy machine is told apart from a fault
of the server. While the loop stands still a thread looks where: as soon as the interpreter lets it, which is
when the call returns that held it. (`faulthandler` looks without being let, and dies of it now and then.)
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

INTERVAL = 0.01  # seconds between ticks
LOOK = 0.045  # so late, and the loop's stack is looked at
POLL = 0.015  # seconds between two looks for that
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

    def __init__(self) -> None:
        self._seen: tuple[int, float, str] = (-1, 0.0, "")  # tick that was waited for, when looked, the stack
        self._going = False
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.get_native_id()
        self.stalls: list[Stall] = []
        self.ticks = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_native_id()
        self._python_thread = threading.get_ident()
        self._arm()
        self._going = True
        self._looker = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._looker.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._going = False
        self._looker.join()

    def take(self) -> list[dict[str, Any]]:
        """The stalls since the last time, the worst first."""
        found, self.stalls = self.stalls, []
        found.sort(key=lambda stall: stall.fault, reverse=True)
        return [asdict(stall) for stall in found]

    # --- inside ---------------------------------------------------------------------------

    def _arm(self) -> None:
        self._before = self._spent()
        self._due: float = time.monotonic() + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def _tick(self) -> None:
        late = time.monotonic() - self._due
        if late >= TOLD:
            self._note(late)
        self.ticks += 1
        self._arm()

    def _note(self, late: float) -> None:
        cpu, process, waited, others = (
            now - then for now, then in zip(self._spent(), self._before, strict=True)
        )
        # Neither computing nor in line for a core: it slept, for a lock (whose holder may be in line itself)
        # or for the disk; or the machine stood still, and then so did the thread that looks.
        number, looked, where = self._seen
        mine = number == self.ticks
        behind = (looked if mine else time.monotonic()) - self._due - LOOK - POLL
        stopped = max(0.0, behind - max(0.0, process - cpu))
        slept = max(0.0, late + INTERVAL - cpu - waited - max(0.0, others) - stopped)
        fault = min(late, max(0.0, cpu + slept))
        self.stalls.append(
            Stall(*(round(x, 4) for x in (late, fault, cpu, process, waited)), where if mine else "")
        )
        if len(self.stalls) > 2 * MOST:
            self.stalls.sort(key=lambda stall: stall.fault, reverse=True)
            del self.stalls[MOST:]

    def _spent(self) -> tuple[float, float, float, float]:
        """So far: CPU seconds of the loop's thread and of all; seconds in which it, and the others, could
        have run and did not."""
        waited = _in_line(self._thread)
        others = sum(_in_line(int(task)) for task in os.listdir("/proc/self/task")) - waited
        return time.thread_time(), time.process_time(), waited, others

    def _look(self) -> None:
        while True:
            time.sleep(POLL)
            if not self._going:
                return
            number, now = self.ticks, time.monotonic()
            if now - self._due < LOOK or self._seen[0] == number:
                continue
            frame = sys._current_frames().get(self._python_thread)
            lines = []
            while frame is not None and len(lines) < 12:
                code = frame.f_code
                lines.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
                frame = frame.f_back
            self._seen = (number, now, " < ".join(lines))


def _in_line(thread: int) -> float:
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
