"""Events as receivers get them: OpenAI's envelope. Pure."""

from __future__ import annotations

import hashlib
import secrets

from agentserve.server.agents.runners import ToolCall
from agentserve.server.agents.texts import arguments_of
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

ACTION_REQUIRED = "agent.session.action_required"
SESSION_EVENTS = ("created", "in_progress", "idle", "failed")
RESPONSE_EVENTS = ("completed", "failed", "cancelled", "incomplete")
EVENT_TYPES = (
    *(f"agent.session.{kind}" for kind in SESSION_EVENTS),
    ACTION_REQUIRED,
    *(f"response.{kind}" for kind in RESPONSE_EVENTS),
)
THIN, FULL = "thin", "full"


def new_event_id() -> str:
    return f"evt_{secrets.token_hex(16)}"


def event_id_of(call: ToolCall) -> str:
    """The same after a restart: whatever happens, a call is one event."""
    return derived_event_id(call.owner, call.session, call.number, call.id)


def derived_event_id(*names: str | int) -> str:
    named = "\0".join(map(str, names))
    return f"evt_{hashlib.blake2b(named.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def event(id_: str, kind: str, created: float, data: JsonObject) -> bytes:
    return write_json({"id": id_, "object": "event", "type": kind, "created_at": int(created), "data": data})


def session_data(session: str) -> JsonObject:
    return {"id": session, "environment_type": "none"}


def thin_action(session: str) -> JsonObject:
    """Whoever wants to know more asks for the session."""
    return {"id": session, "required_action": {"type": "function_call"}}


def full_action(call: ToolCall, callback_url: str, ends: float | None) -> JsonObject:
    """All that a receiver needs to run the call; `callback_url`: where the result may be posted later, until
    `ends` (Unix time)."""
    action: JsonObject = {
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": arguments_of(call.item),
        "turn_id": call.turn,
        "callback_url": callback_url,
    }
    if ends is not None:
        action["expires_at"] = int(ends)
    return {"id": call.session, "required_action": action}


def sample(kind: str) -> JsonObject:
    """What a test event is about: nothing that there is."""
    if kind == ACTION_REQUIRED:
        return thin_action("sess_test")
    if kind.startswith("agent.session."):
        return session_data("sess_test")
    return {"id": "resp_test"}
