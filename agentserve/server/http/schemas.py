"""Bodies of the HTTP API, as typed structs. Unknown fields are ignored, absent ones are None.

Only shapes live here; ranges are checked in `sampling.py`, meaning in the endpoints, and messages by
the text room: what a valid history is, one place decides.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.bad_json import unreadable
from agentserve.server.limits import Limits, check_depth
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import ROLES

RawMessage = Annotated[
    JsonObject,
    msgspec.Meta(
        extra_json_schema={
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
                "tool_calls": {"type": "array"},
                "tool_call_id": {"type": "string"},
                "reasoning_content": {"type": "string"},
            },
            "required": ["role"],
        }
    ),
]
"""What the text room decides about, with a sketch of it for who reads the schema."""


class FunctionDef(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolDef(msgspec.Struct):
    type: str = "function"
    function: FunctionDef | None = None
    defer_loading: bool | None = None  # it may be called, but the prompt's list of tools is without it


class FunctionName(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct):
    type: str = "function"
    function: FunctionName | None = None
    name: str | None = None  # the same in the flat shape of the Responses API


class AllowedTools(msgspec.Struct):
    mode: str = "auto"
    tools: list[AllowedTool] = []


class NamedChoice(msgspec.Struct):
    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(msgspec.Struct):
    name: str = "response"
    schema: JsonObject | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchemaFormat | None = None
    # of "structural_tag", as vLLM takes it: xgrammar's, or the older one
    format: JsonObject | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's; one of these. A name that is misspelt would leave the answer without its form."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: JsonObject | str | None = None
    # of how vLLM's backends go about it, which is nothing here
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SloFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"name": "class"}):
    """What a turn is promised: a class of the server's configuration, and times in seconds that go before the
    class's. A name that is misspelt would promise nothing."""

    name: str | None = None
    ttft: float | None = None  # to the first token
    tbt: float | None = None  # from token to token
    gap: float | None = None  # between any two tokens
    tpot: float | None = None  # per token after the first, on average
    total: float | None = None  # to the last token
    shed: bool | None = None  # refuse it with 503 if the queue cannot keep that, rather than be late


class SamplingFields(msgspec.Struct, kw_only=True):
    """What chat and text completion have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # extensions, named as vLLM names them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None  # vLLM's older names for the same
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    vllm_xargs: object = None  # may have a session_id
    nvext: object = None  # Dynamo's; may have agent_hints
    slo: str | SloFields | None = None  # ours; a text is a class
    service_tier: str | None = None  # names a class, if there is one


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[RawMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolDef] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None  # an extension, as vLLM names it
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    # not supported: known by name, because an answer without the asked-for form is worse than none
    functions: list[JsonObject] | None = None
    function_call: object = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[RawMessage] | None = None
    tools: list[ToolDef] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body")

_OUT_OF_RANGE = ("Number out of range", "Integer value out of range")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


def decode(body: bytes, kind: type[Body], limits: Limits) -> Body:
    """Decode a request body; anything wrong is a 400 that names the parameter."""
    check_depth(body, limits.json_depth, limits.json_containers, limits.json_strings)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if text.startswith(_OUT_OF_RANGE):
            raise unreadable(body, error) from None
        found = _PATH.search(text)
        param = found.group(1) or None if found else None
        missing = re.search(r"missing required field `(\w+)`", text)
        if missing:
            param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        unknown = re.search(r"contains unknown field `([^`]*)`", text)
        if unknown:
            param, text = (
                f"{param}.{unknown.group(1)[:80]}" if param else unknown.group(1)[:80],
                "is not known",
            )
        where = f"{param}: " if param else ""
        raise ApiError(f"{where}{_PATH.sub('', text)}", param=param, code="invalid_value") from None
    except msgspec.DecodeError as error:
        raise unreadable(body, error) from None
    except (UnicodeDecodeError, RecursionError):
        raise ApiError("The body is not valid UTF-8 JSON.", code="invalid_json") from None
