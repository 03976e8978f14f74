"""Who may have how much of the compilers, where what is compiled belongs to owners (tenants).

Nobody holds all places or all processes, and whoever's grammars take too long waits before the next. Where
there are no owners there is nobody to be kept apart.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_PAUSE = 10.0  # seconds, behind a grammar that took too long; twice as many behind each that follows
LONGEST_PAUSE = 300.0
FORGOTTEN = 600.0  # seconds without another one
MOST_LATE = 4096  # owners of whom it is known

Clock = Callable[[], float]


class CompilerUnavailable(RuntimeError):
    """No compiler is free, or none starts: not the schema's fault. `seconds`: when to try again."""

    def __init__(self, why: str, seconds: float = 5.0) -> None:
        super().__init__(why)
        self.seconds = seconds

    def again(self) -> CompilerUnavailable:
        """The same, to be raised by another thread."""
        return type(self)(str(self), self.seconds)


class OverShare(CompilerUnavailable):
    """There is one, for others."""


class Shares:
    """Thread-safe."""

    def __init__(self, processes: int, places: int, clock: Clock) -> None:
        self._processes = processes
        self._places = places
        self._clock = clock
        self._changed = threading.Condition()
        self._jobs: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[int, str]] = []
        self._served: OrderedDict[str, int] = OrderedDict()  # whose turn was when
        self._arrivals = 0
        self._late: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, and when last

    def enter(self, owner: str) -> None:
        """A job of theirs begins; OverShare. `leave` ends it."""
        with self._changed:
            self._check(owner)
            # As many as are left free (Choudhury and Hahne 1998): half for one, and always some for another.
            if owner and self._jobs[owner] >= self._places - self._jobs.total():
                raise OverShare("too many of your schemas are being compiled; try again later")
            self._jobs[owner] += 1

    def leave(self, owner: str, *, late: bool) -> None:
        with self._changed:
            self._jobs[owner] -= 1
            if late and owner:
                times, _ = self._late.pop(owner, (0, 0.0))
                self._late[owner] = (times + 1, self._clock())
                if len(self._late) > MOST_LATE:
                    self._late.popitem(last=False)
            self._changed.notify_all()

    @contextmanager
    def process(self, owner: str, timeout: float) -> Iterator[None]:
        """One of the processes is theirs; CompilerUnavailable after `timeout` seconds."""
        with self._changed:
            self._arrivals += 1
            mine = (self._arrivals, owner)
            self._waiting.append(mine)
            try:
                if not self._changed.wait_for(lambda: self._next() == mine, timeout):
                    raise CompilerUnavailable("too many schemas are being compiled; try again later")
                self._check(owner)
                self._running[owner] += 1
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running[owner] -= 1
                if not self._running[owner]:
                    del self._running[owner]
                self._served[owner] = self._arrivals
                self._served.move_to_end(owner)
                if len(self._served) > MOST_LATE:
                    self._served.popitem(last=False)
                self._changed.notify_all()

    def _next(self) -> tuple[int, str] | None:
        """Who was served longest ago, of those that leave a process to others."""
        if self._running.total() >= self._processes:
            return None
        most = max(1, self._processes - 1)
        fit = [one for one in self._waiting if not one[1] or self._running[one[1]] < most]
        return min(
            fit, key=lambda one: (self._running[one[1]], self._served.get(one[1], 0), one), default=None
        )

    def _check(self, owner: str) -> None:
        times, last = self._late.get(owner, (0, 0.0))
        now = self._clock()
        if times and now - last >= FORGOTTEN:
            del self._late[owner]
        elif times:
            left = last + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 10)) - now
            if left > 0:
                raise OverShare(
                    f"your grammars took too long to compile: no new ones for {left:.0f} s; simplify them",
                    left,
                )
