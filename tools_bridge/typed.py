"""Arguments that models write as text without types, made JSON by the tool's schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools_bridge.json_schema.dialect import written_type
from tools_bridge.json_value import JsonError, check_json, no_constant
from tools_bridge.reply import Reply
from tools_bridge.source import Marks, Source, Step
from tools_bridge.types import ToolSpec

Kinds = frozenset[str]
"""JSON schema types; empty: nothing is known."""

TEXT: Kinds = frozenset({"string"})
ANY: Kinds = frozenset()

_MAX_HOPS = 16  # of $ref and of alternatives in alternatives
_MAX_LITERAL = 64 * 1024  # characters of a value that is tried as a Python literal
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_NAMES = {"True": "true", "False": "false", "None": "null"}


def kinds_of(spec: ToolSpec | None, key: str) -> Kinds:
    """What a tool's schema says its argument `key` may be."""
    root = spec.parameters if spec else {}
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = root.get("additionalProperties")
    return _kinds(schema, root, _MAX_HOPS)


def _kinds(schema: object, root: Mapping[str, object], hops: int) -> Kinds:
    if not isinstance(schema, Mapping) or not hops:
        return ANY
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(item for item in named if isinstance(item, str))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            found = [_kinds(branch, root, hops - 1) for branch in branches]
            return frozenset().union(*found) if all(found) else ANY
    values = (
        schema["enum"]
        if isinstance(schema.get("enum"), list)
        else [schema["const"]]
        if "const" in schema
        else []
    )
    if isinstance(values, list) and values:
        return frozenset(map(written_type, values))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _kinds(_look_up(root, reference), root, hops - 1)
    return ANY


def _look_up(root: Mapping[str, object], reference: str) -> object:
    node: object = root
    for part in reference[2:].split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def to_json(raw: str, kinds: Kinds) -> str:
    """The value that `raw` stands for, as JSON text: a string where it can be nothing else."""
    if kinds == TEXT:
        return json.dumps(raw, ensure_ascii=False)
    text = raw.strip()
    text = _NAMES.get(text, text)
    try:
        value = json.loads(text, parse_constant=no_constant)
        check_json(value)
    except (ValueError, RecursionError):
        value = _literal(text) if kinds & {"object", "array"} else None
        if value is None:
            return json.dumps(raw, ensure_ascii=False)
        text = json.dumps(value, ensure_ascii=False)
    kind = written_type(value)
    fits = not kinds or kind in kinds or (kind in ("integer", "number") and kinds & {"integer", "number"})
    if kind == "number" and "string" in kinds and "number" not in kinds:
        fits = False  # no integer, but a text
    if fits and not (kind == "string" and "string" in kinds):
        return text
    return json.dumps(raw, ensure_ascii=False)


def _literal(text: str) -> dict[str, object] | list[object] | None:
    """An object or a list in Python's notation."""
    if len(text) > _MAX_LITERAL or not text.startswith(("{", "[")):
        return None
    try:
        value = ast.literal_eval(text)
        check_json(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, JsonError):
        return None
    return value if isinstance(value, dict | list) else None


def attributes(tag: str) -> dict[str, str]:
    """What stands as `key="value"` in a tag."""
    return dict(_ATTRIBUTE.findall(tag))


@dataclass(frozen=True, slots=True)
class Sure:
    """`mark` ends a value only where one of `then` comes behind it, or the text ends: else it is part of
    the value."""

    mark: str
    then: tuple[str, ...]


class Fields:
    """Writes the open call's arguments member by member. A text is given while it is written, all else
    once it is whole."""

    def __init__(self, reply: Reply, spec: ToolSpec | None) -> None:
        self._reply = reply
        self._spec = spec
        self._keys: set[str] = set()
        self.twice = False  # a key came again: which value counts is anyone's guess

    def read(
        self,
        source: Source,
        key: str,
        marks: Marks,
        *,
        kinds: Kinds | None = None,
        lines: bool = False,
        sure: Sure | None = None,
    ) -> Step[str]:
        """Read the value of `key` up to and with the next mark, and return that ("" at the end of the
        text). `lines`: the value stands on lines of its own, and their ends are no part of it."""
        self._begin(key)
        if kinds is None:
            kinds = kinds_of(self._spec, key)
        held: list[str] = []
        if kinds == TEXT:
            self._reply.arguments('"')
            value = _Lines(self._give) if lines else None
            mark = yield from _value(source, marks, value.add if value else self._give, sure)
            if mark:
                if value:
                    value.end()
                self._reply.arguments('"')
            return mark
        mark = yield from _value(source, marks, held.append, sure)
        if mark:
            raw = "".join(held)
            self._reply.arguments(to_json(raw.removeprefix("\n").removesuffix("\n") if lines else raw, kinds))
        return mark

    def end(self) -> None:
        self._reply.arguments("}" if self._keys else "{}")

    def _begin(self, key: str) -> None:
        name = json.dumps(key, ensure_ascii=False)
        self._reply.arguments(f"{', ' if self._keys else '{'}{name}: ")
        self.twice = self.twice or key in self._keys
        self._keys.add(key)

    def _give(self, text: str) -> None:
        self._reply.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _value(source: Source, marks: Marks, sink: Callable[[str], None], sure: Sure | None) -> Step[str]:
    """Give what is before the mark that ends a value to `sink`, and return the mark."""
    while True:
        mark = yield from source.until(marks, sink)
        if sure is None or mark != sure.mark:
            return mark
        blanks = yield from source.blanks()
        behind = yield from source.accept(*sure.then)
        source.at -= len(behind)
        if behind or source.stops_in(*sure.then):
            return mark
        sink(mark + blanks)


class _Lines:
    """Drops one line end at either side of a text."""

    def __init__(self, give: Callable[[str], None]) -> None:
        self._give = give
        self._begun = False
        self._held = False  # a line end that may be the last

    def add(self, text: str) -> None:
        if not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        if not text:
            return
        if self._held:
            text = "\n" + text
        self._held = text.endswith("\n")
        if text := text.removesuffix("\n"):
            self._give(text)

    def end(self) -> None:
        self._held = False
