"""From a Messages body to the chat request that asks the same, and errors back to the body's words. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentserve.server.errors import ApiError
from agentserve.server.http.anthropic.history import history_of
from agentserve.server.http.anthropic.offered import Offered
from agentserve.server.http.anthropic.schemas import (
    MessagesRequest,
    OutputFormat,
    PromptFields,
    Thinking,
    ToolChoice,
)
from agentserve.server.http.schemas import (
    ChatRequest,
    FunctionName,
    JsonSchemaFormat,
    NamedChoice,
    ResponseFormat,
)
from agentserve.server.http.tool_choice import NOT_OFFERED, not_offered
from agentserve.server.text_port import JsonObject

_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_MESSAGE = re.compile(r"messages\[(\d+)\]((?:\.\w+|\[\d+\])*)")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(\.\w+)?")
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
_FORMAT = re.compile(r"^response_format(?:\.type|\.json_schema(?=\.schema)|\.json_schema$)?")
_ANY = "'required'", '{"type": "any"}'


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat request, and where in the body its messages and tools came from."""

    chat: ChatRequest
    places: tuple[str, ...]
    tools: tuple[int, ...]
    shows_thinking: bool
    left_out: tuple[str, ...] = ()  # kinds of tools that are not offered

    def renamed(self, error: ApiError) -> ApiError:
        """The error of the chat request in the words of the body."""
        field, colon, rest = error.message.partition(":")
        message = f"{_NAMES[field]}{colon}{rest}" if colon and field in _NAMES else error.message
        if field == "tool_choice":
            message = message.replace(*_ANY)
        if error.code == NOT_OFFERED:
            message += not_offered(self.left_out)
        return ApiError(
            self._placed(message),
            status=error.status,
            param=None if error.param is None else self._placed(_NAMES.get(error.param, error.param)),
            code=error.code,
            headers=error.headers,
            details=error.details,
        )

    def _placed(self, text: str) -> str:
        text = _FORMAT.sub("output_config.format", text)
        return _TOOL.sub(self._tool, _MESSAGE.sub(self._message, text))

    def _message(self, found: re.Match[str]) -> str:
        index, rest = int(found[1]), found[2]
        if index >= len(self.places):
            return found[0]
        if rest == ".tool_call_id":
            return f"{self.places[index]}.tool_use_id"
        return self.places[index]

    def _tool(self, found: re.Match[str]) -> str:
        index = int(found[1])
        if index >= len(self.tools) or self.tools[index] < 0:
            return found[0]
        field = (found[2] or "").replace(".parameters", ".input_schema")
        return f"tools[{self.tools[index]}]{field}"


def asked(fields: PromptFields) -> Asked:
    """The same question as a chat request; an ApiError says what in the body cannot be asked here."""
    choice = fields.tool_choice
    offered = Offered(fields.tools or (), choice.name if choice is not None else None)
    history = history_of(fields.system, fields.messages, offered)
    tools = offered.tools
    output = fields.output_config
    chat = ChatRequest(
        model=fields.model,
        session_id=fields.session_id,
        messages=history.messages,
        continue_final_message=history.goes_on or None,
        tools=[tool for _, tool in tools] or None,
        response_format=_format((output and output.format) or fields.output_format),
        chat_template_kwargs=_template_kwargs(fields.thinking, output.effort if output else None) or None,
    )
    if choice is not None:
        chat.tool_choice = _choice(choice)
        chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None
    if isinstance(fields, MessagesRequest):
        chat.max_completion_tokens = fields.max_tokens
        if fields.thinking is not None and fields.thinking.type == "enabled":
            chat.thinking_token_budget = fields.thinking.budget_tokens
        chat.stream = fields.stream
        chat.stop = fields.stop_sequences
        chat.temperature = fields.temperature
        chat.top_p = fields.top_p
        chat.top_k = fields.top_k
        chat.slo = fields.slo
        chat.service_tier = fields.service_tier
    shows = fields.thinking is None or fields.thinking.display != "omitted"
    left_out = tuple(tool.type or "custom" for tool in fields.tools or () if tool.input_schema is None)
    return Asked(chat, tuple(history.places), tuple(index for index, _ in tools), shows, left_out)


def _choice(choice: ToolChoice) -> str | NamedChoice:
    if choice.type == "tool":
        return NamedChoice("function", FunctionName(choice.name or ""))
    return _CHOICES[_one_of(choice.type, _CHOICES | {"tool": ""}, "tool_choice.type")]


def _template_kwargs(thinking: Thinking | None, effort: str | None) -> JsonObject:
    """What templates of models that think look for: `enable_thinking` or `thinking`, and
    `reasoning_effort`. Where nothing was asked, nothing is said: the template has its own default."""
    said: JsonObject = {}
    if thinking is not None:
        thinks = _THINKS[_one_of(thinking.type, _THINKS, "thinking.type")]
        said |= {"enable_thinking": thinks, "thinking": thinks}
    if effort is not None:
        said["reasoning_effort"] = _EFFORTS[_one_of(effort, _EFFORTS, "output_config.effort")]
    return said


def _format(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    _one_of(wanted.type, {"json_schema": True}, "output_config.format.type")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=wanted.schema, strict=True))


def _one_of(value: str, known: dict[str, str] | dict[str, bool], where: str) -> str:
    if value not in known:
        raise ApiError(f"{where}: {value[:40]!r} is not one of {', '.join(known)}", param=where)
    return value
