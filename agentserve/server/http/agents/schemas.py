"""Bodies of the Agents API. Unknown fields are ignored; null and absent are told apart where it matters."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from agentserve.server.http.schemas import AllowedTool, AllowedTools, FunctionName, NamedChoice, SloFields
from agentserve.server.text_port import JsonObject

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class InputMessage(msgspec.Struct):
    content: str | list[JsonObject]
    role: Literal["user"] = "user"
    type: Literal["message"] = "message"


Input = str | list[InputMessage]


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_schema"] = "text"
    schema: JsonObject | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    effort: Effort | UnsetType | None = UNSET
    summary: Literal["concise", "detailed", "auto"] | UnsetType | None = UNSET


class ToolChoice(NamedChoice):
    """As chat completions have it, or in the flat shape of the Responses API."""

    name: str | None = None
    mode: str | None = None
    tools: list[AllowedTool] | None = None

    def plain(self) -> NamedChoice:
        """In the shape of chat completions."""
        function, allowed = self.function, self.allowed_tools
        if function is None and self.name is not None:
            function = FunctionName(self.name)
        if allowed is None and self.tools is not None:
            allowed = AllowedTools(self.mode or "auto", self.tools)
        return NamedChoice(self.type, function, allowed)


class AgentFields(msgspec.Struct, kw_only=True):
    """An agent, or what is changed of one. The last group is ours: chat completions' fields."""

    model: str | UnsetType = UNSET
    name: str | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    tools: list[JsonObject] | UnsetType | None = UNSET
    reasoning: Reasoning | UnsetType | None = UNSET
    text: TextConfig | UnsetType | None = UNSET
    service_tier: str | UnsetType | None = UNSET
    multi_agent: JsonObject | None = None
    compaction: JsonObject | None = None
    webhook: str | UnsetType | None = UNSET
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    max_output_tokens: int | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    tool_choice: str | ToolChoice | UnsetType | None = UNSET
    slo: str | SloFields | UnsetType | None = UNSET


class AgentRequest(AgentFields, kw_only=True):
    """`POST /v1/agents`, `/v1/agents/{id}`."""

    metadata: dict[str, str] | UnsetType | None = UNSET


class Environment(msgspec.Struct):
    type: str = "none"


class CacheOptions(msgspec.Struct):
    ttl: Literal["30m", "12h"] = "30m"


class SessionRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/agents/sessions`."""

    environment: Environment = msgspec.field(default_factory=Environment)
    agent: AgentFields | None = None
    agent_id: str | None = None
    input: Input | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_options: CacheOptions | None = None
    stream: bool | None = None
    stream_options: JsonObject | None = None
    vault_ids: list[str] | None = None


class SessionUpdate(msgspec.Struct, kw_only=True):
    """`POST /v1/agents/sessions/{id}`."""

    agent: AgentFields | None = None
    metadata: dict[str, str] | UnsetType | None = UNSET
    prompt_cache_options: CacheOptions | UnsetType | None = UNSET


class MessageInput(msgspec.Struct, tag_field="type", tag="agent.session.input.message"):
    input: list[InputMessage]


class ResultInput(msgspec.Struct, tag_field="type", tag="agent.session.input.tool_result"):
    turn_id: str
    call_id: str
    success: bool
    output: str | list[JsonObject] | None = None
    error: str | None = None


class CancelInput(msgspec.Struct, tag_field="type", tag="agent.session.input.cancel"):
    pass


class ApprovalResponse(msgspec.Struct):
    decision: Literal["approve", "deny", "cancel"]
    type: Literal["mcp_tool_call"] = "mcp_tool_call"


class ApprovalInput(msgspec.Struct, tag_field="type", tag="agent.session.input.mcp_approval_request_result"):
    request_id: str
    response: ApprovalResponse


class EventsRequest(msgspec.Struct):
    """`POST /v1/agents/sessions/{id}/events`."""

    events: list[MessageInput | ResultInput | CancelInput | ApprovalInput]
