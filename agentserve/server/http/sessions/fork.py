"""POST …/fork: a new session with the history of this one, up to its last turn or an earlier one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import ApiError, json_response
from agentserve.server.http.claims import cut_calls
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.sampling import integer
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.http.sessions.taking import transcript_gone
from agentserve.server.http.sessions_api import summary
from agentserve.server.limits import INT64_MAX, INT64_MIN
from agentserve.server.sessions.advice import park, settle
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.session_record import PendingCall, Session
from agentserve.server.sessions.transcript import Transcript, read_messages
from agentserve.server.text_port import JsonObject
from agentserve.text.unfinished import told_as_text
from agentserve.types import TurnId


class ForkBody(msgspec.Struct):
    at_turn: int | None = None


async def fork_session(request: Request) -> Response:
    """The child shares the parent's KV and goes its own way: it waits for its own tool results."""
    context = context_of(request)
    limits = context.options.limits
    found(context, request)
    raw = await read_body(request, limits.body_bytes)
    body = decode(raw, ForkBody, limits) if raw.strip() else ForkBody()
    integer("at_turn", body.at_turn, 0, INT64_MIN, INT64_MAX)
    session = found(context, request)
    kept = context.chronicle.transcripts.get(session.key)
    if not session.committed:
        raise ApiError("The session has no finished turn yet.", status=409, code="nothing_to_fork")
    last = len(session.chain)
    if body.at_turn is None and kept is None:  # chat completions can go on with it all the same
        child = context.directory.fork(session, last, list(session.pending.values()), context.clock.now())
    else:
        if kept is None:
            raise transcript_gone(session)
        count = last if body.at_turn is None else kept.at(body.at_turn)
        if count is None:
            raise ApiError(
                f"at_turn: {body.at_turn} is no finished turn of this session",
                param="at_turn",
                code="unknown_turn",
            )
        messages = await context.off_loop(_beginning, kept, count)
        session = found(context, request)
        child = _forked(context, session, kept, messages)
    try:
        await booked(child.booking)
        await context.keep_words(child)
    except BaseException:
        context.directory.close(child)
        context.chronicle.gone(child.key, "it could not be kept")
        raise
    context.engine.fork(session.key, child.key, child.length)
    if child.pending:
        park(context.engine, child, TurnId(0), context.clock.now(), waiting=True)
    settle(context.directory, context.engine, context.chronicle)
    context.chronicle.say(session, "forked", child=child.public_id)
    context.chronicle.say(child, "forked_from", parent=session.public_id, state=child.state.value)
    reply = summary(context, child) | {"pending_tool_calls": list(child.pending)}
    return json_response(reply, status=201)


def _beginning(kept: Transcript, count: int) -> list[JsonObject]:
    return read_messages(kept.messages)[:count]


def _forked(
    context: ServerContext, session: Session, kept: Transcript, messages: Sequence[JsonObject]
) -> Session:
    cut = cut_calls(context, session.tenant, messages[-1:])
    [reply] = told_as_text(messages[-1:], cut, shown=False)
    calls = reply.get("tool_calls")
    pending = [
        PendingCall(call["id"], call["function"]["name"], call["function"]["arguments"], TurnId(0))
        for call in (calls if isinstance(calls, list) else [])
    ]
    try:
        child = context.directory.fork(session, len(messages), pending, context.clock.now())
    except ValueError as error:
        raise ApiError(f"at_turn: {error}", param="at_turn", code="unknown_turn") from None
    context.chronicle.transcripts.fork(kept, child.key, messages)
    return child
