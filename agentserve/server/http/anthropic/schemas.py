"""Bodies of Anthropic's Messages API, as typed structs. Unknown fields are ignored, absent ones are None.

Blocks are one flat struct: their kinds are many and grow, and which of them a server takes is no matter
of shape (`asked.py` says).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from agentserve.server.http.schemas import SloFields
from agentserve.server.text_port import JsonObject

Anything = Annotated[object, msgspec.Meta(extra_json_schema={"description": "As `type` says"})]


class CacheControl(msgspec.Struct):
    type: str = "ephemeral"
    ttl: str | None = None  # "5m" or "1h"


def _no_input() -> msgspec.Raw:
    return msgspec.Raw(b"{}")


class Block(msgspec.Struct, kw_only=True):
    """Any content block. What depends on its kind is looked at when the kind is known."""

    type: str
    text: str | None = None
    id: str | None = None  # of a tool_use, like `name` and `input`
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=_no_input)  # as written: no number is rounded
    tool_use_id: str | None = None  # of a tool_result, like `is_error`
    content: Anything = None  # text or blocks; of a tool_result, a search_result
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    source: Anything = None  # of a document or an image
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None  # of a tool_reference
    tool: Anything = None  # of a tool_addition or a tool_removal
    cache_control: CacheControl | None = None


Content = str | list[Block]


class Turn(msgspec.Struct):
    role: str
    content: Content


class Tool(msgspec.Struct, kw_only=True):
    """One without `input_schema` is a tool of Anthropic's own servers, or one the model must know by name."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # not offered before the conversation refers to it
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None  # "summarized" or "omitted"


class OutputFormat(msgspec.Struct):
    type: str
    schema: JsonObject | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class Thread(msgspec.Struct):
    """Server-held messages: "create", or "continue" after a reply."""

    type: str
    previous_message_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """What makes the prompt: all that counting needs."""

    model: str
    messages: list[Turn]
    system: Content | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where betas had `output_config.format`
    cache_control: CacheControl | None = None
    thread: Thread | None = None
    session_id: str | None = None  # an extension, as on every dialect


class MessagesRequest(PromptFields, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: str | None = None
    slo: str | SloFields | None = None  # an extension, as on every dialect


class CountRequest(PromptFields, kw_only=True):
    """Fields of POST /v1/messages/count_tokens."""
