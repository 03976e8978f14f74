"""How long the event loop was held up: a timer that measures its own lateness, all the time.

What holds the loop up holds up every stream, so it is a number that operators need; it costs some fifty
wake-ups a second of a few microseconds each. A stall is told as up to one interval shorter than it was,
for it began somewhere between two ticks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL = 0.02  # seconds between ticks
LEAST = 0.01  # lateness that is told: timers of an idle loop are late by a millisecond or two


class StallWatch:
    """Ticks on the loop that runs when it is started; `told` hears seconds of lateness."""

    def __init__(
        self,
        told: Callable[[float], None],
        now: Callable[[], float],
        interval: float = INTERVAL,
        least: float = LEAST,
    ) -> None:
        """now: seconds, of the clock that the loop's timers follow; it must not stand still while
        something blocks."""
        self._told = told
        self._now = now
        self._interval = interval
        self._least = least
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def start(self) -> None:
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = self._now() + self._interval
        self._timer = loop.call_later(self._interval, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        late = self._now() - self._due
        if late >= self._least:
            self._told(late)
        self._arm(loop)
