"""Where ids that a reply was generated as stand in a rendered conversation.

A mark, one character that is nowhere else, is rendered in place of the reply. What a template writes
around a past reply is not always what it wrote before the reply was generated, so that is put right.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from agentserve.text.chat import TurnFrame
from agentserve.text.control import ControlMatcher
from agentserve.text.conversation import Call, Message
from agentserve.text.hiding import find_characters
from tools_bridge.json_value import Json


@dataclass(frozen=True, slots=True)
class Stand:
    """How a reply with calls stands in a rendered text: its marks, and the text of the message behind it."""

    first: str
    last: str
    next: str


def behind_their_prompts(text: str, marks: Collection[str], frame: TurnFrame | None) -> str:
    """`text` with what stands before each mark as it was when the reply was generated: with the generation
    prompt's opened `<think>`, say, which past replies lack, or without a channel that past ones have."""
    if not marks or frame is None or frame.before == frame.generation_prompt:
        return text
    if frame.generation_prompt.startswith(frame.before):
        extra = frame.generation_prompt[len(frame.before) :]
        return text.translate({ord(mark): extra + mark for mark in marks})
    found = re.compile(f"{re.escape(frame.before)}([{re.escape(min(marks))}-{re.escape(max(marks))}])")

    def put_right(match: re.Match[str]) -> str:
        mark = match.group(1)
        return (frame.generation_prompt if mark in marks else frame.before) + mark

    return found.sub(put_right, text)


def with_marked_calls(message: Message, first: str, last: str) -> Message:
    """The message for a template that must see its calls: the marks are in the arguments of the first
    and of the last of them."""
    calls = [Call(call.id, call.name, {}) for call in message.calls]
    opening: dict[str, Json] = {first: last if len(calls) == 1 else ""}
    calls[0] = replace(calls[0], arguments=opening)
    if len(calls) > 1:
        calls[-1] = replace(calls[-1], arguments={last: ""})
    return replace(message, parts=(), calls=tuple(calls), reasoning=None)


def without_calls(
    text: str, stands: Sequence[Stand], opening: str, matcher: ControlMatcher, inner: Collection[str]
) -> tuple[str, set[str]]:
    """`text` with each first mark in place of the reply it stands in, from behind the `opening` to the
    token that ends it; and the first marks of which that could not be found out. Tokens with `inner` texts
    are part of replies."""
    marks = {mark for stand in stands for mark in (stand.first, stand.last)}
    places = {found.group(): found.start() for found in find_characters(marks, text)}
    out: list[str] = []
    lost: set[str] = set()
    at = 0
    for stand in stands:
        first, last = places.get(stand.first), places.get(stand.last)
        stop = None if first is None or last is None or first < at else _stop(text, last, matcher, inner)
        if first is None or stop is None or (stand.next and stand.next in text[first:stop]):
            lost.add(stand.first)
            continue
        start = at + _start(text[at:first], opening, matcher, inner)
        out += (text[at:start], stand.first)
        at = stop
    return "".join([*out, text[at:]]), lost


def _start(text: str, opening: str, matcher: ControlMatcher, inner: Collection[str]) -> int:
    """Where the reply that `text` ends in begins: behind the opening, or the last token that is no part
    of it."""
    if opening.strip() and (found := text.rfind(opening)) >= 0:
        return found + len(opening)
    behind = [stop for _, stop, token in matcher.find(text) if token.text not in inner]
    return behind[-1] if behind else 0


def _stop(text: str, place: int, matcher: ControlMatcher, inner: Collection[str]) -> int | None:
    """Where the next token is that is no part of a reply."""
    for found in matcher.pattern.finditer(text, place):
        if found.group() not in inner:
            return found.start()
    return None
