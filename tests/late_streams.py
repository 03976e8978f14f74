"""Queues of a device that is as late, and runs its queues in as bad an order, as their marks allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from threading import RLock

import numpy as np

from tiering.stores.buffers import Bytes
from tiering.stores.streams import Mark, Queue, address


@dataclass(eq=False)
class LateMark:
    streams: LateStreams
    queue: Queue
    reached: bool = False

    @property
    def passed(self) -> bool:
        """A look takes time: something may have happened before it."""
        self.streams.ask()
        self.streams.advance()
        return self.reached

    def wait(self) -> None:
        self.streams.ask()
        self.streams.run_until(self)

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, LateMark)
        assert earlier.queue is self.queue
        assert earlier.reached
        assert self.reached
        return 1.0


@dataclass(frozen=True)
class _Following:
    mark: LateMark


Item = Callable[[], None] | LateMark | _Following


class Refused(RuntimeError):
    """What the device says to a copy that it does not take."""


@dataclass(eq=False)
class LateStreams:
    """`tiering.stores.streams.Streams` over this machine's memory.

    deaf: pairs (queue, whose marks): it does not wait for these, as if that had been forgotten. refuse: how
    many pieces of work go well before one is refused; None: all. eager: steps are computed
    by the thread that calls, which so waits where COMPUTE follows.
    """

    random: Random = field(default_factory=lambda: Random(0))
    slab: Bytes | None = None  # pinned memory beside what `host_memory` has given
    deaf: frozenset[tuple[Queue, Queue]] = frozenset()
    refuse: int | None = None
    eager: bool = False
    dead: bool = False  # whatever is asked of it fails, as after a fault in a CUDA context
    ran: list[Queue] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = RLock()
        self.queues: dict[Queue, deque[Item]] = {queue: deque() for queue in Queue}
        self._pinned: list[Bytes] = [] if self.slab is None else [self.slab]

    def run(self, queue: Queue, work: Callable[[], None]) -> None:
        with self.lock:
            if self.refuse is not None and queue is not Queue.COMPUTE:
                self.refuse -= 1
                if self.refuse < 0:
                    self.refuse = None
                    raise Refused("the device takes no more")
            self.queues[queue].append(work)

    def mark(self, queue: Queue) -> LateMark:
        with self.lock:
            made = LateMark(self, queue)
            self.queues[queue].append(made)
            return made

    def follow(self, queue: Queue, mark: Mark) -> None:
        assert isinstance(mark, LateMark)
        with self.lock:
            if (queue, mark.queue) in self.deaf:
                return
            if queue is Queue.COMPUTE and self.eager:
                self.run_until(mark)
            else:
                self.queues[queue].append(_Following(mark))

    def pinned(self, run: Bytes) -> bool:
        at = address(run)
        return any(address(slab) <= at < address(slab) + slab.nbytes for slab in self._pinned)

    def host_memory(self, rows: int, width: int) -> Bytes:
        self._pinned.append(np.zeros((rows, width), dtype=np.uint8))
        return self._pinned[-1]

    def pin(self, slab: Bytes) -> None:
        self._pinned.append(slab)

    def ask(self) -> None:
        if self.dead:
            raise Refused("the device has failed")

    # --- what happens when ---------------------------------------------------------------------

    def advance(self) -> bool:
        """One thing happens in any queue, if one can. Whether one did."""
        with self.lock:
            ready = [queue for queue in Queue if self._ready(queue)]
            if ready:
                self._next(self.random.choice(ready))
            return bool(ready)

    def run_until(self, mark: LateMark) -> None:
        """As little as there can be before `mark` is passed, and sometimes something else."""
        with self.lock:
            while not mark.reached:
                self._towards(mark)
                if self.random.random() < 0.2:
                    self.advance()

    def finish(self) -> None:
        while self.advance():
            pass
        assert not any(self.queues.values()), "something waits for ever"

    def _towards(self, mark: LateMark) -> None:
        head = self.queues[mark.queue][0]
        if isinstance(head, _Following) and not head.mark.reached:
            self._towards(head.mark)
        else:
            self._next(mark.queue)

    def _ready(self, queue: Queue) -> bool:
        if not self.queues[queue]:
            return False
        head = self.queues[queue][0]
        return not (isinstance(head, _Following) and not head.mark.reached)

    def _next(self, queue: Queue) -> None:
        head = self.queues[queue].popleft()
        if isinstance(head, LateMark):
            head.reached = True
        elif not isinstance(head, _Following):
            self.ran.append(queue)
            head()
