"""The Hermes convention for models whose template knows no tools.

Tools are described in the system text, calls are `<tool_call>` JSON in assistant text, results
are `<tool_response>` blocks in a user message. Small models follow it well enough, and the same
parser reads what they write.
"""

from __future__ import annotations

import json
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


def dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


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
    out: list[Message] = []
    after_result = False
    for message in wrapped:
        flat = _flat(message)
        is_result = message.role == "tool"
        if is_result and after_result:
            out[-1] = replace(out[-1], parts=(f"{out[-1].text}\n{flat.text}",))
        elif after_result and flat.role == "user" and not consecutive_users:
            out[-1] = replace(out[-1], parts=(f"{out[-1].text}\n\n{flat.text}",))
        else:
            out.append(flat)
        after_result = is_result
    return out


def _flat(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", (f"<tool_response>\n{message.text}\n</tool_response>",))
    if not message.calls:
        return message
    texts = [message.text] if message.text else []
    return replace(message, parts=("\n".join([*texts, *map(call_text, message.calls)]),), calls=())


def call_text(call: Call) -> str:
    """One call as the model is asked to write it."""
    return f"<tool_call>\n{dump({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
