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
