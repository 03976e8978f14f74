"""What a caller reads of a turn: typed values, one for each thing that happened. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentserve.client.protocol.errors import TurnFailed
from agentserve.client.protocol.flow import JsonObject


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached` of the input were not computed."""

    input: int
    cached: int
    output: int
    reasoning: int

    @staticmethod
    def of(told: object) -> Usage | None:
        if not isinstance(told, dict):
            return None
        into, out = told.get("input_tokens_details") or {}, told.get("output_tokens_details") or {}
        return Usage(
            told.get("input_tokens", 0),
            into.get("cached_tokens", 0),
            told.get("output_tokens", 0),
            out.get("reasoning_tokens", 0),
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model calls. `arguments`: as JSON; text where what it wrote is none."""

    id: str
    name: str
    arguments: Any
    turn: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    turn: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of an answer. All of an item's, put together, are its text."""

    item: str
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    item: str
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the model's that is whole. `final`: it is the answer, no tool is called after it."""

    item: str
    text: str
    final: bool


@dataclass(frozen=True, slots=True)
class Reasoning:
    item: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCalled:
    call: Call


@dataclass(frozen=True, slots=True)
class ApprovalAsked:
    """The server makes this call of an MCP tool when `session.decide` allows it."""

    request: str
    server: str
    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """What the model reads of a call. `error` or else `output`, which is text or parts of it."""

    call_id: str
    output: Any
    error: str | None


@dataclass(frozen=True, slots=True)
class Resynced:
    """Events were lost on the way, and what they told was found by other ways: nothing is missing from what
    comes. What the items `dropped` had said so far is void (their server died over it); it is said anew."""

    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ErrorTold:
    """The server says that something went wrong; how the turn ends tells `TurnEnded`."""

    code: str | None
    message: str


@dataclass(frozen=True, slots=True)
class TurnEnded:
    turn: str
    status: str  # completed, failed, cancelled
    usage: Usage | None
    code: str | None = None  # of what made it fail
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """An event that this client does not know, as it came."""

    type: str
    data: JsonObject


Event = (
    TurnStarted
    | TextDelta
    | ReasoningDelta
    | Message
    | Reasoning
    | ToolCalled
    | ApprovalAsked
    | ToolReturned
    | Resynced
    | ErrorTold
    | TurnEnded
    | Other
)


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What a turn came to. `items`: all that it added to the session, as the API shows them."""

    turn: str
    status: str
    text: str
    usage: Usage | None
    items: tuple[JsonObject, ...]
    code: str | None = None
    message: str | None = None

    def raise_for_status(self) -> TurnResult:
        """Itself where the turn completed. TurnFailed."""
        if self.status != "completed":
            told = self.message or f"the turn was {self.status}"
            raise TurnFailed(told, self.status, self.code)
        return self


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the server shows it; `raw` has it all."""

    id: str
    status: str  # idle, in_progress, requires_action, failed
    model: str
    required: tuple[Call, ...]
    usage: Usage | None
    metadata: dict[str, str]
    raw: JsonObject

    @staticmethod
    def of(told: JsonObject) -> SessionInfo:
        return SessionInfo(
            id=told["id"],
            status=told["status"],
            model=(told.get("agent") or {}).get("model", ""),
            required=required_of(told),
            usage=Usage.of(told.get("usage")),
            metadata=told.get("metadata") or {},
            raw=told,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a hint. `value`: what counts now."""

    status: str  # accepted, clipped, deferred, rejected
    value: Any = None
    reason: str = ""


def required_of(session: JsonObject) -> tuple[Call, ...]:
    """The calls that a session waits for its client to run."""
    return tuple(
        Call(action["call_id"], action["name"], action["arguments"], action["turn_id"])
        for action in session.get("required_actions") or ()
        if action.get("type") == "function_call"
    )


def approvals_of(session: JsonObject, turn: str) -> tuple[ApprovalAsked, ...]:
    """The calls of a turn that its client has to allow."""
    return tuple(
        ApprovalAsked(action["request_id"], asked["server_label"], asked["name"], asked["arguments"])
        for action in session.get("required_actions") or ()
        if action.get("type") == "mcp_approval_request" and action["turn_id"] == turn
        for asked in (action["request"],)
    )


def text_of(item: JsonObject) -> str:
    """Of a message, or of reasoning."""
    parts = item.get("content" if item["type"] == "message" else "summary") or ()
    return "".join(part.get("text", "") for part in parts)
