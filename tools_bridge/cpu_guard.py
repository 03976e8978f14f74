"""Ends a process that is at one call for longer than it may: nothing in it can."""

from __future__ import annotations

import signal
from typing import Protocol


class Guard(Protocol):
    def begin(self, seconds: float) -> None:
        """Of CPU, which what comes now may take."""
        ...

    def end(self) -> None: ...


class NoGuard:
    def begin(self, seconds: float) -> None:
        pass

    def end(self) -> None:
        pass


class CpuGuard:
    """For processes that may end: SIGPROF ends them by default, also in the middle of native code."""

    def begin(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
