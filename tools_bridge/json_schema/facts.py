"""What schemas without alternatives say about a value, and what two of them say together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tools_bridge.json_schema.dialect import ALL_TYPES, TYPES, Schema
from tools_bridge.json_schema.patterns import Pattern

Number = int | float
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bound:
    value: Number
    open: bool = False  # the value itself is outside


@dataclass(frozen=True, slots=True)
class Contains:
    schema: Schema
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class OneOf:
    """Branches of which exactly one must allow the value. They are spread out last, over all else that is
    said of it: that may tell them apart."""

    branches: tuple[Schema, ...]
    where: str
    within: tuple[str, ...]  # the references that were being followed


@dataclass(frozen=True, slots=True)
class Facts:
    """A conjunction. None, or an empty tuple, where nothing is said.

    `types`: "fraction" is a number that is no integer. `apart`: values that it may not be.
    """

    types: frozenset[str] = ALL_TYPES
    values: tuple[object, ...] | None = None
    apart: tuple[object, ...] = ()
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Number, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[Pattern, ...] = ()
    formats: tuple[str, ...] = ()
    properties: Mapping[str, Schema] = field(default_factory=dict)
    patterned: Mapping[Pattern, Schema] = field(default_factory=dict)
    additional: Schema | None = None
    required: tuple[str, ...] = ()
    names: tuple[Schema, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    prefix: tuple[Schema, ...] = ()
    items: Schema | None = None
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    contains: tuple[Contains, ...] = ()
    one_of: tuple[OneOf, ...] = ()  # not spread out yet
    negated: bool = False  # a part of it is what a schema does not allow
    where: str = ""

    def property_of(self, name: str) -> Schema:
        """The schema of a property's value, whatever says it."""
        said = [self.properties[name]] if name in self.properties else []
        said += [schema for pattern, schema in self.patterned.items() if pattern.matches(name)]
        if said:
            return both(said)
        return True if self.additional is None else self.additional

    def item(self, index: int) -> Schema:
        if index < len(self.prefix):
            return self.prefix[index]
        return True if self.items is None else self.items

    @property
    def about(self) -> frozenset[str]:
        """The types that anything but `types` speaks of."""
        found: set[str] = set()
        if self.low or self.high or self.multiples:
            found |= TYPES["number"]
        if self.min_length or self.max_length is not None or self.patterns or self.formats:
            found.add("string")
        if self.properties or self.patterned or self.additional is not None or self.required or self.names:
            found.add("object")
        if self.min_properties or self.max_properties is not None:
            found.add("object")
        if self.prefix or self.items is not None or self.min_items or self.max_items is not None:
            found.add("array")
        if self.unique or self.contains:
            found.add("array")
        return frozenset(found)


def both(schemas: Iterable[Schema]) -> Schema:
    """One schema that says what all of them do."""
    said = [schema for schema in schemas if schema is not True and schema != {}]
    if any(schema is False for schema in said):
        return False
    if len(said) > 1:
        said = list({json.dumps(schema, sort_keys=True): schema for schema in said}.values())
    if len(said) < 2:
        return said[0] if said else True
    return {"allOf": said}


def merged(a: Facts, b: Facts, *, cover: bool = False) -> Facts:
    """What both say; it may be more than that for names of properties that patterns match, and with `cover`
    less."""
    values = a.values if b.values is None else b.values
    if a.values is not None and b.values is not None:
        kept = {canonical(value) for value in b.values}
        values = tuple(value for value in a.values if canonical(value) in kept)
    names = list(dict.fromkeys([*a.properties, *b.properties]))
    patterned = dict(a.patterned)
    for pattern, schema in b.patterned.items():
        patterned[pattern] = both([patterned[pattern], schema]) if pattern in patterned else schema
    for mine, other in ((a, b), (b, a)):  # a name that only the other's patterns allow is additional here
        if mine.additional is not None and not (cover and mine.patterned):
            for pattern in other.patterned.keys() - mine.patterned.keys():
                patterned[pattern] = both([patterned[pattern], mine.additional])
    length = max(len(a.prefix), len(b.prefix))
    return Facts(
        types=a.types & b.types,
        values=values,
        apart=a.apart + b.apart,
        low=_tighter(a.low, b.low, max),
        high=_tighter(a.high, b.high, min),
        multiples=tuple(dict.fromkeys(a.multiples + b.multiples)),
        min_length=max(a.min_length, b.min_length),
        max_length=_least(a.max_length, b.max_length),
        patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
        formats=tuple(dict.fromkeys(a.formats + b.formats)),
        properties={name: both([a.property_of(name), b.property_of(name)]) for name in names},
        patterned=patterned,
        additional=_and(a.additional, b.additional),
        required=tuple(dict.fromkeys(a.required + b.required)),
        names=a.names + b.names,
        min_properties=max(a.min_properties, b.min_properties),
        max_properties=_least(a.max_properties, b.max_properties),
        prefix=tuple(both([a.item(index), b.item(index)]) for index in range(length)),
        items=_and(a.items, b.items),
        min_items=max(a.min_items, b.min_items),
        max_items=_least(a.max_items, b.max_items),
        unique=a.unique or b.unique,
        contains=a.contains + b.contains,
        one_of=a.one_of + b.one_of,
        negated=a.negated or b.negated,
        where=a.where or b.where,
    )


def _and(a: Schema | None, b: Schema | None) -> Schema | None:
    return b if a is None else a if b is None else both([a, b])


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _tighter(a: Bound | None, b: Bound | None, pick: Callable[[Number, Number], Number]) -> Bound | None:
    if a is None or b is None:
        return a or b
    if a.value == b.value:
        return a if a.open else b
    return a if pick(a.value, b.value) == a.value else b


def canonical(value: object) -> str:
    """Equal for values that JSON Schema calls equal: 1 is 1.0, but not true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value
