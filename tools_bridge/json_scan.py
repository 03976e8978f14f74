"""An incremental reader of one JSON object that gives out its top-level values as raw text.

It follows strings, escapes and brackets, so that nothing inside a string is ever taken for
structure, and stops at the object's own closing brace. It does not check the inside of values
beyond that: whoever joins a value's pieces parses it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum

BLANKS = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_IN_NEST = re.compile(r'["{}\[\]<]')  # "<" is no JSON: a tag that begins outside a string cuts the value
_SCALAR_END = re.compile(r"[\s,}\]<]")
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of the raw text of the value under top-level key `key`; `last` ends the value."""

    key: str
    text: str
    last: bool


class _State(Enum):
    START = 0  # before "{"
    KEY_OR_END = 1
    KEY = 2  # after a comma: a key must come
    KEY_STRING = 3
    COLON = 4
    VALUE = 5
    STRING = 6
    NEST = 7
    NEST_STRING = 8
    SCALAR = 9
    COMMA_OR_END = 10


class ObjectScanner:
    """Reads one object, piece by piece. Ends in `done` or, at text that cannot be JSON, `failed`."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._state = _State.START
        self._key = ""
        self._key_parts: list[str] = []
        self._closers: list[str] = []

    def feed(self, text: str, at: int) -> tuple[int, Piece | None]:
        """Read `text` from `at`; the first index not consumed, and one value's next piece, if any.

        Returns after a piece that ends its value, so that the caller can act on it before anything
        behind it is read; a piece that does not has taken all there was. What is not consumed (a
        backslash whose character is still to come; everything from the offending character on, or
        from after the object) must be offered again with more behind it.
        """
        pieces: list[Piece] = []
        while at < len(text) and not (self.done or self.failed or (pieces and pieces[-1].last)):
            if self._state is _State.KEY_STRING:
                waits, at = self._string(text, at, self._key_parts)
            elif self._state in (_State.STRING, _State.NEST_STRING):
                parts: list[str] = []
                state = self._state
                waits, at = self._string(text, at, parts)
                last = state is _State.STRING and self._state is not state
                pieces.append(Piece(self._key, "".join(parts), last))
            elif self._state is _State.NEST:
                waits, at = False, self._nest(text, at, pieces)
            elif self._state is _State.SCALAR:
                waits, at = False, self._scalar(text, at, pieces)
            else:
                waits, at = False, self._between(text, at, pieces)
            if waits:
                break
        if not pieces:
            return at, None
        return at, Piece(self._key, "".join(piece.text for piece in pieces), pieces[-1].last)

    def _string(self, text: str, at: int, parts: list[str]) -> tuple[bool, int]:
        """Read on inside a string; whether more text is needed, and where it stopped."""
        start = at
        while True:
            found = _IN_STRING.search(text, at)
            if found is None:
                at = len(text)
                break
            if found.group() == '"':
                at = found.end()
                parts.append(text[start:at])
                self._end_string()
                return False, at
            if found.end() == len(text):  # the escaped character is still to come
                parts.append(text[start : found.start()])
                return True, found.start()
            at = found.end() + 1
        parts.append(text[start:at])
        return False, at

    def _end_string(self) -> None:
        if self._state is _State.NEST_STRING:
            self._state = _State.NEST
        elif self._state is _State.STRING:
            self._state = _State.COMMA_OR_END
        else:
            try:
                self._key = json.loads('"' + "".join(self._key_parts))
            except ValueError:
                self.failed = True
            self._state = _State.COLON

    def _nest(self, text: str, at: int, pieces: list[Piece]) -> int:
        start = at
        for found in _IN_NEST.finditer(text, at):
            char, at = found.group(), found.end()
            if char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            elif char == '"':
                self._state = _State.NEST_STRING
                break
            elif self._closers[-1] != char:
                self.failed = True
                at -= 1
                break
            else:
                self._closers.pop()
                if not self._closers:
                    self._state = _State.COMMA_OR_END
                    break
        else:
            at = len(text)
        pieces.append(Piece(self._key, text[start:at], self._state is _State.COMMA_OR_END))
        return at

    def _scalar(self, text: str, at: int, pieces: list[Piece]) -> int:
        found = _SCALAR_END.search(text, at)
        end = len(text) if found is None else found.start()
        if found is not None:
            self._state = _State.COMMA_OR_END
        pieces.append(Piece(self._key, text[at:end], found is not None))
        return end

    def _between(self, text: str, at: int, pieces: list[Piece]) -> int:
        """One structural character, or a blank."""
        char, state = text[at], self._state
        if char in BLANKS:
            return at + 1
        if state is _State.VALUE:
            self._begin_value(char, pieces)
            return at + (0 if self._state is _State.SCALAR or self.failed else 1)
        if state is _State.START and char == "{":
            self._state = _State.KEY_OR_END
        elif char == '"' and state in (_State.KEY_OR_END, _State.KEY):
            self._key_parts = []
            self._state = _State.KEY_STRING
        elif char == ":" and state is _State.COLON:
            self._state = _State.VALUE
        elif char == "," and state is _State.COMMA_OR_END:
            self._state = _State.KEY
        elif char == "}" and state in (_State.COMMA_OR_END, _State.KEY_OR_END):
            self.done = True
        else:
            self.failed = True
            return at
        return at + 1

    def _begin_value(self, char: str, pieces: list[Piece]) -> None:
        if char == '"':
            self._state = _State.STRING
            pieces.append(Piece(self._key, char, False))
        elif char in _CLOSERS:
            self._closers = [_CLOSERS[char]]
            self._state = _State.NEST
            pieces.append(Piece(self._key, char, False))
        elif char.isalnum() or char == "-":
            self._state = _State.SCALAR
        else:
            self.failed = True
