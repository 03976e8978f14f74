"""What the drafts of JSON Schema call their keywords, and which draft a schema is written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from tools_bridge.schemas import GrammarError

Schema = object
"""As it came: a dict with string keys, or a bool; anything else is refused where it is met."""

Part = dict[str, object]

DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
LATEST = 2020

_SINCE = {
    "const": 6,
    "contains": 6,
    "propertyNames": 6,
    "if": 7,
    "then": 7,
    "else": 7,
    "$anchor": 2019,
    "$recursiveRef": 2019,
    "dependentRequired": 2019,
    "dependentSchemas": 2019,
    "maxContains": 2019,
    "minContains": 2019,
    "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019,
    "$dynamicRef": 2020,
    "prefixItems": 2020,
}
_ALWAYS = frozenset(
    [
        "type",
        "enum",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "items",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "dependencies",
        "$ref",
    ]
)
NEVER_HELD = ("$dynamicRef", "$recursiveRef")


TYPES: Mapping[str, frozenset[str]] = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
    "string": frozenset({"string"}),
    "array": frozenset({"array"}),
    "object": frozenset({"object"}),
}
"""What a schema's `type` allows; a fraction is a number that is no integer."""
ALL_TYPES = frozenset().union(*TYPES.values())
_WRITTEN: Sequence[tuple[type | tuple[type, ...], str]] = (
    (type(None), "null"),
    (bool, "boolean"),  # which is an int, too
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    ((list, tuple), "array"),
    (dict, "object"),
)


def written_type(value: object) -> str:
    """Of a JSON value, by how it is written: 1 is an integer, 1.0 a number."""
    return next(name for kind, name in _WRITTEN if isinstance(value, kind))


def type_of(value: object) -> str:
    """Of a JSON value, as JSON Schema has it: 1.0 is an integer, 1.5 a fraction."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    return written_type(value)


class Refused(GrammarError):
    """Of one keyword."""

    def __init__(self, where: str, keyword: str, why: str) -> None:
        super().__init__(f"{where}: {keyword!r} {why}")
        self.keyword = keyword


def refused(where: str, keyword: str, why: str) -> Refused:
    return Refused(where, keyword, why)


def draft_of(schema: Part, where: str) -> int:
    """By `$schema`; without one, the latest."""
    name = schema.get("$schema")
    if name is None:
        return LATEST
    draft = (
        DRAFTS.get(
            name.rstrip("#").replace("https://json-schema.org/draft-", "http://json-schema.org/draft-")
        )
        if isinstance(name, str)
        else None
    )
    if draft is None:
        raise refused(
            where, "$schema", f"names {name!r}, which is none of drafts 4, 6, 7, 2019-09 and 2020-12"
        )
    return draft


def assertions(part: Part, draft: int) -> Part:
    """The keywords that say anything about values; annotations and unknown names say nothing."""
    if draft <= 7 and "$ref" in part:
        return {"$ref": part["$ref"]}
    return {
        key: value for key, value in part.items() if key in _ALWAYS or _SINCE.get(key, draft + 1) <= draft
    }


def is_part(schema: object) -> TypeGuard[Part]:
    return isinstance(schema, dict)
