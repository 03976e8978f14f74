"""Tool calls of Gemma 4, in a notation of its own: keys without quotes, strings in `<|"|>`:

    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2],at:{x:null}}<tool_call|>

Arguments become JSON while they are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum

from tools_bridge.json_value import MAX_DEPTH, no_constant
from tools_bridge.parser import MAX_NAME, Asked, give_up, is_name
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
_PREFIX = "call:"
_NAME_END = Marks("{", CLOSE, OPEN)
_OUTSIDE = Marks(QUOTE, CLOSE, OPEN)
_TEXT = Marks(QUOTE)


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
        writer = Notation(reply.arguments)
        writer.outside("{")
        while mark := (yield from source.until(_OUTSIDE, writer.outside)):
            if mark != QUOTE:
                break
            writer.begin_text()
            mark = yield from source.until(_TEXT, writer.text)
            if not mark:
                break
            writer.end_text()
        if mark == OPEN:  # another one begins: this one may have gone on
            source.at -= len(mark)
        if not mark:
            return reply.close("truncated")
        reply.close("" if mark == CLOSE and writer.done else "malformed")


class _Expects(Enum):
    VALUE = 0
    ITEM = 1  # or the end of the list
    KEY = 2  # or the end of the object
    COLON = 3
    NEXT = 4  # a comma, or the end of what it stands in
    NOTHING = 5


class Notation:
    """Writes an object of the notation as JSON, as it comes; what is none is not written any further.

    Texts are given while they are written, other values once they are whole.
    """

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._expects = _Expects.VALUE
        self._levels: list[set[str] | None] = []  # of each object that is open its keys; None: a list
        self._first = True  # nothing came yet where this is
        self._word: list[str] = []  # of a key, or of a value that is no text
        self._is_key = False  # the text that is being read is one
        self.failed = False

    @property
    def done(self) -> bool:
        """It was an object and nothing else."""
        return self._expects is _Expects.NOTHING and not self.failed

    def outside(self, text: str) -> None:
        """What stands outside of texts."""
        for char in text:
            if self.failed:
                return
            self._take(char)

    def begin_text(self) -> None:
        self._is_key = self._expects is _Expects.KEY
        if self._word or not (self._is_key or self._expects in (_Expects.VALUE, _Expects.ITEM)):
            self.failed = True
        elif not self.failed and not self._is_key:
            self._separate()
            self._give('"')

    def text(self, text: str) -> None:
        if self.failed:
            return
        if self._is_key:
            self._word.append(text)
        else:
            self._give(json.dumps(text, ensure_ascii=False)[1:-1])

    def end_text(self) -> None:
        if self.failed:
            return
        if self._is_key:
            self._key("".join(self._word))
        else:
            self._give('"')
            self._expects = _Expects.NEXT

    def _take(self, char: str) -> None:
        match self._expects:
            case _Expects.KEY if char == ":":
                self._key("".join(self._word).strip())
                self._expects = _Expects.VALUE
            case _Expects.KEY if char == "}" and not self._word:
                self._close(char)
            case _Expects.VALUE | _Expects.ITEM if char in ",]}" and (
                self._word or self._expects is _Expects.VALUE or char != "]"
            ):
                self._end_word()
                self._take(char)
            case _Expects.ITEM if char == "]":
                self._close(char)
            case _Expects.VALUE | _Expects.ITEM if char in "{[" and not self._word:
                self._open(char)
            case _Expects.KEY | _Expects.VALUE | _Expects.ITEM:
                if self._word or not char.isspace():
                    self._word.append(char)
            case _Expects.COLON if char == ":":
                self._expects = _Expects.VALUE
            case _Expects.NEXT if char == ",":
                self._expects = _Expects.ITEM if self._levels[-1] is None else _Expects.KEY
            case _Expects.NEXT if char in "}]":
                self._close(char)
            case _:
                self.failed = not char.isspace()

    def _separate(self) -> None:
        if not self._first:
            self._give(", ")
        self._first = False

    def _key(self, key: str) -> None:
        keys = self._levels[-1]
        if keys is None or key in keys:
            self.failed = True
            return
        keys.add(key)
        self._word = []
        self._separate()
        self._give(f"{json.dumps(key, ensure_ascii=False)}: ")
        self._first = True  # no comma before its value
        self._expects = _Expects.COLON

    def _end_word(self) -> None:
        word, self._word = "".join(self._word).strip(), []
        try:
            json.loads(word, parse_constant=no_constant)
        except (ValueError, RecursionError):
            self.failed = True
            self._expects = _Expects.NOTHING
            return
        self._separate()
        self._give(word)
        self._expects = _Expects.NEXT

    def _open(self, bracket: str) -> None:
        if self._levels:
            self._separate()
        self._give(bracket)
        self._levels.append(set() if bracket == "{" else None)
        self._first = True
        self._expects = _Expects.KEY if bracket == "{" else _Expects.ITEM
        self.failed = len(self._levels) > MAX_DEPTH

    def _close(self, bracket: str) -> None:
        if (self._levels[-1] is None) != (bracket == "]"):
            self.failed = True
            return
        self._levels.pop()
        self._give(bracket)
        self._first = False
        self._expects = _Expects.NEXT if self._levels else _Expects.NOTHING
