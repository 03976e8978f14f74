"""The stream of a response that is kept, whoever made it: its events as they were and as they come, or,
where they are not kept, as they could have been."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext
from agentserve.server.http.responses.events import event_frame
from agentserve.server.http.responses.live import Live
from agentserve.server.http.responses.references import not_found
from agentserve.server.http.responses.replay import replayed
from agentserve.server.http.responses.shelf import Kept
from agentserve.server.http.sse import DONE, KEEP_ALIVE, StreamForm
from agentserve.server.http.streaming import open_stream

NO_HEADERS: Mapping[str, str] = {}


def found(context: ServerContext, request: Request, id_: str) -> Kept:
    """ApiError where the tenant has no such response."""
    kept = context.responses.shelf.get(id_)
    if kept is None or kept.tenant != tenant_of(request):
        raise not_found("Response", id_, code="response_not_found")
    return kept


async def follow(
    context: ServerContext, request: Request, kept: Kept, after: int | None, headers: Mapping[str, str]
) -> Response:
    """From the event after `after` on. The reader may leave."""
    live = context.responses.live(kept.id)
    if live is not None and not (live.over and live.first > (0 if after is None else after + 1)):
        return await follow_live(context, request, live, after, headers)
    events = replayed(kept.shown(), kept.sequence, after)

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"".join(map(event_frame, events)) + DONE

    return await open_stream(context, request, frames(), headers)


async def follow_live(
    context: ServerContext, request: Request, live: Live, after: int | None, headers: Mapping[str, str]
) -> Response:
    form = StreamForm(silence=lambda: _alive(live))
    return await open_stream(context, request, live.follow(after), headers, form=form)


def _alive(live: Live) -> bytes:
    live.tick()
    return KEEP_ALIVE
