"""OpenAI-shaped chat messages, checked and brought into one form.

Everything that renders or compares messages reads this form, so that `null` and "" content, list
and string content, or arguments as text and as an object mean the same everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Never

from agentserve.text.errors import TextError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
RawMessage = Mapping[str, object]

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_DEPTH = 64  # of JSON inside tools and arguments


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
    """All messages, with consecutive tool results brought into the order of their calls.

    Raises TextError that names the index of the first message that is broken.
    """
    if not messages:
        raise TextError("messages: at least one message is needed")
    return list(_in_call_order([parse_message(raw, index) for index, raw in enumerate(messages)]))


def parse_message(raw: RawMessage, index: int = 0) -> Message:
    """One message; `index` is for errors."""
    where = f"messages[{index}]"
    if not isinstance(raw, Mapping):
        raise TextError(f"{where}: an object is expected")
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise TextError(f"{where}: unknown role {str(role)[:40]!r}")
    calls = _calls(raw.get("tool_calls"), where)
    if calls and role != "assistant":
        raise TextError(f"{where}: only an assistant message has tool_calls")
    parts = _parts(raw.get("content"), where)
    if raw.get("content") is None and role != "assistant":
        raise TextError(f"{where}: content is missing")
    call_id = _text(raw, "tool_call_id", where)
    if role == "tool" and not call_id:
        raise TextError(f"{where}: a tool message needs a tool_call_id")
    reasoning = _text(raw, "reasoning_content", where) or _text(raw, "reasoning", where)
    return Message(
        role=role,
        parts=parts,
        calls=calls,
        call_id=call_id if role == "tool" else None,
        name=_text(raw, "name", where),
        reasoning=reasoning if role == "assistant" else None,
    )


def _text(raw: RawMessage, key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is None or isinstance(value, str):
        return value
    raise TextError(f"{where}: {key} must be a string")


def _parts(content: object, where: str) -> tuple[str, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,) if content else ()
    if not isinstance(content, list):
        raise TextError(f"{where}: content must be a string or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        field = "refusal" if kind == "refusal" else "text"
        text = part.get(field) if isinstance(part, dict) else None
        if kind not in ("text", "refusal", "input_text", "output_text") or not isinstance(text, str):
            raise TextError(
                f"{where}: content part of type {str(kind)[:40]!r} is not supported, only text is"
            )
        texts.append(text)
    return tuple(text for text in texts if text)


def _calls(value: object, where: str) -> tuple[Call, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise TextError(f"{where}: tool_calls must be a list")
    calls = []
    for number, item in enumerate(value):
        here = f"{where}.tool_calls[{number}]"
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise TextError(f"{here}: a function with a name is expected")
        call_id = item.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise TextError(f"{here}: id must be a string")
        calls.append(Call(call_id or "", name, parse_arguments(function.get("arguments"), here)))
    return tuple(calls)


def parse_arguments(value: object, where: str) -> dict[str, Json]:
    """Call arguments as an object: JSON text, an object, or nothing (null, "", blanks: {})."""
    if isinstance(value, str):
        if not value.strip():
            return {}
        try:
            value = json.loads(value, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError):
            raise TextError(f"{where}: arguments are not valid JSON") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TextError(f"{where}: arguments must be a JSON object")
    check_json(value, where)
    return value


def check_json(value: object, where: str) -> None:
    """TextError unless `value` is finite JSON of at most MAX_DEPTH levels."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        following: list[object] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise TextError(f"{where}: object keys must be strings")
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise TextError(f"{where}: numbers must be finite")
            elif not (item is None or isinstance(item, bool | int | float | str)):
                raise TextError(f"{where}: {type(item).__name__} is not JSON")
        level = following
    if level:
        raise TextError(f"{where}: nested deeper than {MAX_DEPTH} levels")


def _no_constant(text: str) -> Never:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _in_call_order(messages: Sequence[Message]) -> Iterator[Message]:
    """Results of parallel calls may come in any order; the prompt has them in call order."""
    order: dict[str, int] = {}
    results: list[Message] = []
    for message in messages:
        if message.role == "tool":
            results.append(message)
            continue
        yield from _sorted_results(results, order)
        results = []
        order = {call.id: number for number, call in enumerate(message.calls)}
        yield message
    yield from _sorted_results(results, order)


def _sorted_results(results: Sequence[Message], order: Mapping[str, int]) -> Iterable[Message]:
    return sorted(results, key=lambda result: order.get(result.call_id or "", len(order)))


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
