"""Schemas that clients do not insist on (`strict` is not set): less of them where all cannot be held.

Whoever needs a value by the letter says so, and is refused by name; agents hand over whatever their types
give, and would rather have a call that is nearly right than none.
"""

from __future__ import annotations

from collections.abc import Iterator

from tools_bridge.json_schema.dialect import TYPES, Part, Refused, Schema, is_part
from tools_bridge.schemas import MAX_BRANCHES, MAX_ENUM, GrammarError

_DROPPED = frozenset(
    (
        *("contains", "minContains", "maxContains", "uniqueItems", "multipleOf", "pattern", "format"),
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "patternProperties"),
        *("minProperties", "maxProperties"),
    )
)
_OUTSIDE = frozenset(("$comment",))  # and what is out of bounds: see `_unusable`
_LENGTHS = frozenset(("minLength", "maxLength"))
_SHAPE = frozenset(
    (
        *("type", "enum", "const", "properties", "required", "additionalProperties"),
        *("items", "prefixItems", "additionalItems"),
    )
)
_WITH = {"contains": ("minContains", "maxContains"), "if": ("then", "else")}
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_ELSEWHERE = frozenset((*_IN_PLACE, "$ref"))
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "$defs", "definitions")


def looser(schema: Part) -> Iterator[tuple[Part, str]]:
    """The schema, then what each time says less everywhere, with what was left out; at the end its type
    alone."""
    yield schema, ""
    yield _without(schema, _OUTSIDE), "references out of the schema, and lists beyond the bounds"
    yield _without(schema, _OUTSIDE | _DROPPED), "all that is hard to hold"
    yield _without(schema, _OUTSIDE | _DROPPED | _LENGTHS), "all that is hard to hold, and lengths"
    kind = schema.get("type")
    yield {} if kind is None else {"type": kind}, "all but its type"


def less(schema: Schema, error: GrammarError) -> tuple[Schema, str]:
    """A part that cannot be held, saying less, and what was left out: the keyword that was refused, then all
    that are hard to hold, here and in the alternatives of the part; then what is said elsewhere; then all
    but its type. The error again where nothing is left. What is below the part stays as it is."""
    if not is_part(schema) or not schema:
        raise error
    keyword = error.keyword if isinstance(error, Refused) else ""
    if keyword in schema and keyword not in _SHAPE:
        dropped = {keyword, *_WITH.get(keyword, ())}
        found = {key: value for key, value in schema.items() if key not in dropped}
        if keyword == "oneOf" and "anyOf" not in schema:
            found["anyOf"] = schema["oneOf"]
        return found, repr(keyword)
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    bare: Part = (
        {"type": kind} if kinds and all(isinstance(name, str) and name in TYPES for name in kinds) else {}
    )
    for found, what in (
        (_here(schema, _DROPPED), "what is hard to hold"),
        (_here(schema, _DROPPED | _LENGTHS), "its lengths"),
        (
            {key: value for key, value in schema.items() if key not in _ELSEWHERE},
            "what it refers to, and its alternatives",
        ),
        (bare, "all but its type" if bare else "all"),
    ):
        if found != schema:
            return found, what
    return {}, "all"


def _here(schema: Part, dropped: frozenset[str]) -> Part:
    """Without keywords of the part, and of what it says in place."""
    found: Part = {}
    for key, value in _kept(schema, dropped):
        branches = value if key in _IN_PLACE and isinstance(value, list) else None
        found[key] = (
            value
            if branches is None
            else [_here(branch, dropped) if is_part(branch) else branch for branch in branches]
        )
    return found


def _without(schema: Part, dropped: frozenset[str]) -> Part:
    return {key: _below(key, value, dropped) for key, value in _kept(schema, dropped)}


def _kept(schema: Part, dropped: frozenset[str]) -> Iterator[tuple[str, object]]:
    for key, value in schema.items():
        if dropped >= _OUTSIDE and _unusable(key, value):
            continue
        if key == "oneOf" and dropped >= _DROPPED:
            if "anyOf" not in schema:
                yield "anyOf", value
        elif key not in dropped:
            yield key, value


def _unusable(key: str, value: object) -> bool:
    """It is out of bounds, or leads out of the schema."""
    if key == "$ref":
        return not isinstance(value, str) or not value.startswith("#")
    most = MAX_ENUM if key == "enum" else MAX_BRANCHES if key in _IN_PLACE else None
    return most is not None and isinstance(value, list) and len(value) > most


def _below(key: str, value: object, dropped: frozenset[str]) -> object:
    def part(schema: Schema) -> object:
        return _without(schema, dropped) if is_part(schema) else schema

    if key in _MAPS and is_part(value):
        return {name: part(schema) for name, schema in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [part(schema) for schema in value]
    return part(value) if key in _ONE else value
