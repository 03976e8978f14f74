"""Tidies the process up while it serves: full collections of cycles, and memory back to the system.

Both hold others up, so they wait for a second in which the event loop had next to nothing to do. Streams that
are open and silent do not make it busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from agentserve.heap import GROWN, FullCollections

INTERVAL = 1.0  # seconds between looks
QUIET = 0.05  # of that time, that the loop may have computed


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
        """spent: CPU seconds of the loop's thread so far."""
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
        settled = self._memory.resident()
        while True:
            before = self._spent()
            await asyncio.sleep(self._interval)
            quiet = self._spent() - before < QUIET * self._interval
            self._collections.look(quiet)
            if quiet and self._memory.resident() > settled + GROWN:
                await asyncio.to_thread(self._memory.give_back)
                settled = self._memory.resident()
