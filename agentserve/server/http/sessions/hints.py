"""POST …/hints: what a client knows of its session's future. It may make it faster, never wrong."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.errors import json_response
from agentserve.server.http.bad_json import check_numbers
from agentserve.server.http.context import context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.said import heed
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.sessions.advice import settle
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject
from tiering.hints import Status


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
    receipts = heed(context, session, raw)
    settle(context.directory, context.engine, context.chronicle)
    if any(receipt.status is not Status.REJECTED for receipt in receipts.values()):
        await booked(context.directory.keep(session))
    told: JsonObject = {name: msgspec.to_builtins(receipt) for name, receipt in receipts.items()}
    return json_response({"object": "agentserve.hints", "session_id": session.public_id, "receipts": told})
