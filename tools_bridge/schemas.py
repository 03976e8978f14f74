"""Checks on JSON schemas from outside, before anything is compiled from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

MAX_SCHEMA_CHARS = 128 * 1024
MAX_SCHEMA_DEPTH = 64  # of the JSON, not of the values it describes; compile time grows faster
MAX_BRANCHES = 128  # of one anyOf / oneOf: compiled size grows with the square
MAX_ENUM = 2000
MAX_PATTERN_CHARS = 2048
MAX_PATTERN_DEPTH = 64  # of groups: xgrammar recurses into them

_ONE = ("items", "additionalProperties", "propertyNames", "additionalItems", "unevaluatedItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


class GrammarError(ValueError):
    """A grammar cannot be made from what the client asked for; the message is for the client."""


def check_schema(schema: object, where: str) -> None:
    """Refuse what cannot be read or compiled within bounds.

    `where` names the schema in the message of the GrammarError.
    """
    if not isinstance(schema, dict):
        raise GrammarError(f"{where}: a JSON schema must be an object")
    check_json(schema, where)
    for path, part in _subschemas(schema):
        _check_bounds(part, f"{where}{path}")


def check_json(schema: object, where: str) -> None:
    """GrammarError unless it is JSON of a bounded size, with bounded patterns in it."""
    stack: list[tuple[object, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"{where}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise GrammarError(f"{where}: the schema has a key that is no string")
            _check_patterns(value, where)
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise GrammarError(f"{where}: the schema contains {value}, which is not JSON")
        elif not (value is None or isinstance(value, str | int)):
            raise GrammarError(f"{where}: the schema contains a {type(value).__name__}, which is not JSON")
    if len(json.dumps(schema, ensure_ascii=False)) > MAX_SCHEMA_CHARS:
        raise GrammarError(f"{where}: the schema is longer than {MAX_SCHEMA_CHARS} characters")


def _check_patterns(part: dict[str, object], where: str) -> None:
    """In every object, not the known subschemas alone: a $ref may lead anywhere."""
    pattern, named = part.get("pattern"), part.get("patternProperties")
    patterns = [pattern] if isinstance(pattern, str) else []
    for text in [*patterns, *(named if isinstance(named, dict) else ())]:
        check_pattern(text, where)


def check_pattern(text: str, where: str) -> None:
    """GrammarError where a regular expression is out of bounds."""
    if len(text) > MAX_PATTERN_CHARS:
        raise GrammarError(f"{where}: a pattern is longer than {MAX_PATTERN_CHARS} characters")
    if _groups(text) > MAX_PATTERN_DEPTH:
        raise GrammarError(f"{where}: a pattern nests groups deeper than {MAX_PATTERN_DEPTH} levels")


def _groups(pattern: str) -> int:
    """How deep a pattern's groups nest; escaped parentheses and those in a [class] are none."""
    depth = deepest = 0
    in_class = escaped = False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif char == ")":
            depth -= 1
    return deepest


def _subschemas(schema: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Every schema object inside `schema`, itself first, with its path."""
    stack: list[tuple[str, object]] = [("", schema)]
    while stack:
        path, part = stack.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for key in _ONE:
            stack.append((f"{path}.{key}", part.get(key)))
        for key in _LISTS:
            items = part.get(key)
            if isinstance(items, list):
                stack.extend((f"{path}.{key}[{n}]", item) for n, item in enumerate(items))
        for key in _MAPS:
            named = part.get(key)
            if isinstance(named, dict):
                stack.extend((f"{path}.{key}.{name}", item) for name, item in named.items())


def _check_bounds(part: dict[str, object], where: str) -> None:
    reference = part.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise GrammarError(f"{where}: $ref {reference!r} must point into the same schema ('#/...')")
    for key in ("anyOf", "oneOf", "allOf"):
        items = part.get(key)
        if isinstance(items, list) and len(items) > MAX_BRANCHES:
            raise GrammarError(f"{where}: {key} has {len(items)} branches, more than {MAX_BRANCHES}")
    values = part.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM:
        raise GrammarError(f"{where}: enum has {len(values)} values, more than {MAX_ENUM}")
