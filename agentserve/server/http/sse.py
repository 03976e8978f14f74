"""Server-sent events over plain ASGI: whole frames, keep-alive comments, prompt end on disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentserve.server.errors import ApiError, shutting_down
from agentserve.server.http.endings import ended
from agentserve.server.json_line import dump_json

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


def frame(value: object) -> bytes:
    """One event with one line of ASCII JSON, so that no reader can split it."""
    return b"data: " + dump_json(value) + b"\n\n"


def _failure(error: ApiError) -> bytes:
    return frame(error.body())


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a dialect's streams say what is no part of an answer."""

    keep_alive: bytes = KEEP_ALIVE  # sent where nothing else is
    failure: Callable[[ApiError], bytes] = _failure  # the last event of a stream that has begun
    silence: Callable[[], bytes] | None = None  # what `keep_alive` is now, where it changes


OPENAI = StreamForm()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[object, object, Result]) -> Result:
    """Await `work`, cancelling it when the client goes away (`ClientGone`)."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task)
        await _end(watcher)


class EventStream(Response):
    """Sends the frames of an async generator; closes it when they end or the client goes.

    A comment (or what `form` has for it) is sent whenever nothing was for `keep_alive` seconds:
    proxies and clients drop connections that stay silent through a long prefill. `close` is awaited at
    the end, whatever happened, also when no frame was ever asked for (closing the generator does nothing
    then).
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive: float,
        close: Callable[[], Awaitable[None]] | None = None,
        headers: Mapping[str, str] | None = None,
        form: StreamForm = OPENAI,
    ) -> None:
        self._frames = frames
        self._form = form
        self._keep_alive = keep_alive
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watcher = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            elif (told := ended(scope)) is not None:  # its client is still there, and may know
                await _end(pump)
                if pump.cancelled():
                    last = self._form.failure(told)
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except asyncio.CancelledError:
            # The server's drain is over. Frames are sent whole, so one more may follow.
            await _end(pump)
            if pump.cancelled() and not watcher.done():
                last = self._form.failure(shutting_down())
                await send({"type": "http.response.body", "body": last, "more_body": False})
            raise
        finally:
            await _end(pump)
            await _end(watcher)
            await self._frames.aclose()
            if self._close is not None:
                await self._close()

    async def _pump(self, send: Send) -> None:
        """Frames to the socket, and comments between them from a task of their own: a frame costs no task
        and no timer. Each is sent whole, one at a time."""
        turn = asyncio.Lock()
        clock = asyncio.get_running_loop().time
        sent = clock()

        async def put(body: bytes, more: bool = True) -> None:
            nonlocal sent
            async with turn:
                await send({"type": "http.response.body", "body": body, "more_body": more})
            sent = clock()

        async def comment() -> None:
            while True:
                silent = clock() - sent
                if silent < self._keep_alive:
                    await asyncio.sleep(self._keep_alive - silent)
                else:
                    silence = self._form.silence
                    await put(self._form.keep_alive if silence is None else silence())

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        comments = asyncio.create_task(comment())
        try:
            async for body in self._frames:
                if body:
                    # Writes wake readers, which costs many times what a write does. So that those of one
                    # step stand side by side, all streams first make their frames.
                    await asyncio.sleep(0)
                    await put(body)
        finally:
            await _end(comments)
        await put(b"", more=False)


async def anext_or_end(frames: AsyncGenerator[bytes, None]) -> bytes:
    """The next frame, or b"" at the end (a task must not raise StopAsyncIteration)."""
    return await anext(frames, b"")


async def _end(task: asyncio.Task[Result]) -> None:
    """Cancel a task and wait until it is over; its outcome no longer matters."""
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
