"""What clients say of their sessions' future, on the hints route or beside a request for a turn.

It may make a session faster, never wrong: what is no hint has a receipt that says so, or is left out where
nobody would read one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentserve.server.http.context import ServerContext
from agentserve.server.http.names import Identity
from agentserve.server.http.schemas import SamplingFields
from agentserve.server.sessions.advice import advise
from agentserve.server.sessions.session_record import Session
from agentserve.server.text_port import JsonObject
from tiering.hints import Receipt, hear


def heed(
    context: ServerContext, session: Session, raw: Mapping[str, object], *, lent: bool = False
) -> Mapping[str, Receipt]:
    """Take in fields of hints (`tiering.hints`): they are kept, and told to the session's readers and its
    worker. A receipt for each. What is said while a turn runs counts from that turn's end.

    lent: the priority is what the server makes of something else that was said.
    """
    now, running = context.clock.now(), session.running is not None
    heard = hear(session.said, raw, now, running=running, held=context.engine.holds(session.key), lent=lent)
    told: JsonObject = {name: msgspec.to_builtins(receipt) for name, receipt in heard.receipts.items()}
    context.chronicle.say(session, "hints", receipts=told)
    advise(context.directory, context.engine, session, heard, now)
    return heard.receipts


def take_advice(context: ServerContext, session: Session, identity: Identity, fields: SamplingFields) -> None:
    """Keep what a request for a turn says besides; the turn has been leased."""
    raw = _raw(identity, fields)
    if raw:
        heed(context, session, raw)


def _raw(identity: Identity, fields: SamplingFields) -> JsonObject:
    raw: JsonObject = {}
    if identity.final:
        raw["final"] = True
    hints = fields.nvext.get("agent_hints") if isinstance(fields.nvext, Mapping) else None
    priority = hints.get("priority") if isinstance(hints, Mapping) else None
    if isinstance(priority, int) and not isinstance(priority, bool):
        raw["priority"] = priority
    return raw
