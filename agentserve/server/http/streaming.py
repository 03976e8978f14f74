"""From a generator of frames to a streamed response with defined errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError
from agentserve.server.http.context import ServerContext
from agentserve.server.http.known_errors import api_error
from agentserve.server.http.sse import OPENAI, ClientGone, EventStream, StreamForm, anext_or_end, disconnected

log = logging.getLogger(__name__)

FIRST_EVENT_SECONDS = 1.0  # how long an immediate refusal can still become a proper status


async def open_stream(
    context: ServerContext,
    request: Request,
    frames: AsyncGenerator[bytes, None],
    headers: Mapping[str, str],
    rollback: Callable[[], None] | None = None,
    *,
    form: StreamForm = OPENAI,
) -> Response:
    """Start the reply. A refusal that comes at once is raised, and becomes a plain error reply.

    Once the stream has begun an error is one last event, and no [DONE] follows it.
    """
    first = asyncio.create_task(anext_or_end(frames))
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({first, watcher}, timeout=FIRST_EVENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done() and not first.done():
            raise ClientGone
        if first.done():
            first.result()
    except BaseException:
        await _stop(first)
        await frames.aclose()
        raise
    finally:
        await _stop(watcher)

    async def close() -> None:
        await _stop(first)
        await frames.aclose()
        if rollback is not None:
            rollback()  # of turns that were never begun

    return EventStream(
        _guarded(first, frames, form, request),
        close=close,
        keep_alive=context.options.keep_alive_seconds,
        headers=headers,
        form=form,
    )


async def _guarded(
    first: asyncio.Task[bytes], frames: AsyncGenerator[bytes, None], form: StreamForm, request: Request
) -> AsyncGenerator[bytes, None]:
    try:
        head = await first
        if head:
            yield head
        async for body in frames:
            yield body
    except Exception as error:
        known, id_ = api_error(error), request.scope["state"].get("request_id")
        if known is not None and known.status == 500:
            log.error("the stream of request %s: %s", id_, known.message)
        if known is None:
            log.exception("the stream of request %s failed", id_)
            known = ApiError("Internal error.", status=500, code="internal_error")
        yield form.failure(known)


async def _stop(task: asyncio.Task[bytes] | asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
