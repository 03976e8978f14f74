"""Takes control strings out of what users supply before a template sees it.

Each becomes one private-use character that occurs nowhere else in the request. After the
template's own control tokens have been found, the characters become the strings again: as text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from agentserve.text.control import ControlMatcher
from agentserve.text.conversation import Call, Message
from agentserve.text.errors import TextError
from tools_bridge.json_value import Json

_PRIVATE = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


def _private_characters() -> Iterator[str]:
    for start, stop in ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE)):
        yield from map(chr, range(start, stop))


class Placeholders:
    """Hands out private-use characters that `texts` do not contain."""

    def __init__(self, texts: Iterable[str]) -> None:
        taken: set[str] = set()
        for text in texts:
            if not text.isascii():
                taken.update(_PRIVATE.findall(text))
        self._free = (character for character in _private_characters() if character not in taken)

    def take(self) -> str:
        try:
            return next(self._free)
        except StopIteration:
            raise TextError("the request uses up all private-use characters") from None


class Hider:
    """Hides control strings; `restore` maps placeholder code points back to what they stand for."""

    def __init__(self, matcher: ControlMatcher, placeholders: Placeholders) -> None:
        self._matcher = matcher
        self._placeholders = placeholders
        self._by_text: dict[str, str] = {}
        self.restore: dict[int, str] = {}

    def text(self, text: str) -> str:
        """`text` with every control string, and half of one at either edge, replaced.

        The edges count without white space around them: templates trim, and then write their own
        text beside.
        """
        hidden = self._matcher.pattern.sub(lambda match: self._stand_in(match.group()), text)
        core = hidden.strip()
        if not core:
            return hidden
        start = len(hidden) - len(hidden.lstrip())
        before, after = hidden[:start], hidden[start + len(core) :]
        if count := self._matcher.partial_tail(core):
            core = self._stand_in(core[:count]) + core[count:]
        if count := self._matcher.partial_head(core):
            core = core[:-count] + self._stand_in(core[-count:])
        return before + core + after

    def json(self, value: Json) -> Json:
        """`value` with every string in it hidden, keys too; nesting has been checked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.json(item) for key, item in value.items()}
        return value

    def message(self, message: Message) -> Message:
        return replace(
            message,
            parts=tuple(map(self.text, message.parts)),
            calls=tuple(self._call(call) for call in message.calls),
            call_id=self._optional(message.call_id),
            name=self._optional(message.name),
            reasoning=self._optional(message.reasoning),
        )

    def _call(self, call: Call) -> Call:
        arguments = {self.text(key): self.json(value) for key, value in call.arguments.items()}
        return Call(self.text(call.id), self.text(call.name), arguments)

    def _optional(self, text: str | None) -> str | None:
        return None if text is None else self.text(text)

    def _stand_in(self, text: str) -> str:
        character = self._by_text.get(text)
        if character is None:
            character = self._by_text[text] = self._placeholders.take()
            self.restore[ord(character)] = text
        return character


def strings_of(messages: Iterable[Message], *values: Json | Mapping[str, Json]) -> Iterator[str]:
    """Every string a request holds."""
    for message in messages:
        yield from message.parts
        yield from (text for text in (message.call_id, message.name, message.reasoning) if text)
        for call in message.calls:
            yield from (call.id, call.name)
            yield from _json_strings(call.arguments)
    for value in values:
        yield from _json_strings(value)


def _json_strings(value: Json | Mapping[str, Json]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _json_strings(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _json_strings(item)


def find_characters(wanted: Collection[str], text: str) -> Iterator[re.Match[str]]:
    """Where single characters of `wanted` are in `text`, in time that does not grow with their number:
    a class that lists them is tried one by one, so a range finds candidates and a lookup decides."""
    if wanted:
        candidates = re.compile(f"[{re.escape(min(wanted))}-{re.escape(max(wanted))}]")
        yield from (found for found in candidates.finditer(text) if found.group() in wanted)
