"""Shapes of replies, for `/openapi.json`: what a client may count on. The replies themselves are made as
plain objects; a test holds them against these."""

from __future__ import annotations

from typing import Literal

import msgspec

from agentserve.server.text_port import JsonObject


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesErrorReply(msgspec.Struct):
    """Of the Messages routes."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class PromptDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    type: str
    function: CalledFunction


class ReplyMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: str | None
    annotations: list[JsonObject]
    tool_calls: list[ToolCall] = []
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: JsonObject | None
    finish_reason: str


class ChatReply(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    session_id: str


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: JsonObject | None
    finish_reason: str


class CompletionReply(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class ModelReply(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelReply]


class TokensReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class ThinkingDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation: dict[str, int]
    service_tier: str
    server_tool_use: None
    inference_geo: None


class MessageReply(msgspec.Struct):
    """Of the Messages API. Blocks are text, thinking and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[JsonObject]
    stop_reason: str
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class MessageTokens(msgspec.Struct):
    input_tokens: int


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseReply(msgspec.Struct):
    """A response, whole or on its way. Items are messages, reasoning and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: JsonObject | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[JsonObject]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: JsonObject | None
    prompt_cache_key: str | None
    reasoning: JsonObject
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: JsonObject
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    session_id: str | None


class InputTokensReply(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(msgspec.Struct):
    object: Literal["list"]
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ConversationReply(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedReply(msgspec.Struct):
    id: str
    object: str
    deleted: Literal[True]
