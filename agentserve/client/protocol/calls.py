"""What can be asked of the server, a flow for each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agentserve.client.protocol.errors import BadReply, BadRequest, StatusError, TooLarge
from agentserve.client.protocol.events import Receipt, SessionInfo
from agentserve.client.protocol.flow import Flow, JsonObject, Means, Pause, Reply, Request, asked

SESSIONS = "/v1/agents/sessions"
PAGE = 100
IDEMPOTENCY = "idempotency-key"
TURN = "x-turn-id"
UNKNOWN_CALL = "Unknown pending tool call"
UNKNOWN_CALL_PAUSES = (0.1, 0.3, 0.6, 1.0)  # a call may be told before it can be answered
TOO_LONG = "The result is too long for the context."


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool came to: `error`, which the model reads, or else its output."""

    output: str = ""
    error: str | None = None


def path_of(session: str, *more: str) -> str:
    """Of the Agents API."""
    return "/".join([SESSIONS, quote(session, safe=""), *(quote(part, safe="") for part in more)])


def own_path(session: str, *more: str) -> str:
    """Of the session routes."""
    return "/".join(["/agentserve/sessions", *(quote(part, safe="") for part in (session, *more))])


# --- sessions ------------------------------------------------------------------------------


def create_session(agent: JsonObject, metadata: Mapping[str, str] | None, means: Means) -> Flow[SessionInfo]:
    body: JsonObject = {"environment": {"type": "none"}, "agent": agent}
    if metadata:
        body["metadata"] = dict(metadata)
    reply = yield from asked(_keyed(SESSIONS, body, means), means)
    return info_of(reply)


def get_session(session: str, means: Means) -> Flow[SessionInfo]:
    return info_of((yield from asked(Request("GET", path_of(session)), means)))


def list_sessions(
    after: str | None, metadata: Mapping[str, str] | None, means: Means
) -> Flow[tuple[list[SessionInfo], str | None]]:
    """A page of sessions, the newest first, and after which one the next page begins."""
    query = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    data, following = yield from _page(SESSIONS, after, "desc", means, query)
    try:
        return [SessionInfo.of(one) for one in data], following
    except (KeyError, TypeError, AttributeError) as error:
        raise BadReply(f"a session without {error}") from None


def delete_session(session: str, means: Means) -> Flow[None]:
    """NotFound."""
    yield from asked(Request("DELETE", path_of(session)), means, done=404)


def all_of(path: str, means: Means) -> Flow[list[JsonObject]]:
    """A whole list, in order."""
    found: list[JsonObject] = []
    after: str | None = None
    while True:
        data, after = yield from _page(path, after, "asc", means)
        found += data
        if after is None:
            return found


def one(path: str, means: Means) -> Flow[JsonObject]:
    return (yield from asked(Request("GET", path), means)).json()


def last_turn(session: str, means: Means) -> Flow[JsonObject | None]:
    request = Request("GET", path_of(session, "turns"), query={"limit": "1", "order": "desc"})
    data = (yield from asked(request, means)).json().get("data") or [None]
    turn: JsonObject | None = data[0]
    return turn


# --- what is said to a session -------------------------------------------------------------


def say(session: str, text: str | Sequence[str], means: Means) -> Flow[str | None]:
    """A message, of one text or several. The turn that has begun with it; None: this server names none."""
    texts = [text] if isinstance(text, str) else list(text)
    content = [{"type": "input_text", "text": part} for part in texts]
    event = {"type": "agent.session.input.message", "input": [{"role": "user", "content": content}]}
    reply = yield from asked(_keyed(path_of(session, "events"), {"events": [event]}, means), means)
    return reply.headers.get(TURN)


def cancel(session: str, means: Means) -> Flow[None]:
    """End the turn that runs; without one nothing happens."""
    event = {"type": "agent.session.input.cancel"}
    yield from asked(Request("POST", path_of(session, "events"), {"events": [event]}), means)


def decide(session: str, request: str, approve: bool, means: Means) -> Flow[None]:
    """What a user says to a call that is to be allowed. The same again does nothing; else Conflict."""
    event = {
        "type": "agent.session.input.mcp_approval_request_result",
        "request_id": request,
        "response": {"type": "mcp_tool_call", "decision": "approve" if approve else "deny"},
    }
    yield from asked(Request("POST", path_of(session, "events"), {"events": [event]}), means)


def give(session: str, turn: str, call: str, outcome: Outcome, means: Means) -> Flow[None]:
    """The result of a call. One that is too long becomes an error that the model reads. StatusError where
    the server waits for no such result, or has another one."""
    pauses = iter(UNKNOWN_CALL_PAUSES)
    while True:
        event: JsonObject = {"type": "agent.session.input.tool_result", "turn_id": turn, "call_id": call}
        event |= {"success": outcome.error is None}
        event |= {"output": outcome.output} if outcome.error is None else {"error": outcome.error}
        try:
            yield from asked(Request("POST", path_of(session, "events"), {"events": [event]}), means)
        except BadRequest as error:
            pause = next(pauses, None) if error.message.startswith(UNKNOWN_CALL) else None
            if pause is not None:
                yield Pause(pause)
            elif error.code == "context_length_exceeded" and outcome.error is None:
                outcome = Outcome(error=TOO_LONG)
            else:
                raise
        except TooLarge:
            if outcome.error is not None:
                raise
            outcome = Outcome(error=TOO_LONG)
        else:
            return


def final_refusal(error: StatusError) -> bool:
    """Whether a refused result is a matter of its call alone: another one was first, or its turn is over."""
    return error.status in (400, 404, 409, 422)


# --- AgentServe's own ----------------------------------------------------------------------


def describe(session: str, means: Means) -> Flow[JsonObject]:
    return (yield from one(own_path(session), means))


def hint(session: str, hints: Mapping[str, Any], means: Means) -> Flow[dict[str, Receipt]]:
    reply = yield from asked(Request("POST", own_path(session, "hints"), dict(hints)), means)
    try:
        return {
            name: Receipt(told["status"], told.get("value"), told.get("reason") or "")
            for name, told in reply.json()["receipts"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise BadReply(f"receipts without {error}") from None


def fork(session: str, at_turn: int | None, means: Means) -> Flow[JsonObject]:
    """Not sent again where it may have been done: there would be two."""
    body: JsonObject = {} if at_turn is None else {"at_turn": at_turn}
    request = Request("POST", own_path(session, "fork"), body, repeatable=False)
    return (yield from asked(request, means)).json()


def close_own(session: str, means: Means) -> Flow[None]:
    """NotFound."""
    yield from asked(Request("DELETE", own_path(session)), means, done=404)


def give_own(session: str, results: Mapping[str, str], means: Means) -> Flow[JsonObject]:
    """Results on the session routes: a receipt, or with the last one the reply of a chat completion."""
    listed = [{"call_id": call, "content": content} for call, content in results.items()]
    request = Request("POST", own_path(session, "tool_results"), {"results": listed}, repeatable=False)
    return (yield from asked(request, means)).json()


# --- parts ---------------------------------------------------------------------------------


def info_of(reply: Reply) -> SessionInfo:
    """BadReply."""
    try:
        return SessionInfo.of(reply.json())
    except (KeyError, TypeError, AttributeError) as error:
        raise BadReply(f"a session without {error}") from None


def _keyed(path: str, body: JsonObject, means: Means) -> Request:
    """A request that the server does once, however often it comes."""
    return Request("POST", path, body, headers={IDEMPOTENCY: means.new_key()})


def _page(
    path: str, after: str | None, order: str, means: Means, query: Mapping[str, str] | None = None
) -> Flow[tuple[list[JsonObject], str | None]]:
    asks = {"limit": str(PAGE), "order": order, **(query or {})}
    if after is not None:
        asks["after"] = after
    told = (yield from asked(Request("GET", path, query=asks), means)).json()
    data = told.get("data")
    if not isinstance(data, list):
        raise BadReply("a list without data")
    return data, told.get("last_id") if told.get("has_more") and data else None
