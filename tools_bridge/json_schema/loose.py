"""Schemas that clients do not insist on (`strict` is not set): less of them where all cannot be held.

Whoever needs a value by the letter says so, and is refused by name; agents hand over whatever their types
give, and would rather have a call that is nearly right than none.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools_bridge.json_schema.dialect import Part, Schema, is_part
from tools_bridge.schemas import MAX_BRANCHES, MAX_ENUM

_DROPPED = frozenset(
    (
        *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "pattern", "format"),
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "patternProperties"),
        *("minProperties", "maxProperties"),
    )
)
_LENGTHS = frozenset(("minLength", "maxLength"))
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ALTERNATIVES = ("allOf", "anyOf", "oneOf")
_MAPS = ("properties", "$defs", "definitions")


def looser(schema: Part) -> Iterator[Part]:
    """The schema, then what each time says less; at the end its type alone."""
    yield schema
    yield _without(schema, _DROPPED)
    yield _without(schema, _DROPPED | _LENGTHS)
    kind = schema.get("type")
    yield {} if kind is None else {"type": kind}


def _without(schema: Part, dropped: frozenset[str]) -> Part:
    return {key: _below(key, value, dropped) for key, value in _kept(schema, dropped)}


def _kept(schema: Part, dropped: frozenset[str]) -> Iterator[tuple[str, object]]:
    for key, value in schema.items():
        if dropped and _unusable(key, value):
            continue
        if key == "oneOf" and "anyOf" not in schema:
            yield "anyOf", value
        elif key not in dropped and key != "oneOf":
            yield key, value


def _unusable(key: str, value: object) -> bool:
    """It is out of bounds, or leads out of the schema."""
    if key == "$ref":
        return not isinstance(value, str) or not value.startswith("#")
    most = MAX_ENUM if key == "enum" else MAX_BRANCHES if key in _ALTERNATIVES else None
    return most is not None and isinstance(value, list) and len(value) > most


def _below(key: str, value: object, dropped: frozenset[str]) -> object:
    def part(schema: Schema) -> object:
        return _without(schema, dropped) if is_part(schema) else schema

    if key in _MAPS and is_part(value):
        return {name: part(schema) for name, schema in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [part(schema) for schema in value]
    return part(value) if key in _ONE else value
