"""A request's messages, made ready for the chat template: checked, and tool results in call order."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.schemas import ChatMessage, ContentPart, JsonObject, ToolCallIn, ToolDef
from agentserve.server.limits import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")


def message_dicts(messages: Sequence[ChatMessage], limits: Limits) -> list[JsonObject]:
    """Plain messages in OpenAI's shape; a broken one is a 400 that names its index."""
    if not messages:
        raise ApiError("messages: at least one message is needed", param="messages", code="empty_messages")
    if len(messages) > limits.messages:
        raise ApiError(
            f"messages: {len(messages)} messages, at most {limits.messages} are allowed", param="messages"
        )
    return _in_call_order([_message(i, message) for i, message in enumerate(messages)])


def trailing_call_ids(messages: Sequence[JsonObject]) -> tuple[str, ...]:
    """The tool calls whose results follow the last assistant message."""
    ids: list[str] = []
    for message in reversed(messages):
        if message["role"] == "assistant":
            break
        if message["role"] == "tool":
            ids.append(message["tool_call_id"])
    return tuple(reversed(ids))


def tool_dicts(tools: Sequence[ToolDef] | None, limits: Limits) -> list[JsonObject]:
    """The function tools as plain dicts; kinds this server cannot run are a 400 that says which."""
    if tools is None:
        return []
    if len(tools) > limits.tools:
        raise ApiError(f"tools: {len(tools)} tools, at most {limits.tools} are allowed", param="tools")
    found: list[JsonObject] = []
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise ApiError(
                f"tools[{i}]: type {tool.type!r} is not supported, only 'function' with a definition",
                param=f"tools[{i}].type",
                code="unsupported_tool",
            )
        function = tool.function
        if not function.name or len(function.name) > 256:
            raise ApiError(
                f"tools[{i}].function.name: 1 to 256 characters", param=f"tools[{i}].function.name"
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
    return found


def _message(index: int, message: ChatMessage) -> JsonObject:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise ApiError(
            f"{where}.role: {message.role!r} is not one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    plain: JsonObject = {"role": message.role, "content": _content(where, message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "assistant":
        if message.tool_calls:
            plain["tool_calls"] = [
                _call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(message.tool_calls)
            ]
        elif message.content is None:
            plain["content"] = ""
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning:
            plain["reasoning_content"] = reasoning
    elif message.content is None:
        raise ApiError(f"{where}.content: a {message.role} message needs content", param=f"{where}.content")
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(where: str, content: str | list[ContentPart] | None) -> str | list[JsonObject] | None:
    if content is None or isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for n, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            raise ApiError(
                f"{where}.content[{n}]: parts of type {part.type!r} are not supported, only text",
                param=f"{where}.content[{n}].type",
                code="unsupported_content",
            )
        if part.text is None:
            raise ApiError(f"{where}.content[{n}].text: missing", param=f"{where}.content[{n}].text")
        parts.append({"type": "text", "text": part.text})
    return parts


def _call(where: str, call: ToolCallIn) -> JsonObject:
    if call.type != "function":
        raise ApiError(f"{where}.type: only 'function' is supported", param=f"{where}.type")
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is None or not arguments.strip() or arguments.strip() == "null":
        arguments = "{}"
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(
            f"{where}.function.arguments: not valid JSON ({error})",
            param=f"{where}.function.arguments",
            code="invalid_tool_arguments",
        ) from None
    if not isinstance(parsed, dict):
        raise ApiError(
            f"{where}.function.arguments: must be the text of a JSON object",
            param=f"{where}.function.arguments",
            code="invalid_tool_arguments",
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _in_call_order(messages: list[JsonObject]) -> list[JsonObject]:
    """Sort each block of tool results by the calls it answers; unpaired results are a 400.

    Templates pair results with calls by position, and one order means one prefix.
    """
    ordered: list[JsonObject] = []
    i = 0
    while i < len(messages):
        message = messages[i]
        ordered.append(message)
        i += 1
        if message["role"] == "tool":
            raise ApiError(
                f"messages[{i - 1}]: a tool result that follows no assistant message with tool calls",
                param=f"messages[{i - 1}].tool_call_id",
                code="unknown_tool_call",
            )
        block = i
        while i < len(messages) and messages[i]["role"] == "tool":
            i += 1
        if i > block:
            ordered.extend(_paired(message.get("tool_calls") or [], messages[block:i], block))
    return ordered


def _paired(calls: list[JsonObject], results: list[JsonObject], first: int) -> list[JsonObject]:
    ids = [call["id"] for call in calls]
    if len(calls) == 1 and len(results) == 1 and results[0]["tool_call_id"] is None:
        return [results[0] | {"tool_call_id": ids[0]}]
    by_id: dict[str, JsonObject] = {}
    for offset, result in enumerate(results):
        where = f"messages[{first + offset}]"
        call_id = result["tool_call_id"]
        if call_id is None or call_id not in ids:
            problem = "no tool_call_id" if call_id is None else f"tool_call_id {call_id!r} is unknown"
            raise ApiError(
                f"{where}: {problem}; the assistant message before it made the calls {ids}",
                param=f"{where}.tool_call_id",
                code="unknown_tool_call",
            )
        if call_id in by_id:
            raise ApiError(
                f"{where}: a second result for tool_call_id {call_id!r}",
                param=f"{where}.tool_call_id",
                code="duplicate_tool_result",
            )
        by_id[call_id] = result
    missing = [call_id for call_id in ids if call_id not in by_id]
    if missing or len(set(ids)) != len(ids):
        problem = f"no result for {missing}" if missing else "calls share an id"
        raise ApiError(
            f"messages[{first - 1}]: {problem}; every tool call needs exactly one result",
            param=f"messages[{first - 1}].tool_calls",
            code="missing_tool_result",
        )
    return [by_id[call_id] for call_id in ids]
