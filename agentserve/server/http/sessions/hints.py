"""POST …/hints: what a client knows of its session's future. It may make it faster, never wrong."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from agentserve.server.agents.history import History
from agentserve.server.agents.records import EarlyHint
from agentserve.server.errors import json_response
from agentserve.server.http.bad_json import check_numbers
from agentserve.server.http.callers import tenant_of
from agentserve.server.http.context import ServerContext, context_of
from agentserve.server.http.reading import read_body
from agentserve.server.http.said import heed
from agentserve.server.http.schemas import decode
from agentserve.server.http.sessions.lookup import found
from agentserve.server.sessions.advice import settle
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject
from tiering.hints import FIELDS, Receipt, Said, Status, hear

FROM_THE_FIRST = "counts from the session's first turn on"


async def session_hints(request: Request) -> Response:
    """A receipt for every field that was sent; what they mean, and how long they hold, `tiering.hints`
    says. What was accepted outlives the server, as far as its session does."""
    context = context_of(request)
    limits = context.options.limits
    if _to_come(context, request) is None:
        found(context, request)
    body = await read_body(request, limits.body_bytes)
    raw: JsonObject = decode(body, JsonObject, limits)
    check_numbers(raw, body)
    await context.check_storage()
    history = _to_come(context, request)
    if history is not None:
        return _told(history.id, await _early(context, history, raw))
    session = found(context, request)
    receipts = heed(context, session, raw)
    settle(context.directory, context.engine, context.chronicle)
    if any(receipt.status is not Status.REJECTED for receipt in receipts.values()):
        await booked(context.directory.keep(session))
    return _told(session.public_id, receipts)


def _to_come(context: ServerContext, request: Request) -> History | None:
    """An agent's session that has had no turn: it is no session of the directory yet."""
    tenant, name = tenant_of(request), request.path_params["name"]
    return None if context.directory.get(tenant, name) else context.agents.shelf.get(tenant, name)


async def _early(context: ServerContext, history: History, raw: JsonObject) -> dict[str, Receipt]:
    """They are kept until its first turn begins."""
    now, head = context.wall(), history.head
    heard = hear(Said(), raw, context.clock.now(), running=True)
    receipts = {
        name: msgspec.structs.replace(receipt, reason=FROM_THE_FIRST)
        if receipt.status is Status.DEFERRED
        else receipt
        for name, receipt in heard.receipts.items()
    }
    kept = {name: value for name, value in raw.items() if name in FIELDS}
    taken = [name for name in kept if name in receipts and receipts[name].status is not Status.REJECTED]
    if taken:
        head.hints = head.hints | {name: EarlyHint(kept[name], now) for name in taken}
        await booked(context.agents.shelf.keep_head(history))
    return receipts


def _told(session: str, receipts: Mapping[str, Receipt]) -> Response:
    told: JsonObject = {name: msgspec.to_builtins(receipt) for name, receipt in receipts.items()}
    return json_response({"object": "agentserve.hints", "session_id": session, "receipts": told})
