"""GET and DELETE /agentserve/sessions: what the directory and the workers know of a session."""

from __future__ import annotations

from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http import query
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.residency import decisions, placement
from agentserve.server.http.sampling import integer
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.sessions.book import booked
from agentserve.server.sessions.session_record import Session
from agentserve.server.text_port import JsonObject


class CloseRequest(msgspec.Struct):
    session_id: str


MOST_LISTED = 1000
MOST_DETAILED = 200


async def list_sessions(request: Request) -> Response:
    """The sessions used last, newest first; `?limit=` bounds them (100 by default).

    With `?detail=true`, for at most MOST_DETAILED, also where their KV is: each one's worker is asked.
    """
    context = context_of(request)
    detail = query.flag(request, "detail")
    most = MOST_DETAILED if detail else MOST_LISTED
    limit = integer("limit", query.whole(request, "limit"), 100, 1, most)
    context.expire()
    tenant = tenant_of(request)
    sessions = list(islice(context.directory.sessions(tenant), limit))
    listed = [summary(context, session) for session in sessions]
    if detail:
        seen = await context.engine.describe_sessions([session.key for session in sessions])
        for session, reply in zip(sessions, listed, strict=True):
            reply.update(placement(context, session, seen.get(session.key)))
    total = context.directory.count(tenant)
    return json_response({"object": "list", "data": listed, "has_more": total > len(listed), "total": total})


async def get_session(request: Request) -> Response:
    context = context_of(request)
    session = found(context, request)
    seen = (await context.engine.describe_sessions([session.key])).get(session.key)
    view = seen.view if seen is not None else None
    kept = context.chronicle.transcripts.get(session.key)
    reply = summary(context, session)
    reply["pages"] = view.pages if view else 0
    reply["computed_tokens"] = view.computed if view else 0
    reply["preemptions"] = view.preemptions if view else 0
    reply.update(placement(context, session, seen))
    reply["decisions"] = decisions(context, view)
    reply["devalued"] = session.left.value if session.left is not None else None
    reply["hints"] = _hints(context, session)
    reply["usage"] = dict(session.usage)
    reply["pending_tool_calls"] = [
        {
            "id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "turn": call.turn,
            "epoch": session.epoch,
            "result_taken": kept is not None and call.id in kept.held,
        }
        for call in session.pending.values()
    ]
    reply["history"] = [
        {
            "state": step.state.value,
            "at": round(context.unix(step.at), 6),
            "turn": step.turn,
            "reason": step.reason,
            "tools": list(step.tools),
        }
        for step in session.history
    ]
    return json_response(reply)


def _hints(context: ServerContext, session: Session) -> JsonObject:
    """What its client said that counts now, or, while a turn runs, counted before it."""
    hints = session.said.hints(context.clock.now())
    told: JsonObject = msgspec.to_builtins(hints)
    told["deadline"] = None if hints.deadline is None else round(context.unix(hints.deadline), 6)
    return told


async def delete_session(request: Request) -> Response:
    """Close a session: its running turn is aborted, its tokens are forgotten.

    Where the disk does not take that it is closed, it is closed here, but a restart may bring it back.
    """
    context = context_of(request)
    session = found(context, request)
    await _close(context, session)
    return json_response({"id": session.public_id, "object": "agentserve.session", "deleted": True})


async def close_session(request: Request) -> Response:
    """The same under SGLang's name; to close one that is not there is no error."""
    context = context_of(request)
    limits = context.options.limits
    fields = decode(await read_body(request, limits.body_bytes), CloseRequest, limits)
    session = context.directory.get(tenant_of(request), fields.session_id)
    if session is not None:
        await _close(context, session)
    return json_response({"session_id": fields.session_id, "closed": session is not None})


async def _close(context: ServerContext, session: Session) -> None:
    agent = context.agents.shelf.get(session.tenant, session.public_id)
    dropped = None if agent is None else await context.agents.close(agent)
    forgotten = context.directory.close(session)
    context.engine.close(session.key)
    context.chronicle.gone(session.key, "deleted")
    await booked(forgotten)
    await booked(dropped)


def summary(context: ServerContext, session: Session) -> JsonObject:
    return {
        "id": session.public_id,
        "object": "agentserve.session",
        "state": session.state.value,
        "parent": session.parent,
        "turns": session.committed,
        "running_turn": session.running,
        "epoch": session.epoch,
        "messages": len(session.chain),
        "tokens": session.length,
        "created_at": round(context.unix(session.created), 6),
        "last_active_at": round(context.unix(session.active), 6),
    }
