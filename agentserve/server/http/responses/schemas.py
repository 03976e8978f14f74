"""Bodies of the Responses and Conversations routes. Unknown fields are ignored, absent ones are None.

Items and tools stay plain objects here: their kinds are many, and those that are not known are skipped
(`items.py`, `tools.py`).
"""

from __future__ import annotations

import msgspec

from agentserve.server.http.schemas import SloFields
from agentserve.server.text_port import JsonObject


class TextFormat(msgspec.Struct):
    type: str = "text"
    name: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class PromptCacheOptions(msgspec.Struct):
    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | JsonObject | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt: object = None  # not supported: known by name, because an answer without it answers something else
    # extensions, named as in chat completions
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    chat_template_kwargs: JsonObject | None = None
    thinking_token_budget: int | None = None
    slo: str | SloFields | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def prewarm(self) -> bool:
        return bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)


class ConversationRequest(msgspec.Struct, kw_only=True):
    """To make one, or to change one (its metadata only)."""

    metadata: dict[str, str] | None = None
    items: list[JsonObject] | None = None


class ItemsRequest(msgspec.Struct, kw_only=True):
    items: list[JsonObject]
