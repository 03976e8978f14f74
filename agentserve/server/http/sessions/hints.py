"""POST …/hints: what a client knows of its session's future. It may make it faster, never wrong."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agentserve.messages import Hint, ToolSignal
from agentserve.server.errors import json_response
from agentserve.server.http.context import context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.text_port import JsonObject
from tiering.hints import receive
from tiering.policy.base import Signal


async def session_hints(request: Request) -> Response:
    """A receipt for every field that was sent; what they mean, `tiering.hints` says. They replace what
    was said before."""
    context = context_of(request)
    limits = context.options.limits
    found(context, request)
    raw: JsonObject = decode(await read_body(request, limits.body_bytes), JsonObject, limits)
    session = found(context, request)
    hints, receipts = receive(raw, context.clock.now())
    context.engine.tell(Hint(session.key, hints))
    if session.pending and session.engine_turn is not None and hints.expected_wait is not None:
        context.engine.tell(ToolSignal(session.key, session.engine_turn, Signal.EXPECTED))
    told: JsonObject = {
        name: {"status": receipt.status.value, "value": receipt.value, "reason": receipt.reason}
        for name, receipt in receipts.items()
    }
    context.chronicle.say(session, "hints", receipts=told)
    return json_response({"object": "agentserve.hints", "session_id": session.public_id, "receipts": told})
