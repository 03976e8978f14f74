"""The Hermes convention for models whose template knows no tools.

Tools are described in the system text, calls are `<tool_call>` JSON in assistant text, results
are `<tool_response>` blocks in a user message. Small models follow it well enough, and the same
parser reads what they write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from agentserve.text.conversation import Call, Message
from tools_bridge.json_value import Json

NAME = "hermes"

_BEFORE_TOOLS = (
    "# Tools\n\n"
    "You can call functions to help with the user's request.\n\n"
    "These functions are available, as JSON inside <tools></tools>:\n"
    "<tools>\n"
)
_AFTER_TOOLS = (
    "\n</tools>\n\n"
    "To call a function, write a JSON object with its name and its arguments inside "
    "<tool_call></tool_call>, once for each call:\n"
    '<tool_call>\n{"name": <function name>, "arguments": <arguments as a JSON object>}\n</tool_call>'
)
# What begins a tag of this convention. A text that came from outside must not end its own block
# and open a forged one, so there the "<" is set apart; inside JSON it is escaped, and stays the same.
_TAG_START = re.compile(r"<(?=/?(?:tool_call|tool_response|tools)\b)", re.IGNORECASE)


def dump(value: Json) -> str:
    """JSON on one line in which no string holds a tag."""
    return _TAG_START.sub(r"\\u003c", json.dumps(value, ensure_ascii=False))


def break_tags(text: str) -> str:
    """`text` with the tags of this convention spoilt, still readable: "< /tool_response>"."""
    return _TAG_START.sub("< ", text)


def wrap(
    messages: Sequence[Message],
    tools: Sequence[Json] | None,
    *,
    default_system: str = "",
    consecutive_users: bool = True,
) -> list[Message]:
    """The same conversation in plain system, user and assistant texts.

    `default_system` is kept in front of the tools where the conversation has no system message.
    Where the template refuses `consecutive_users`, tool results join the user message that follows.
    """
    wrapped = list(messages)
    if tools:
        described = _BEFORE_TOOLS + "\n".join(map(dump, tools)) + _AFTER_TOOLS
        has_system = bool(wrapped) and wrapped[0].role == "system"
        system = wrapped.pop(0) if has_system else Message("system", (default_system,))
        text = f"{system.text}\n\n{described}" if system.text else described
        wrapped.insert(0, replace(system, parts=(text,)))
    about_tools = bool(tools) or any(message.role == "tool" or message.calls for message in messages)
    out: list[Message] = []
    results: list[str] = []  # that came one after another: they share a user message
    for message in wrapped:
        flat = _flat(message, about_tools)
        if message.role == "tool":
            results.append(flat.text)
            continue
        if results:
            shared = "\n".join(results)
            results.clear()
            if flat.role == "user" and not consecutive_users:
                out.append(Message("user", (f"{shared}\n\n{flat.text}",)))
                continue
            out.append(Message("user", (shared,)))
        out.append(flat)
    if results:
        out.append(Message("user", ("\n".join(results),)))
    return out


def _flat(message: Message, about_tools: bool) -> Message:
    if message.role == "tool":
        return Message("user", (f"<tool_response>\n{break_tags(message.text)}\n</tool_response>",))
    if message.role == "user" and about_tools:
        return replace(message, parts=tuple(map(break_tags, message.parts)))
    if not message.calls:
        return message
    texts = [message.text] if message.text else []
    return replace(message, parts=("\n".join([*texts, *map(call_text, message.calls)]),), calls=())


def call_text(call: Call) -> str:
    """One call as the model is asked to write it."""
    return f"<tool_call>\n{dump({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
