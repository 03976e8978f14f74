"""One schema object's own keywords, checked, as `Facts`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tools_bridge.json_schema import formats
from tools_bridge.json_schema.decimals import told_plainly
from tools_bridge.json_schema.dialect import ALL_TYPES, TYPES, Part, Schema, refused
from tools_bridge.json_schema.facts import Bound, Contains, Facts, Number, canonical
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.schemas import GrammarError


def read_facts(part: Part, where: str) -> Facts:
    """All but what is told by subschemas in place. A keyword with a value that means nothing is refused."""
    low, high = _bounds(part, where)
    multiple = _number(part, "multipleOf", where)
    if multiple is not None and multiple <= 0:
        raise refused(where, "multipleOf", "must be greater than 0")
    pattern, form = _text(part, "pattern", where), _text(part, "format", where)
    prefix, items = _items(part, where)
    patterned = _named(part, "patternProperties", where)
    return Facts(
        types=_types(part, where),
        values=_values(part, where),
        low=low,
        high=high,
        multiples=() if multiple is None else (multiple,),
        min_length=_count(part, "minLength", where) or 0,
        max_length=_count(part, "maxLength", where),
        patterns=() if pattern is None else _patterns(pattern, form, where),
        formats=() if form is None else (form,),
        properties=_named(part, "properties", where),
        patterned={read_pattern(text, where): schema for text, schema in patterned.items()},
        additional=part.get("additionalProperties"),
        required=_required(part, where),
        names=(part["propertyNames"],) if "propertyNames" in part else (),
        min_properties=_count(part, "minProperties", where) or 0,
        max_properties=_count(part, "maxProperties", where),
        prefix=prefix,
        items=items,
        min_items=_count(part, "minItems", where) or 0,
        max_items=_count(part, "maxItems", where),
        unique=bool(part.get("uniqueItems")),
        contains=_contains(part, where),
        where=where,
    )


def _patterns(text: str, form: str | None, where: str) -> tuple[Pattern, ...]:
    """None where it looks around, beside a format: libraries write both, the pattern for the format."""
    try:
        return (read_pattern(told_plainly(text), where),)
    except GrammarError as error:
        if form in formats.PATTERNS and any(sign in text for sign in ("(?=", "(?!", "(?<=", "(?<!")):
            return ()
        raise refused(where, "pattern", str(error).partition(": the pattern ")[2] or str(error)) from None


def schemas_of(part: Part, keyword: str, where: str) -> list[Schema]:
    found = part[keyword]
    if not isinstance(found, list) or not found:
        raise refused(where, keyword, "must be a list of schemas, and not empty")
    return found


def _types(part: Part, where: str) -> frozenset[str]:
    kind = part.get("type")
    if kind is None:
        return ALL_TYPES
    kinds = kind if isinstance(kind, list) and kind else [kind]
    found: frozenset[str] = frozenset()
    for name in kinds:
        if not isinstance(name, str) or name not in TYPES:
            raise refused(where, "type", f"is {name!r}: Unsupported type")
        found |= TYPES[name]
    return found


def _values(part: Part, where: str) -> tuple[object, ...] | None:
    found = part.get("enum")
    if "enum" in part and not isinstance(found, list):
        raise refused(where, "enum", "must be a list")
    if "const" not in part:
        return tuple(found) if isinstance(found, list) else None
    if isinstance(found, list) and canonical(part["const"]) not in map(canonical, found):
        return ()
    return (part["const"],)


def _bounds(part: Part, where: str) -> tuple[Bound | None, Bound | None]:
    found: list[Bound | None] = []
    for plain, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        value = _number(part, plain, where)
        bound = None if value is None else Bound(value)
        if isinstance(part.get(exclusive), bool):  # draft 4
            if bound is not None and part[exclusive]:
                bound = Bound(bound.value, open=True)
        else:
            other = _number(part, exclusive, where)
            if other is not None and (bound is None or (other - bound.value) * sign >= 0):
                bound = Bound(other, open=True)
        found.append(bound)
    return found[0], found[1]


def _items(part: Part, where: str) -> tuple[tuple[Schema, ...], Schema | None]:
    items = part.get("items")
    if isinstance(items, list):  # before 2020-12
        return tuple(items), part.get("additionalItems")
    if "prefixItems" not in part:
        return (), items
    prefix = part["prefixItems"]
    if not isinstance(prefix, list):
        raise refused(where, "prefixItems", "must be a list of schemas")
    return tuple(prefix), items


def _contains(part: Part, where: str) -> tuple[Contains, ...]:
    if "contains" not in part:
        return ()
    least = _count(part, "minContains", where)
    return (Contains(part["contains"], 1 if least is None else least, _count(part, "maxContains", where)),)


def _required(part: Part, where: str) -> tuple[str, ...]:
    found = part.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise refused(where, "required", "must be a list of names")
    return tuple(dict.fromkeys(found))


def _named(part: Part, keyword: str, where: str) -> Mapping[str, Schema]:
    found = part.get(keyword, {})
    if not isinstance(found, dict):
        raise refused(where, keyword, "must be an object")
    return found


def _text(part: Part, keyword: str, where: str) -> str | None:
    found = part.get(keyword)
    if found is not None and not isinstance(found, str):
        raise refused(where, keyword, "must be a string")
    return found


def _number(part: Part, keyword: str, where: str) -> Number | None:
    found = part.get(keyword)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise refused(where, keyword, "must be a number")
    return int(found) if found == int(found) else found


def _count(part: Part, keyword: str, where: str) -> int | None:
    found = _number(part, keyword, where)
    if found is not None and (not isinstance(found, int) or found < 0):
        raise refused(where, keyword, "must be a number of things, 0 or more")
    return found
