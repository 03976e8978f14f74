"""POST …/hints: what a client knows of its session's future. It may make it faster, never wrong."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http.bad_json import check_numbers
from agentserve.server.http.context import context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.sessions.advice import advise, settle
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject
from tiering.hints import Status, hear


async def session_hints(request: Request) -> Response:
    """A receipt for every field that was sent; what they mean, and how long they hold, `tiering.hints`
    says. What was accepted outlives the server, as far as its session does."""
    context = context_of(request)
    limits = context.options.limits
    found(context, request)
    raw: JsonObject = decode(await read_body(request, limits.body_bytes), JsonObject, limits)
    check_numbers(raw)
    await context.check_storage()
    session = found(context, request)
    now, running = context.clock.now(), session.running is not None
    heard = hear(session.said, raw, now, running=running, held=context.engine.holds(session.key))
    told: JsonObject = {name: msgspec.to_builtins(receipt) for name, receipt in heard.receipts.items()}
    context.chronicle.say(session, "hints", receipts=told)
    advise(context.directory, context.engine, session, heard, now)
    settle(context.directory, context.engine, context.chronicle)
    if any(receipt.status is not Status.REJECTED for receipt in heard.receipts.values()):
        await booked(context.directory.keep(session))
    return json_response({"object": "agentserve.hints", "session_id": session.public_id, "receipts": told})
