"""A call as one JSON object, `{"name": ..., "arguments": {...}}`, handed on while it is written."""

from __future__ import annotations

import json
from collections.abc import Collection

from tools_bridge.json_scan import ObjectScanner, Piece
from tools_bridge.json_value import is_text, no_constant
from tools_bridge.reply import Reply
from tools_bridge.source import Source, Step

MAX_NAME = 1024  # characters of JSON that may be a name
_KEYS = ("type", "id", "name", "parameters", "arguments")  # of an object that nothing else shows to be a call
_BROKEN = object()


class NamedObject:
    """Opens a call of `reply` once its name is known, and gives its arguments; closing is the caller's.

    `keys`: what the arguments may be called. `known`: the only names that make it a call, where it may be
    any other object; None: it is a call whatever the name.
    """

    def __init__(
        self, reply: Reply, *, keys: Collection[str] = ("arguments",), known: Collection[str] | None = None
    ) -> None:
        self._reply = reply
        self._keys = keys
        self._known = known
        self._raw: list[str] = []
        self._held: list[str] = []  # of the arguments, not yet given
        self._name_parts: list[str] = []
        self._name_size = 0
        self._name_seen = False
        self._given = False
        self._arguments_seen = False  # the whole value
        self._malformed = False
        self.opened = False

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def verdict(self) -> str:
        """What is wrong with the object as a whole, as `Reply.close` has it."""
        return "" if isinstance(_loads(self.raw), dict) else "malformed"

    def read(self, source: Source) -> Step[str]:
        """Read the object; what is wrong with it: "" if it ended, "truncated", "malformed"."""
        scanner = ObjectScanner()
        while True:
            at, piece = scanner.feed(source.text, source.at)
            self._raw.append(source.take(at))
            if piece is not None:
                self._take(piece)
            if scanner.failed or self._malformed:
                return "malformed"
            if scanner.done:
                break
            if piece is not None and piece.last:
                continue
            if source.ended:
                self._raw.append(source.take(len(source.text)))
                return "truncated"
            yield
        if not self.opened:
            return "malformed"
        if not self._arguments_seen:
            self._give("{}")
        return ""

    def _take(self, piece: Piece) -> None:
        if self._known is not None and piece.key not in _KEYS:
            self._malformed = True
        if piece.key == "name" and not self._name_seen:
            self._name_parts.append(piece.text)
            self._name_size += len(piece.text)
            self._malformed = self._name_size > MAX_NAME
            if piece.last:
                self._open("".join(self._name_parts))
        elif piece.key in self._keys and not self._arguments_seen:
            self._held.append(piece.text)
            self._arguments_seen = piece.last
        elif (piece.key == "name" or piece.key in self._keys) and piece.last:
            self._malformed = True  # given twice: which one counts is anyone's guess
        if self._held and self.opened:
            self._give_held()

    def _open(self, raw: str) -> None:
        self._name_seen = True
        name = _loads(raw)
        if not (isinstance(name, str) and name and is_text(name) and self._may_be(name)):
            self._malformed = True
        else:
            self.opened = True
            self._reply.open(name)

    def _may_be(self, name: str) -> bool:
        return self._known is None or name in self._known

    def _give_held(self) -> None:
        is_object = self._given or self._held[0].startswith("{")
        if not (is_object or self._arguments_seen):
            return  # a string or a null stands for something else: wait for all of it
        raw, self._held = "".join(self._held), []
        if is_object:
            self._give(raw)
            return
        value = _loads(raw)
        text = value if isinstance(value, str) and is_text(value) else raw
        self._give("{}" if value is None or not text.strip() else text)

    def _give(self, text: str) -> None:
        self._given = True
        self._reply.arguments(text)


def _loads(raw: str) -> object:
    """The JSON value of `raw`, or a value of no JSON type if there is none."""
    try:
        value: object = json.loads(raw, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return _BROKEN
    return value
