"""What there is to say to an MCP server, and what comes of it. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A server. `headers` may hold secrets: they are sent, and shown to nobody."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ListedTool:
    name: str  # as its server calls it
    description: str
    parameters: JsonObject  # JSON schema of an object


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool returned. `failed`: it says so itself."""

    text: str
    failed: bool = False


class Fault(StrEnum):
    REFUSED = "refused"  # nothing was dialled
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    HTTP = "http"  # a status that is no answer
    PROTOCOL = "protocol"  # an error by the protocol, or what is no MCP


class McpFailed(Exception):
    """No answer of the tool. One line, which the model and the client read."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


class Mcp(Protocol):
    def check(self, url: str) -> None:
        """Refused (`webhooks/address.py`), where it is known without asking anybody; McpFailed where this
        server cannot speak MCP."""
        ...

    async def list_tools(self, place: Place, seconds: float) -> list[ListedTool]:
        """All tools, as the server lists them. McpFailed."""
        ...

    async def call(self, place: Place, tool: str, arguments: JsonObject, seconds: float) -> Answer:
        """McpFailed. Cancelled: the server is told so."""
        ...
