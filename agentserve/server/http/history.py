"""What a chat body says besides settings: its messages and tools, as plain values.

What a valid history is, the text room decides (`agentserve.text.conversation`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence

from agentserve.server.errors import ApiError
from agentserve.server.http.left_out import listed
from agentserve.server.http.schemas import ToolDef
from agentserve.server.limits import Limits, check_text
from agentserve.server.text_port import JsonObject
from agentserve.text.conversation import Message, check_answered, openai_shape, parse_messages
from agentserve.text.unfinished import told_as_text
from tools_bridge.call_syntax import HERMES, CallSyntax

log = logging.getLogger(__name__)

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")  # as frameworks make them; OpenAI's are shorter


def message_dicts(
    messages: Sequence[JsonObject],
    limits: Limits,
    cut: Collection[str] = frozenset(),
    *,
    shown: bool = True,
    written: CallSyntax = HERMES,
) -> list[JsonObject]:
    """The messages in one shape, tool results in call order; a broken one is a ValueError (TextError).

    Calls whose arguments are no JSON object are taken as text, `written` as the model writes calls. `cut`:
    ids of those that this server handed out so, which are left out if not `shown`.
    """
    if len(messages) > limits.messages:
        raise ApiError(
            f"messages: {len(messages)} messages, at most {limits.messages} are allowed", param="messages"
        )
    parsed = parse_messages(told_as_text(messages, cut, shown=shown, written=written))
    check_answered(parsed)
    check_text((text for message in parsed for text in _shown(message)), limits, "messages")
    return [openai_shape(message) for message in parsed]


def _shown(message: Message) -> Iterator[str]:
    """The texts every template shows; past reasoning many of them drop."""
    yield from (call.name for call in message.calls)
    for text in message.parts:
        yield text.rpartition("</think>")[2] if message.role == "assistant" else text


def trailing_call_ids(messages: Sequence[JsonObject]) -> tuple[str, ...]:
    """The tool calls whose results follow the last assistant message."""
    ids: list[str] = []
    for message in reversed(messages):
        if message["role"] == "assistant":
            break
        if message["role"] == "tool" and message["tool_call_id"]:
            ids.append(message["tool_call_id"])
    return tuple(reversed(ids))


def call_ids(messages: Sequence[JsonObject]) -> tuple[str, ...]:
    """All tool calls in the history, oldest first."""
    return tuple(call["id"] for message in messages for call in message.get("tool_calls") or () if call["id"])


def tool_dicts(tools: Sequence[ToolDef] | None, limits: Limits) -> list[JsonObject]:
    """The function tools as plain dicts.

    Tools of other kinds, which vendors run themselves (web search and the like), are left out: agents
    offer them to whoever may have them. The log says which.
    """
    if tools is None:
        return []
    if len(tools) > limits.tools:
        raise ApiError(f"tools: {len(tools)} tools, at most {limits.tools} are allowed", param="tools")
    shown = (tool.function for tool in tools if tool.function and not tool.defer_loading)
    check_text((function.description or "" for function in shown), limits, "tools")
    found: list[JsonObject] = []
    names: set[str] = set()
    left_out: list[str] = []
    for i, tool in enumerate(tools):
        if tool.type != "function":
            left_out.append(tool.type)
            continue
        if tool.function is None:
            raise ApiError(
                f"tools[{i}].function: missing", param=f"tools[{i}].function", code="invalid_value"
            )
        function = tool.function
        if not _TOOL_NAME.fullmatch(function.name):
            raise ApiError(
                f"tools[{i}].function.name: 1 to 128 of a-z A-Z 0-9 _ . -", param=f"tools[{i}].function.name"
            )
        if function.name in names:
            raise ApiError(
                f"tools[{i}].function.name: {function.name!r} is defined twice",
                param=f"tools[{i}].function.name",
            )
        names.add(function.name)
        definition: JsonObject = {"name": function.name}
        if function.description is not None:
            definition["description"] = function.description
        definition["parameters"] = function.parameters or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": definition})
    if left_out:
        log.warning("tools that are no functions are left out: unsupported_tool: %s", listed(left_out))
    return found
