"""What a chat request says of its session's future, besides asking for a turn."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import Identity
from agentserve.server.http.schemas import SamplingFields
from agentserve.server.sessions.advice import advise
from agentserve.server.sessions.session_record import Session
from agentserve.server.text_port import JsonObject
from tiering.hints import hear


def take_advice(context: ServerContext, session: Session, identity: Identity, fields: SamplingFields) -> None:
    """Keep it as the hints route would (`tiering.hints`). The session's turn has been leased, so it counts
    from that turn's end; what is no hint is left out, as any field that nobody knows."""
    raw = _raw(identity, fields)
    if not raw:
        return
    now = context.clock.now()
    heard = hear(session.said, raw, now, running=True, held=context.engine.holds(session.key))
    receipts: JsonObject = {name: msgspec.to_builtins(receipt) for name, receipt in heard.receipts.items()}
    context.chronicle.say(session, "hints", receipts=receipts)
    advise(context.directory, context.engine, session, heard, now)


def _raw(identity: Identity, fields: SamplingFields) -> JsonObject:
    raw: JsonObject = {}
    if identity.final:
        raw["final"] = True
    hints = fields.nvext.get("agent_hints") if isinstance(fields.nvext, Mapping) else None
    priority = hints.get("priority") if isinstance(hints, Mapping) else None
    if isinstance(priority, int) and not isinstance(priority, bool):
        raw["priority"] = priority
    return raw
