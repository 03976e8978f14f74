"""Finds out what a chat template can render, by rendering small conversations with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentserve.text.errors import TextError

TemplateMessage = dict[str, object]

_SYSTEM, _USER, _NAME, _VALUE, _RESULT = "Qsystemq", "Quserq", "qtoolq", "Qvalueq", "Qresultq"
_REASONING = "Qreasonq"
_SHORT_ID, _LONG_ID = "a1b2c3d4e", "call_a1b2c3d4e5f6"
_USER_MESSAGE: TemplateMessage = {"role": "user", "content": _USER}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks up a value.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class Render(Protocol):
    """A template, given messages in the shape templates read; TextError where it refuses them."""

    def __call__(self, messages: Sequence[TemplateMessage], tools: Sequence[object] | None = None) -> str: ...


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What came out as it should. `default_system`: what the template says where no system message is."""

    system: bool
    system_later: bool  # it is no error after other messages
    tools: bool
    tool_calls: bool  # past calls and their results
    string_arguments: bool  # of calls: as JSON text, not as objects
    user_after_tool: bool  # a user message right after results is no error
    null_content: bool  # beside tool calls
    list_content: bool
    consecutive_users: bool
    empty_reply: bool  # a reply that says and calls nothing is no error
    result_names: bool  # it refuses a result without the name of what was called
    short_call_ids: bool  # Mistral's: exactly nine letters and digits
    reasoning: str  # the key of past reasoning that it shows; "": it shows none
    default_system: str


def probe(render: Render) -> TemplateFacts:
    """Ask the template; one that cannot render a single user message is a TextError."""
    plain = render([_USER_MESSAGE])
    if _USER not in plain:
        raise TextError("chat template: it does not render a user message")
    # As most templates want calls first, then as few do.
    tries = [(call_id, text) for text in (False, True) for call_id in (_LONG_ID, _SHORT_ID)]
    shown = {
        way: [content for content in (None, "") if _renders_calls(render, *way, content)] for way in tries
    }
    way = next((way for way in tries if shown[way]), tries[0])
    tool_calls = bool(shown[way])
    called = _call_history(*way, next(iter(shown[way]), ""))
    return TemplateFacts(
        system=_shows(render, [{"role": "system", "content": _SYSTEM}, _USER_MESSAGE], _SYSTEM, _USER),
        system_later=_takes(render, [_USER_MESSAGE, {"role": "system", "content": _SYSTEM}]),
        tools=_shows(render, [_USER_MESSAGE], _NAME, _USER, tools=[_TOOL]),
        tool_calls=tool_calls,
        string_arguments=way[1],
        user_after_tool=_takes(render, [*called, _USER_MESSAGE]),
        null_content=None in shown[way],
        list_content=_renders_list(render),
        consecutive_users=_shows(render, [_USER_MESSAGE, {"role": "user", "content": _VALUE}], _USER, _VALUE),
        empty_reply=_takes(render, [_USER_MESSAGE, {"role": "assistant", "content": ""}, _USER_MESSAGE]),
        result_names=_takes(render, called) and not _takes(render, _nameless(called)),
        short_call_ids=way[0] == _SHORT_ID,
        reasoning=_reasoning_key(render, called),
        default_system=_default_system(render, plain),
    )


def wants_marks(render: Render) -> bool:
    """Whether it cuts past answers behind `</think>` and fails at those without it, as Hermes 4's does where
    it is told that the model thinks (`render` tells it so)."""

    def takes(content: str) -> bool:
        return _takes(render, [_USER_MESSAGE, {"role": "assistant", "content": content}, _USER_MESSAGE])

    return not takes(_VALUE) and takes(f"</think>{_VALUE}")


def _shows(
    render: Render,
    messages: Sequence[TemplateMessage],
    *wanted: str,
    tools: Sequence[object] | None = None,
) -> bool:
    try:
        text = render(list(messages), tools=tools)
    except TextError:
        return False
    return all(word in text for word in wanted)


def _takes(render: Render, messages: Sequence[TemplateMessage]) -> bool:
    try:
        render(messages)
    except TextError:
        return False
    return True


def _call_history(call_id: str, as_text: bool, content: str | None) -> list[TemplateMessage]:
    arguments = {"key": _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        _USER_MESSAGE,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": _RESULT},
    ]


def _nameless(history: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    return [{key: value for key, value in message.items() if key != "name"} for message in history]


def _renders_calls(render: Render, call_id: str, as_text: bool, content: str | None) -> bool:
    try:  # without tools, so that the name can come from the call alone
        text = render(_call_history(call_id, as_text, content))
    except TextError:
        return False
    return all(word in text for word in (_NAME, _VALUE, _RESULT)) and "None" not in text


def _reasoning_key(render: Render, history: Sequence[TemplateMessage]) -> str:
    """Some show the reasoning of turns with calls alone, others that of their answers."""
    asked, called, result = history
    answer: TemplateMessage = {"role": "assistant", "content": _VALUE}
    for key in ("reasoning_content", "thinking"):
        thought: TemplateMessage = {key: _REASONING}
        for messages in ([asked, called | thought, result], [asked, answer | thought]):
            if _shows(render, messages, _REASONING):
                return key
    return ""


def _renders_list(render: Render) -> bool:
    parts = [{"type": "text", "text": _USER}, {"type": "text", "text": _VALUE}]
    try:
        text = render([{"role": "user", "content": parts}])
    except TextError:
        return False
    return _USER in text and _VALUE in text and "type" not in text.replace(_USER, "")


def _default_system(render: Render, plain: str) -> str:
    """Compare a chat without a system message to one with a known system message."""
    try:
        text = render([{"role": "system", "content": _SYSTEM}, _USER_MESSAGE])
    except TextError:
        return ""
    before, found, after = text.partition(_SYSTEM)
    if not found or _USER not in after or not plain.startswith(before) or not plain.endswith(after):
        return ""
    return plain[len(before) : len(plain) - len(after)]
