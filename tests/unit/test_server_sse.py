"""Event streams: keep-alive comments, prompt ends, clean-up in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from agentserve.server.http.sse import KEEP_ALIVE, ClientGone, EventStream, frame, unless_gone
from tests.api_rig import settled


class Client:
    """The client's end of an ASGI connection."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def test_comments_keep_a_silent_stream_alive_and_do_not_disturb_it() -> None:
    release = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes, None]:
        yield frame({"n": 1})
        await release.wait()
        yield frame({"n": 2})

    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    client = Client()
    stream = EventStream(frames(), keep_alive=0.001, close=close)
    task = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    await settled(lambda: client.body.count(KEEP_ALIVE) >= 3)
    release.set()
    await task
    assert client.body.replace(KEEP_ALIVE, b"") == frame({"n": 1}) + frame({"n": 2})
    assert client.sent[-1]["more_body"] is False
    assert all(len(m.get("body", b"")) == 0 or m["body"].endswith(b"\n\n") for m in client.sent)
    assert closed == [True]


async def test_a_client_that_leaves_a_silent_stream_ends_it() -> None:
    ended: list[str] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.append("generator")

    async def close() -> None:
        ended.append("close")

    client = Client()
    stream = EventStream(frames(), keep_alive=10.0, close=close)
    task = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    for _ in range(10):
        await asyncio.sleep(0)
    client.gone.set()
    await task
    assert ended == ["generator", "close"]


async def test_a_socket_that_fails_at_once_still_cleans_up() -> None:
    closed: list[bool] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"never"

    async def close() -> None:
        closed.append(True)

    async def broken(message: Any) -> None:
        raise OSError("connection lost")

    stream = EventStream(frames(), keep_alive=10.0, close=close)
    with pytest.raises(OSError, match="connection lost"):
        await stream({"type": "http"}, Client().receive, broken)
    assert closed == [True]


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client = Client()
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.create_task(unless_gone(client.receive, work()))
    await asyncio.sleep(0)
    client.gone.set()
    with pytest.raises(ClientGone):
        await task
    assert cancelled.is_set()


async def test_work_that_ends_wins() -> None:
    async def work() -> int:
        return 7

    assert await unless_gone(Client().receive, work()) == 7
