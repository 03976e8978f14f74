"""OpenAI-shaped chat messages, checked and brought into one form.

Everything that renders or compares messages reads this form, so that `null` and "" content, list
and string content, or arguments as text and as an object mean the same everywhere. What is a valid
history is decided here alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentserve.text.errors import TextError
from tools_bridge import json_value
from tools_bridge.json_value import Json, JsonError

RawMessage = Mapping[str, object]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "document": "document",
    "file": "file",
    "input_file": "file",
}


def unread(kind: object) -> str | None:
    """What the model reads in a tool's result instead of a part of this kind; None: it is no such kind.

    A tool chooses what it returns, and its result stays in the history: refusing it would refuse every
    turn that follows. What a user shows is refused, for the question is about it.
    """
    what = _MEDIA.get(kind) if isinstance(kind, str) else None
    return None if what is None else f"[{what}: not readable by this model]"


@dataclass(frozen=True, slots=True)
class Call:
    """One past tool call; `arguments` is always an object."""

    id: str
    name: str
    arguments: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Message:
    """One checked message. `parts` are its texts: none for null or empty content."""

    role: str
    parts: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of a tool message: the call it answers
    name: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(self.parts)


def parse_messages(messages: Sequence[RawMessage]) -> list[Message]:
    """All messages, with the results of parallel calls brought into the order of the calls.

    Raises TextError that names the index of the first message that is broken, or where a result
    answers no call before it, or where some calls of a message have results and others have not.
    """
    if not messages:
        raise TextError("messages: at least one message is needed", param="messages", code="empty_messages")
    return _in_call_order([parse_message(raw, index) for index, raw in enumerate(messages)])


def parse_message(raw: RawMessage, index: int = 0) -> Message:
    """One message; `index` is for errors."""
    where = f"messages[{index}]"
    if not isinstance(raw, Mapping):
        raise _broken(where, "an object is expected")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _broken(f"{where}.role", f"unknown role {str(role)[:40]!r}, expected one of {', '.join(ROLES)}")
    calls = _calls(raw.get("tool_calls"), where)
    if calls and role != "assistant":
        raise _broken(f"{where}.tool_calls", "only an assistant message has tool_calls")
    parts = _parts(raw.get("content"), f"{where}.content", result=role == "tool")
    if raw.get("content") is None and role != "assistant":
        raise _broken(f"{where}.content", f"a {role} message needs content")
    call_id = _text(raw, "tool_call_id", where)
    reasoning = _text(raw, "reasoning_content", where)
    other = _text(raw, "reasoning", where)
    reasoning = reasoning or other or (other if reasoning is None else reasoning)
    return Message(
        role=role,
        parts=parts,
        calls=calls,
        call_id=call_id if role == "tool" else None,
        name=_text(raw, "name", where),
        reasoning=reasoning if role == "assistant" else None,
    )


def openai_shape(message: Message) -> dict[str, Json]:
    """The message as a client writes it, always in the same way: `parse_message` gives it back."""
    parts: list[Json] = [{"type": "text", "text": part} for part in message.parts]
    text = message.text if message.parts or not message.calls else None
    shaped: dict[str, Json] = {"role": message.role, "content": parts if len(parts) > 1 else text}
    if message.calls:
        shaped["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.calls
        ]
    for key, value in (
        ("tool_call_id", message.call_id),
        ("name", message.name),
        ("reasoning_content", message.reasoning),
    ):
        if value is not None:
            shaped[key] = value
    return shaped


def _broken(where: str, problem: str, code: str | None = None) -> TextError:
    return TextError(f"{where}: {problem}", param=where, code=code)


def _text(raw: RawMessage, key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _broken(f"{where}.{key}", f"{key} must be a string")


def _parts(content: object, where: str, *, result: bool) -> tuple[str, ...]:
    """The texts of a content; `result`: of a tool's, where media are told of."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,) if content else ()
    if not isinstance(content, list):
        raise _broken(where, "content must be a string or a list of text parts")
    texts: list[str] = []
    for number, part in enumerate(content):
        here = f"{where}[{number}]"
        kind = part.get("type", "text") if isinstance(part, dict) else None
        instead = unread(kind) if result else None
        if instead is not None:
            texts.append(instead)
            continue
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            raise _broken(
                f"{here}.type",
                f"content part of type {str(kind)[:40]!r} is not supported, only text is",
                "unsupported_content",
            )
        field = "refusal" if kind == "refusal" else "text"
        text = part.get(field)
        if not isinstance(text, str):
            raise _broken(f"{here}.{field}", f"a part of type {kind!r} needs a string")
        texts.append(text)
    return tuple(text for text in texts if text)


def _calls(value: object, where: str) -> tuple[Call, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _broken(f"{where}.tool_calls", "tool_calls must be a list")
    calls = []
    for number, item in enumerate(value):
        here = f"{where}.tool_calls[{number}]"
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise _broken(here, "a function with a name is expected")
        kind = item.get("type")
        if kind not in (None, "function"):
            raise _broken(f"{here}.type", f"type {str(kind)[:40]!r} is not supported, only 'function' is")
        call_id = item.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise _broken(f"{here}.id", "id must be a string")
        arguments = parse_arguments(function.get("arguments"), f"{here}.function.arguments")
        calls.append(Call(call_id or "", name, arguments))
    return tuple(calls)


def parse_arguments(value: object, where: str) -> dict[str, Json]:
    """Call arguments as an object: JSON text, an object, or nothing (null, "", blanks: {})."""
    try:
        return json_value.parse_arguments(value)
    except JsonError as error:
        raise _broken(where, str(error), "invalid_tool_arguments") from None


def check_json(value: object, where: str) -> None:
    """TextError unless `value` is JSON by `tools_bridge.json_value`."""
    try:
        json_value.check_json(value)
    except JsonError as error:
        raise _broken(where, str(error)) from None


def check_answered(messages: Sequence[Message]) -> None:
    """TextError where a message calls tools and no results follow, as OpenAI and Anthropic have it: a
    model that reads of a call and of no result goes wrong, and which of them are to come nobody could say."""
    for at, message in enumerate(messages):
        behind = messages[at + 1] if at + 1 < len(messages) else None
        if message.calls and (behind is None or behind.role != "tool"):
            raise _missing(message.calls[0].id, at)


def _missing(call_id: str, at: int) -> TextError:
    return _broken(
        f"messages[{at}].tool_calls",
        f"no result for {call_id[:80]!r}; every tool call needs exactly one result, right behind its message "
        "(of one that did not run, that it was cancelled)",
        "missing_tool_result",
    )


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Templates pair results with calls by position, and one order means one prefix."""
    ordered: list[Message] = []
    at = 0
    while at < len(messages):
        message, block = messages[at], at + 1
        if message.role == "tool":
            raise _broken(
                f"messages[{at}].tool_call_id",
                "a tool result that follows no assistant message with tool calls",
                "unknown_tool_call",
            )
        at = block
        while at < len(messages) and messages[at].role == "tool":
            at += 1
        ordered.append(message)
        if at > block:
            ordered.extend(_paired(message.calls, messages[block:at], block))
    return ordered


def _paired(calls: Sequence[Call], results: Sequence[Message], first: int) -> list[Message]:
    """The results in the order of the calls, one for each; `first`: index of the first result."""
    ids = [call.id for call in calls]
    if len(calls) == 1 and len(results) == 1 and not results[0].call_id:
        return [replace(results[0], call_id=ids[0])]
    known = frozenset(ids)
    by_id: dict[str, Message] = {}
    for offset, result in enumerate(results):
        where = f"messages[{first + offset}].tool_call_id"
        if not result.call_id or result.call_id not in known:
            problem = f"{result.call_id[:80]!r} is unknown" if result.call_id else "missing"
            made = ", ".join(repr(call_id[:80]) for call_id in ids[:8]) or "none"
            raise _broken(where, f"{problem}; calls of the message before: {made}", "unknown_tool_call")
        if result.call_id in by_id:
            raise _broken(where, f"a second result for {result.call_id[:80]!r}", "duplicate_tool_result")
        by_id[result.call_id] = result
    missing = [call_id for call_id in ids if call_id not in by_id]
    if missing:
        raise _missing(missing[0], first - 1)
    if len(known) != len(ids):
        raise _broken(
            f"messages[{first - 1}].tool_calls",
            "calls share an id; every tool call needs exactly one result",
            "missing_tool_result",
        )
    return [by_id[call_id] for call_id in ids]


def merge_leading_system(messages: Sequence[Message], *, keeps_developer: bool) -> list[Message]:
    """One system message at the start where there were several; "developer" becomes "system"
    unless the template knows that role."""
    if not keeps_developer:
        messages = [replace(m, role="system") if m.role == "developer" else m for m in messages]
    count = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    if count < 2:
        return list(messages)
    merged = replace(messages[0], parts=("\n\n".join(m.text for m in messages[:count]),))
    return [merged, *messages[count:]]
