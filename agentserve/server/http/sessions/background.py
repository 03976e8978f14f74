"""Turns that go on whether or not somebody reads them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from agentserve.server.http.known_errors import api_error

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Background:
    """The tasks of such turns. They end with the server at the latest, rolled back."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, work: Coroutine[object, object, Result], end: Callable[[], None]) -> asyncio.Task[Result]:
        """Begin `work` now; nobody need wait for it. `end` as in `whole`."""
        return self._start(work, end)

    def whole(
        self, work: Coroutine[object, object, Result], end: Callable[[], None]
    ) -> Coroutine[object, object, Result]:
        """Begin `work` now; what is returned waits for its result, and may be cancelled alone. `end` is
        called when it is over, also if it never got to run."""
        task = self._start(work, end)

        async def waiting() -> Result:
            return await asyncio.shield(task)

        return waiting()

    def frames(
        self, frames: AsyncGenerator[bytes, None], end: Callable[[], None]
    ) -> AsyncGenerator[bytes, None]:
        """The same frames; they are made to the end though the reader closes early."""
        queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        read = True

        async def drain() -> None:
            try:
                async with aclosing(frames):
                    async for body in frames:
                        if read:
                            queue.put_nowait(body)
            except Exception as error:
                queue.put_nowait(error)
                raise

        def over() -> None:
            queue.put_nowait(None)
            end()

        task = self._start(drain(), over)

        async def reading() -> AsyncGenerator[bytes, None]:
            nonlocal read
            try:
                while (body := await queue.get()) is not None:
                    if isinstance(body, Exception):
                        raise body
                    yield body
                if task.cancelled():
                    raise asyncio.CancelledError
            finally:
                read = False
                while not queue.empty():
                    queue.get_nowait()

        return reading()

    async def stop(self) -> None:
        """Cancel all that runs and wait for the end of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(
        self, work: Coroutine[object, object, Result], end: Callable[[], None]
    ) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def over(done: asyncio.Task[Result]) -> None:
            self._tasks.discard(done)
            end()
            if done.cancelled():
                return
            error = done.exception()  # seen, also where nobody waits for it
            if isinstance(error, Exception) and api_error(error) is None:
                log.error("a turn without a reader failed", exc_info=error)

        task.add_done_callback(over)
        return task
