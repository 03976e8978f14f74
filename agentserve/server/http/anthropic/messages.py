"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect of a chat turn."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.ahead_of_turn import prompt_of, warming
from agentserve.server.http.anthropic.asked import Asked, asked
from agentserve.server.http.anthropic.errors import error_body, event_frame
from agentserve.server.http.anthropic.retention import take_retention
from agentserve.server.http.anthropic.schemas import CountRequest, MessagesRequest
from agentserve.server.http.anthropic.thread import continued, message_id
from agentserve.server.http.anthropic.told import PING, Asking, Telling, whole
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.chat_request import ChatJob, prepare
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.known_errors import api_error
from agentserve.server.http.names import SESSION_HEADER
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.http.sse import StreamForm, unless_gone
from agentserve.server.http.streaming import open_stream
from agentserve.server.sessions.answer import Delta, Outcome
from agentserve.server.sessions.turns import Started, TurnSpec
from agentserve.server.text_port import JsonObject

KEEP_ALIVE = event_frame(PING)


async def messages(request: Request) -> Response:
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), MessagesRequest, limits)
    if fields.max_tokens == 0 and fields.stream:
        raise ApiError("max_tokens: 0 is not for streams", param="max_tokens")
    ours = await context.off_loop(asked, fields)
    ours = await continued(context, tenant_of(request), ours, fields.thread)
    async with _told_as(ours):
        if fields.max_tokens == 0:
            return await _warmed(context, request, ours)
        job = await prepare(context, request, ours.chat)
        return await _answer(context, request, fields, ours, job)


async def count_tokens(request: Request) -> Response:
    """The size of the prompt that /v1/messages would make of the same body."""
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), CountRequest, limits)
    ours = await context.off_loop(asked, fields)
    ours = await continued(context, tenant_of(request), ours, fields.thread)
    async with _told_as(ours):
        prompt = await prompt_of(context, request, ours.chat)
    return json_response({"input_tokens": len(prompt.ids)})


@asynccontextmanager
async def _told_as(ours: Asked) -> AsyncIterator[None]:
    """Errors of the chat request come out in the words of the body."""
    try:
        yield
    except Exception as error:
        known = api_error(error)
        if known is None:
            raise
        raise ours.renamed(known) from error


async def _answer(
    context: ServerContext, request: Request, fields: MessagesRequest, ours: Asked, job: ChatJob
) -> Response:
    try:
        take_retention(context, job.seats[0].lease.session, fields)
        headers = {SESSION_HEADER: job.session_id}
        asking = Asking(
            id=message_id(job.seats[0].lease),
            model=fields.model,
            prompt=len(job.prompt),
            shows_thinking=ours.shows_thinking,
            clamped=job.specs[0].sampling.max_tokens < fields.max_tokens,
        )
        events = _events(context, job.specs, asking)
        if fields.stream:
            form = StreamForm(KEEP_ALIVE, lambda error: _failure(ours.renamed(error), request))
            return await open_stream(context, request, _frames(events), headers, job.rollback, form=form)
        body = await unless_gone(request.receive, _whole(events))
        return json_response(body, headers=headers)
    except BaseException:
        job.rollback()  # of a turn that was never begun; others have ended already
        raise


async def _events(
    context: ServerContext, specs: Sequence[TurnSpec], asking: Asking
) -> AsyncGenerator[tuple[list[JsonObject], Outcome | None], None]:
    """What each piece of the turn is told as. The outcome comes with the last."""
    telling = Telling(asking)
    async with aclosing(context.runner.choices([specs])) as pieces:
        async for _, piece in pieces:
            match piece:
                case Started():
                    yield telling.begin(), None
                case Delta():
                    yield telling.push(piece), None
                case Outcome():
                    yield telling.finish(piece), piece


Events = AsyncGenerator[tuple[list[JsonObject], Outcome | None], None]


async def _frames(events: Events) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for told, _ in events:
            if told:
                yield b"".join(map(event_frame, told))


async def _whole(events: Events) -> JsonObject:
    told: list[JsonObject] = []
    async with aclosing(events):
        async for more, outcome in events:
            told += more
            if outcome is not None:
                return whole(told, outcome)
    raise AssertionError("a turn ended without an outcome")


async def _warmed(context: ServerContext, request: Request, ours: Asked) -> Response:
    """Compute the prompt's KV and say nothing (`max_tokens` 0). No session goes on by it."""
    spec = await warming(context, request, ours.chat)
    asking = Asking(f"msg_{secrets.token_hex(12)}", ours.chat.model or "", len(spec.prompt))
    try:
        body = await unless_gone(request.receive, _whole(_events(context, [spec], asking)))
    finally:
        spec.seat.rollback("done")  # of a turn that was never begun
    body |= {"content": [], "stop_reason": "max_tokens", "stop_sequence": None}
    body["usage"]["output_tokens"] = 0
    return json_response(body)


def _failure(error: ApiError, request: Request) -> bytes:
    return event_frame(error_body(error, request.state.request_id))
