"""The time that deadlines are told by: it passes as time does, whatever becomes of the machine's clock.

It is Unix time as the machine had it when it was first asked since the machine was booted, and what has
passed since. A file says so, so that a server that is started again tells the same time, though the clock
was set meanwhile. After a boot nobody knows how long the machine was off but its clock, which is believed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

FILE = "clock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Anchor(msgspec.Struct, frozen=True):
    """A moment: `passed` seconds after the boot, `unix` by the clock of the machine then."""

    boot: str
    passed: float
    unix: float


class LoopTime:
    """A `Time`: this machine's, and the running event loop's timers."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where an earlier server may have said what time it told."""
        boot = _boot()
        found = None if folder is None else _read(folder / FILE)
        if found is None or not boot or found.boot != boot:
            found = Anchor(boot, passed(), time.time())
        self.anchor = found

    def now(self) -> float:
        return self.anchor.unix + passed() - self.anchor.passed

    def unix(self) -> float:
        return time.time()

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        return asyncio.get_running_loop().call_later(seconds, call).cancel

    def keep(self, folder: Path) -> None:
        """For the next server; the folder is there. OSError."""
        path, fresh = folder / FILE, folder / f"{FILE}.new"
        if _read(path) == self.anchor:
            return
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self.anchor))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)


def passed() -> float:
    """Seconds since the machine was booted, also those that it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot() -> str:
    """Which boot this is; empty: nobody says."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _read(path: Path) -> Anchor | None:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Anchor)
    return None
