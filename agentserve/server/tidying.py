"""Tidies the process up while it serves: full collections of cycles, and memory back to the system.

Both hold others up, so they wait for a second in which the process had next to nothing to do. Streams that
are open and silent do not make it busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agentserve.heap import GROWN, FullCollections

INTERVAL = 1.0  # seconds between looks
QUIET = 0.05  # of that time, that the process may have computed, all of its threads
WORKED = 1.0  # CPU seconds, after which there may be something to give back


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this process. `give_back` may take its time: it is called in a thread."""

    resident: Callable[[], int]
    give_back: Callable[[], None]


class Tidying:
    def __init__(
        self,
        collections: FullCollections,
        memory: Memory,
        spent: Callable[[], float],
        interval: float = INTERVAL,
    ) -> None:
        """spent: CPU seconds of the process so far. (Of the loop's thread they would not do: it has nothing
        to do while another encodes a long text, and what that takes is no piece.)"""
        self._collections = collections
        self._memory = memory
        self._spent = spent
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the running loop."""
        self._collections.start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._collections.stop()

    async def _run(self) -> None:
        memory = self._memory
        least, given_back = memory.resident(), self._spent()  # bytes; when that was
        while True:
            before = self._spent()
            await asyncio.sleep(self._interval)
            spent = self._spent()
            quiet = spent - before < QUIET * self._interval
            self._collections.look(quiet)
            if quiet and spent - given_back >= WORKED and memory.resident() > least + GROWN:
                await asyncio.to_thread(memory.give_back)
                least, given_back = min(least, memory.resident()), self._spent()
