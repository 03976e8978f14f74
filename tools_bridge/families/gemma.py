"""Tool calls of Gemma 4, in a notation of its own: keys without quotes, strings in `<|"|>`:

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2],at:{x:null}}<tool_call|>

A call's name is given at once, its arguments once they are whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tools_bridge.json_value import MAX_DEPTH, Json, no_constant
from tools_bridge.parser import MAX_NAME, Asked, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
_PREFIX = "call:"
_NAME_END = Marks("{", CLOSE, OPEN)
_OUTSIDE = Marks(QUOTE, CLOSE, OPEN)
_STRING = Marks(QUOTE)


class GemmaCalls:
    triggers: tuple[str, ...] = (OPEN,)
    closers: tuple[str, ...] = ()
    ends_thinking = False

    def read(self, source: Source, reply: Reply, trigger: str, asked: Asked) -> Step[None]:
        before = trigger + (yield from source.blanks())
        before += yield from source.accept(_PREFIX)
        name, mark = yield from source.upto(_NAME_END, MAX_NAME)
        if mark != "{" or not is_name(name.strip()):
            source.at -= len(mark)
            return give_up(source, reply, before + name, _PREFIX)
        reply.open(name.strip())
        raw = ["{"]
        while True:
            mark = yield from source.until(_OUTSIDE, raw.append)
            if mark != QUOTE:
                break
            raw.append(QUOTE)
            mark = yield from source.until(_STRING, raw.append)
            raw.append(mark)
            if not mark:
                break
        if not mark:
            return reply.close("truncated")
        if mark == OPEN:  # another one begins: this one may have gone on
            source.at -= len(mark)
            return reply.close("malformed")
        try:
            reply.arguments(json.dumps(_Reader("".join(raw)).whole(), ensure_ascii=False))
        except (ValueError, IndexError):
            return reply.close("malformed")
        reply.close()


class _Reader:
    """Reads one value of the notation; ValueError or IndexError where it is none."""

    def __init__(self, text: str) -> None:
        # Strings and what is between them, by turns.
        self._parts = text.split(QUOTE)
        self._part = 0
        self._text = self._parts[0]
        self._at = 0

    def whole(self) -> Json:
        value = self._value(0)
        if self._blank() or self._part < len(self._parts) - 1:
            raise ValueError("something behind the value")
        return value

    def _blank(self) -> str:
        """The next character that is no blank, "" at the end of the part; it is not read."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        first = self._blank()
        if not first:
            return self._string()
        if first == "{":
            self._at += 1
            return dict(self._members(depth))
        if first == "[":
            self._at += 1
            return list(self._items(depth))
        word = self._upto(",]}")
        value: Json = json.loads(word.strip(), parse_constant=no_constant)
        return value

    def _string(self) -> str:
        value = self._parts[self._part + 1]
        self._part += 2
        self._text, self._at = self._parts[self._part], 0
        return value

    def _members(self, depth: int) -> Iterator[tuple[str, Json]]:
        seen: set[str] = set()
        while self._blank() != "}":
            key = self._upto(":").strip() if self._blank() else self._string()
            if self._blank() != ":" or key in seen:
                raise ValueError("no key")
            self._at += 1
            seen.add(key)
            yield key, self._value(depth + 1)
            self._separator("}")
        self._at += 1

    def _items(self, depth: int) -> Iterator[Json]:
        while self._blank() != "]":
            yield self._value(depth + 1)
            self._separator("]")
        self._at += 1

    def _separator(self, closer: str) -> None:
        if (char := self._blank()) == ",":
            self._at += 1
        elif char != closer:
            raise ValueError("neither a comma nor the end")

    def _upto(self, ends: str) -> str:
        start = self._at
        while self._text[self._at] not in ends:  # an IndexError at the end of the part
            self._at += 1
        return self._text[start : self._at]
