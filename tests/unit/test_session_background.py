"""Turns without a reader: they begin at once, run to their end, and are cancelled with the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from agentserve.server.http.sessions.background import Background
from agentserve.server.sessions.errors import TurnFailed
from tests.api_rig import settled


class Ends:
    count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_work_begins_though_its_waiter_is_cancelled_before_it_waits() -> None:
    background, end, done = Background(), Ends(), asyncio.Event()

    async def work() -> str:
        done.set()
        return "x"

    waiter = asyncio.create_task(background.whole(work(), end))
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await done.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (end.count, len(background)) == (1, 0)


async def test_frames_are_made_to_the_end_though_the_reader_leaves() -> None:
    background, end, made = Background(), Ends(), []
    go = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        for i in range(5):
            if i == 2:
                await go.wait()
            made.append(i)
            yield b"%d" % i

    reading = background.frames(frames(), end)
    assert await anext(reading) == b"0"
    await reading.aclose()
    go.set()
    await settled(lambda: not len(background))
    assert (made, end.count) == ([0, 1, 2, 3, 4], 1)


async def test_a_failure_reaches_the_reader_after_what_was_made() -> None:
    background, end = Background(), Ends()

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise TurnFailed("broke")

    reading = background.frames(frames(), end)
    assert await anext(reading) == b"a"
    with pytest.raises(TurnFailed):
        await anext(reading)
    assert end.count <= 1
    await asyncio.sleep(0)
    assert end.count == 1


async def test_stopping_ends_what_runs_and_what_never_got_to_run() -> None:
    background, end = Background(), Ends()

    async def frames() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    first = background.frames(frames(), end)
    step = asyncio.ensure_future(anext(first))
    await asyncio.sleep(0)
    background.frames(frames(), end)
    await background.stop()
    assert (end.count, len(background)) == (2, 0)
    with pytest.raises(asyncio.CancelledError):
        await step
