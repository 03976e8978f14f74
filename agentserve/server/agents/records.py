"""What is kept of agents and of their sessions: configuration, turns, items. Plain values.

Items come in batches that never change: what a user said, one reply of the model, one tool result. How a
call stands is read from what followed it.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, TypeVar

import msgspec

from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

ToolKind = Literal["function", "python", "webhook", "mcp"]
"""Who runs a tool: the client, a function registered in this process, who receives a webhook, or an MCP
server."""
OUTSIDE: frozenset[str] = frozenset({"function", "webhook"})
"""Kinds whose results may be brought by the session's client."""

TurnStatus = Literal["in_progress", "waiting", "completed", "failed", "cancelled"]
OVER: frozenset[str] = frozenset({"completed", "failed", "cancelled"})

MOST_ARGUMENT_CHARS = 1 << 20
Output = str | list[JsonObject]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def derived_id(prefix: str, *names: str | int) -> str:
    """The same whenever it is asked for: what was told of a thing before the server died is true of it
    afterwards."""
    said = msgspec.json.encode(names)
    return f"{prefix}_{hashlib.blake2b(said, digest_size=12).hexdigest()}"


class AgentTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool as the session was given it: what its definition says later changes nothing here."""

    kind: ToolKind
    name: str
    description: str = ""
    parameters: JsonObject = {}
    strict: bool | None = None
    background: bool = False  # the agent goes on without its result
    defer_loading: bool = False
    timeout: float | None = None  # seconds; None: as long as the server waits for tools
    server: str = ""  # of an MCP tool: the label of its server
    remote: str = ""  # and what that calls it
    approval: bool = False  # each call is shown to a user first
    webhook: str | None = None  # the endpoint of a webhook tool; None: the agent's


MOST_MCP_SECONDS = 600.0  # of a call


class McpServer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A remote MCP server whose tools an agent has."""

    label: str
    url: str
    headers: dict[str, str] = {}  # secrets: nothing shows them
    allowed: tuple[str, ...] | None = None  # names of its tools; None: all
    approve_all: bool = True  # its calls need a user's approval,
    approve: tuple[str, ...] = ()  # or those of these tools do,
    trusted: tuple[str, ...] = ()  # and those of these do not
    required: bool = False  # no turn begins without its listing
    timeout: float | None = None  # seconds of a call

    def __repr__(self) -> str:
        return f"McpServer({self.label!r})"

    @property
    def key(self) -> str:
        """What its listing depends on."""
        said = msgspec.json.encode((self.label, self.url, self.allowed))
        return hashlib.sha256(said).hexdigest()[:16]

    def asks(self, tool: str) -> bool:
        """A call of this tool needs approval."""
        if tool in self.trusted:
            return False
        return self.approve_all or tool in self.approve


class AgentConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    model: str
    name: str | None = None
    instructions: str | None = None
    tools: tuple[AgentTool, ...] = ()
    servers: tuple[McpServer, ...] = ()
    effort: str | None = None
    summary: str | None = None
    verbosity: str = "medium"
    schema: JsonObject | None = None  # that answers have
    service_tier: str = "auto"
    settings: JsonObject = {}  # of sampling, by the names of chat completions
    webhook: str | None = None  # the endpoint of webhook tools that name none

    def webhook_of(self, tool: AgentTool) -> str | None:
        return (tool.webhook or self.webhook) if tool.kind == "webhook" else None

    def tool(self, name: str) -> AgentTool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def server(self, label: str) -> McpServer | None:
        return next((server for server in self.servers if server.label == label), None)


class SavedAgent(msgspec.Struct, frozen=True):
    tenant: str
    config: AgentConfig
    created: float  # Unix time
    updated: float
    metadata: dict[str, str]

    @property
    def id(self) -> str:
        return self.config.id


class EarlyHint(msgspec.Struct, frozen=True):
    """A field of hints as its client sent it, and when (Unix time)."""

    value: object
    at: float

    def due(self, name: str, now: float) -> object:
        """As if it were said at `now`. A wait is counted from the turn's end, a deadline from its word."""
        seconds = self.value
        if name == "deadline" and isinstance(seconds, int | float) and not isinstance(seconds, bool):
            return max(0.0, seconds - (now - self.at))
        return seconds


class Head(msgspec.Struct, omit_defaults=True):
    """A session, but for what happened in it."""

    id: str  # public; the directory's session of this name has its tokens
    tenant: str
    config: AgentConfig
    created: float
    active: float
    metadata: dict[str, str] = {}
    cache_ttl: str | None = None
    hints: dict[str, EarlyHint] = {}  # said before its first turn


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens. Sums over the model calls of a turn."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0

    def plus(self, more: Usage) -> Usage:
        return Usage(
            self.prompt + more.prompt,
            self.cached + more.cached,
            self.generated + more.generated,
            self.reasoning + more.reasoning,
        )


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a turn failed. `too_long`: its prompt does not fit into the context."""

    code: str
    message: str
    too_long: bool = False


class Turn(msgspec.Struct, omit_defaults=True):
    id: str
    number: int  # counts the session's turns from 1
    created: float
    status: TurnStatus = "in_progress"
    completed: float | None = None
    error: Failure | None = None
    usage: Usage | None = None
    steps: int = 0  # model calls
    base: int = 0  # turns of the session up to this number were before it
    key: str | None = None  # the Idempotency-Key it came with
    lives: int = 0  # servers that died while it ran

    @property
    def over(self) -> bool:
        return self.status in OVER


class UserItem(msgspec.Struct, frozen=True, tag="user"):
    id: str
    texts: tuple[str, ...]


class MessageItem(msgspec.Struct, frozen=True, tag="message", omit_defaults=True):
    id: str
    text: str
    final: bool = True  # nothing was called after it
    whole: bool = True


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning", omit_defaults=True):
    id: str
    text: str
    whole: bool = True


class CallItem(msgspec.Struct, frozen=True, tag="call", omit_defaults=True):
    id: str
    call: str
    name: str
    arguments: str  # JSON
    kind: ToolKind = "function"
    background: bool = False
    deadline: float | None = None  # Unix time; after it the call has failed
    whole: bool = True
    server: str = ""  # of an MCP tool, as in `AgentTool`
    remote: str = ""
    approval: bool = False
    webhook: str | None = None  # the endpoint that it is delivered to, as its agent named it


class OutputItem(msgspec.Struct, frozen=True, tag="output", omit_defaults=True):
    id: str
    call: str
    output: Output | None = None
    error: str | None = None


class ListedMcpTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """`name`: what the model calls it; `remote`: what its server does."""

    name: str
    remote: str
    description: str
    parameters: JsonObject


class ListingItem(msgspec.Struct, frozen=True, tag="listing", omit_defaults=True):
    """The tools of an MCP server, as they are for this session from now on."""

    id: str
    server: str
    key: str
    tools: tuple[ListedMcpTool, ...] = ()
    error: str | None = None


Decision = Literal["approve", "deny", "cancel"]


class ApprovalItem(msgspec.Struct, frozen=True, tag="approval"):
    """What a user said to a call."""

    id: str
    call: str
    decision: Decision


Item = UserItem | MessageItem | ReasoningItem | CallItem | OutputItem | ListingItem | ApprovalItem
Said = MessageItem | ReasoningItem | CallItem
"""What the model brings forth."""


class Batch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Items that came together. `step`: of a reply, the number of the session's turn that made it; `told`:
    background results that it was told of."""

    number: int  # counts the session's batches from 1
    turn: str
    items: tuple[Item, ...]
    step: int | None = None
    told: tuple[str, ...] = ()


Happened = tuple[str, int]
"""An event of a session: which, and the number of its turn (0: of none)."""


class Owed(msgspec.Struct, frozen=True):
    """Events of a session that the outbox of webhooks does not have yet."""

    events: tuple[Happened, ...]


Record = TypeVar("Record", SavedAgent, Head, Turn, Batch, Owed)


def packed(record: SavedAgent | Head | Turn | Batch | Owed) -> bytes:
    """JSON: a model can write half a surrogate pair, which msgpack does not take."""
    return write_json(msgspec.to_builtins(record))
