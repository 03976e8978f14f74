"""Schemas as alternatives of `Facts`: references followed, allOf merged, anyOf spread out.

What is left says the same as the schema, with one exception: of a oneOf whose branches overlap only those
values remain that something tells apart from all other branches (`_apart`). With `cover`, alternatives may
say less than the schema does instead, so that what they rule out is ruled out by it: see `impossible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tools_bridge.json_schema.dialect import (
    ALL_TYPES,
    NEVER_HELD,
    TYPES,
    Part,
    Schema,
    assertions,
    is_part,
    refused,
    type_of,
)
from tools_bridge.json_schema.facts import Facts, OneOf, both, canonical, merged
from tools_bridge.json_schema.reading import read_facts, schemas_of
from tools_bridge.json_schema.references import References
from tools_bridge.schemas import MAX_BRANCHES, GrammarError

MAX_STEPS = 20_000  # schemas that are read, properties that are merged
DEEP = 3  # levels of properties that are looked into for a contradiction


class TooMuch(GrammarError):
    """More work than a schema is worth."""


class Flattener:
    def __init__(self, references: References) -> None:
        self._references = references
        self._open: list[str] = []  # references that are being followed
        self._steps = 0

    def known(self, schema: Schema, where: str) -> Part | bool:
        """The schema's assertions; True or False where they are none or everything is."""
        if isinstance(schema, bool):
            return schema
        if not is_part(schema):
            raise GrammarError(f"{where}: a schema must be an object or a boolean")
        part = assertions(schema, self._references.draft)
        for keyword in NEVER_HELD:
            if keyword in part:
                raise refused(where, keyword, "cannot be held")
        self._references.check_base(schema, where)
        return part or True

    def flat(self, schema: Schema, where: str, *, cover: bool = False) -> list[Facts]:
        """Alternatives; none where no value is allowed."""
        return self._told(self._flat(schema, where, cover))

    def _flat(self, schema: Schema, where: str, cover: bool = False) -> list[Facts]:
        """Alternatives in which each oneOf is left as it is."""
        self._step()
        part = self.known(schema, where)
        if isinstance(part, bool):
            return [Facts(where=where)] if part else []
        alternatives = [read_facts(part, where)]
        for keyword, follow in self._followers(part, where, cover):
            if keyword in part:
                alternatives = self._spread(alternatives, follow(), where, keyword, cover)
        if part.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            alternatives = self._told(alternatives)  # what they look at counts
        return [self._unevaluated(facts, part, where, cover) for facts in alternatives]

    def _followers(
        self, part: Part, where: str, cover: bool
    ) -> Iterable[tuple[str, Callable[[], list[Facts]]]]:
        def each(keyword: str) -> list[list[Facts]]:
            return [
                self._flat(item, f"{where}.{keyword}[{n}]", cover)
                for n, item in enumerate(schemas_of(part, keyword, where))
            ]

        def all_of() -> list[Facts]:
            found = [Facts(where=where)]
            for alternatives in each("allOf"):
                found = self._spread(found, alternatives, where, "allOf", cover)
            return found

        yield "$ref", lambda: self._referred(part["$ref"], where, cover)
        yield "allOf", all_of
        yield "anyOf", lambda: _checked([facts for found in each("anyOf") for facts in found], where, "anyOf")
        if cover:
            yield (
                "oneOf",
                lambda: _checked([facts for found in each("oneOf") for facts in found], where, "oneOf"),
            )
            return
        yield "oneOf", lambda: [self._one_of(part, where)]
        yield "not", lambda: self.negated(part["not"], f"{where}.not", "not")
        yield "if", lambda: self._conditional(part, where)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            yield keyword, lambda keyword=keyword: self._dependent(part[keyword], where, keyword)  # type: ignore[misc]

    def _step(self, count: int = 1) -> None:
        """What is spread out can be much more than the schema."""
        self._steps += count
        if self._steps > MAX_STEPS:
            raise TooMuch("the schema is too complex: its references and alternatives are too many")

    def _referred(self, pointer: object, where: str, cover: bool) -> list[Facts]:
        target, name = self._references.target(pointer, where)
        if name in self._open:
            raise GrammarError(f"{where}: $ref {name!r} refers to itself without anything between")
        self._open.append(name)
        try:
            return self._flat(target, name, cover)
        finally:
            self._open.pop()

    def _one_of(self, part: Part, where: str) -> Facts:
        branches = schemas_of(part, "oneOf", where)
        if len(branches) > MAX_BRANCHES:
            raise refused(where, "oneOf", f"has more than {MAX_BRANCHES} alternatives")
        return Facts(one_of=(OneOf(tuple(branches), where, tuple(self._open)),), where=where)

    def _told(self, found: list[Facts]) -> list[Facts]:
        """With each oneOf spread out."""
        done: list[Facts] = []
        waiting = found[::-1]
        while waiting:
            facts = waiting.pop()
            if not facts.one_of:
                done.append(facts)
                continue
            first, *rest = facts.one_of
            open_, self._open = self._open, list(first.within)
            try:
                branches = self._branches(replace(facts, one_of=()), first)
            finally:
                self._open = open_
            waiting += [replace(branch, one_of=tuple(rest)) for branch in reversed(branches)]
            if len(waiting) + len(done) > MAX_BRANCHES:
                raise refused(first.where, "oneOf", f"makes more than {MAX_BRANCHES} alternatives")
        return done

    def _branches(self, base: Facts, one: OneOf) -> list[Facts]:
        """What is in `base` and in one branch alone."""
        places = [(item, f"{one.where}.oneOf[{n}]") for n, item in enumerate(one.branches)]
        covers = [
            [_Other(facts, self._listed(facts)) for facts in self.flat(*place, cover=True)]
            for place in places
        ]
        found: list[Facts] = []
        for index, place in enumerate(places):
            others = [other for n, cover in enumerate(covers) if n != index for other in cover]
            branch = self._told(self._spread([base], self._flat(*place), one.where, "oneOf"))
            found += [self._apart(facts, others, one.where) for facts in branch]
        return found

    def _apart(self, facts: Facts, others: Sequence[_Other], where: str) -> Facts:
        """`facts`, without the values that `others` allow, too."""
        if facts.types == ALL_TYPES and facts.about:
            facts = replace(facts, types=facts.about)  # what is made of it is of these anyway
        listed = self._listed(facts)
        for other in others:
            tags = [name for name in listed if listed[name].isdisjoint(other.listed.get(name, listed[name]))]
            if facts.types == TYPES["object"] and any(name in facts.required for name in tags):
                continue
            if self._exclude(facts, other.facts):
                continue
            for told in self._ways(facts, other.facts, tags):
                if self._exclude(told, other.facts):
                    facts, listed = told, self._listed(told)
                    break
            else:
                raise refused(where, "oneOf", "cannot be held: its branches overlap; use anyOf")
        return facts

    def _ways(self, facts: Facts, other: Facts, tags: Sequence[str]) -> Iterator[Facts]:
        """Less than `facts`, in which a property tells it from `other`: by what it is, or by not being there.
        What names properties has no others anyway, unless it says so."""
        absent = [name for name in other.required if name not in facts.required]
        closed = facts.properties and facts.additional is None
        for name in absent:
            if closed and name not in facts.properties:
                yield replace(facts, properties={**facts.properties, name: False})
        for name in dict.fromkeys([*tags, *facts.properties]):
            if name not in facts.required:
                yield replace(facts, required=(*facts.required, name))
        for name in absent:
            if facts.properties:
                yield replace(facts, properties={**facts.properties, name: False})

    def _listed(self, facts: Facts) -> dict[str, frozenset[str]]:
        """The values of each property whose values are listed, as `canonical` has them."""
        draft = self._references.draft
        found = {name: _values(schema, draft) for name, schema in facts.properties.items()}
        return {name: values for name, values in found.items() if values is not None}

    def _exclude(self, facts: Facts, other: Facts) -> bool:
        """Whether certainly no value is in both. Of properties those count that must be there."""
        names = dict.fromkeys([*facts.required, *other.required])

        def needed(said: Facts) -> Facts:
            needs = {name: said.property_of(name) for name in names}
            return replace(said, properties=needs, patterned={}, additional=None)

        return self.impossible(self._merged(needed(facts), needed(other), cover=True))

    def _merged(self, a: Facts, b: Facts, *, cover: bool = False) -> Facts:
        self._step(1 + len(a.properties) + len(b.properties))
        return merged(a, b, cover=cover)

    def _spread(
        self, found: list[Facts], more: list[Facts], where: str, keyword: str, cover: bool = False
    ) -> list[Facts]:
        if len(found) * len(more) > MAX_BRANCHES:
            raise refused(where, keyword, f"makes more than {MAX_BRANCHES} alternatives")
        return [self._merged(a, b, cover=cover) for a in found for b in more]

    def impossible(self, facts: Facts, depth: int = 0) -> bool:
        """Whether certainly no value has these facts."""
        self._step()
        if facts.values is not None and not any(
            type_of(value) in facts.types and canonical(value) not in map(canonical, facts.apart)
            for value in facts.values
        ):
            return True
        if not facts.types:
            return True
        low, high = facts.low, facts.high
        ruled: set[str] = set()
        if low and high and (low.value > high.value or (low.value == high.value and (low.open or high.open))):
            ruled |= TYPES["number"]
        if facts.max_length is not None and facts.max_length < facts.min_length:
            ruled.add("string")
        if facts.max_items is not None and facts.max_items < facts.min_items:
            ruled.add("array")
        if depth < DEEP and any(self._nothing(facts.property_of(name), depth) for name in facts.required):
            ruled.add("object")
        return facts.types <= ruled

    def _nothing(self, schema: Schema, depth: int) -> bool:
        if schema is False:
            return True
        if len(self._open) > 40:
            return False
        try:
            alternatives = self.flat(schema, "", cover=True)
        except TooMuch:
            raise
        except GrammarError:
            return False  # what cannot be read rules nothing out
        return all(self.impossible(facts, depth + 1) for facts in alternatives)

    def _conditional(self, part: Part, where: str) -> list[Facts]:
        then, otherwise = part.get("then", True), part.get("else", True)
        if then is True and otherwise is True:
            return [Facts(where=where)]
        met = self._flat(both([part["if"], then]), f"{where}.then")
        unmet = self.negated(part["if"], f"{where}.if", "if")
        return [*met, *self._spread(unmet, self._flat(otherwise, f"{where}.else"), where, "if")]

    def _dependent(self, named: object, where: str, keyword: str) -> list[Facts]:
        if not isinstance(named, dict):
            raise refused(where, keyword, "must be an object")
        found = [Facts(where=where)]
        for name, needs in named.items():
            absent = Facts(properties={name: False}, where=where)
            if isinstance(needs, list):
                present = [Facts(required=(name, *map(str, needs)), where=where)]
            else:
                there = [Facts(required=(name,), where=where)]
                present = self._spread(there, self._flat(needs, f"{where}.{keyword}.{name}"), where, keyword)
            other = Facts(types=Facts().types - {"object"}, where=where)
            found = self._spread(found, [absent, *present, other], where, keyword)
        return found

    def _unevaluated(self, facts: Facts, part: Part, where: str, cover: bool) -> Facts:
        """What no subschema in place has looked at is additional. Each alternative is one way to be valid,
        and all in it looks at what it names; but what a negation names is looked at by nobody."""
        if cover or not part.keys() & {"unevaluatedProperties", "unevaluatedItems"}:
            return facts
        if facts.negated:
            keyword = next(name for name in part if name.startswith("unevaluated"))
            raise refused(where, keyword, "beside a condition cannot be held")
        if "unevaluatedProperties" in part and facts.additional is None:
            facts = replace(facts, additional=part["unevaluatedProperties"])
        if "unevaluatedItems" in part and facts.items is None:
            facts = replace(facts, items=part["unevaluatedItems"])
        return facts

    def negated(self, schema: Schema, where: str, keyword: str) -> list[Facts]:  # noqa: PLR0912
        """Alternatives of what `schema` does not allow, where that can be said."""
        part = self.known(schema, where)
        if isinstance(part, bool):
            return [] if part else [Facts(where=where)]
        found: list[Facts] = []
        for name, value in part.items():
            match name, value:
                case "type", _:
                    found.append(
                        Facts(types=Facts().types - read_facts({"type": value}, where).types, where=where)
                    )
                case (("const" | "enum"), _):
                    values = read_facts({name: value}, where).values or ()
                    found.append(Facts(apart=values, where=where))
                case "required", list():
                    found += [
                        Facts(types=TYPES["object"], properties={str(needed): False}, where=where)
                        for needed in value
                    ]
                case "properties", dict():
                    for key, inner in value.items():
                        unmet = {"not": inner} if inner is not True else False
                        found.append(
                            Facts(
                                types=TYPES["object"], required=(key,), properties={key: unmet}, where=where
                            )
                        )
                case "not", _:
                    found += self._flat(value, f"{where}.not")
                case "allOf", list():
                    for item in value:
                        found += self.negated(item, where, keyword)
                case "$ref", _ if len(part) == 1:
                    target, place = self._references.target(value, where)
                    if place in self._open:
                        raise GrammarError(
                            f"{where}: $ref {place!r} refers to itself without anything between"
                        )
                    self._open.append(place)
                    try:
                        found += self.negated(target, where, keyword)
                    finally:
                        self._open.pop()
                case (("then" | "else"), _) if "if" not in part:
                    pass
                case _:
                    raise refused(where.rpartition(".")[0], keyword, f"with {name!r} in it cannot be held")
        return [replace(facts, negated=True) for facts in _checked(found, where, keyword)]


@dataclass(frozen=True, slots=True)
class _Other:
    """What another branch may allow."""

    facts: Facts
    listed: Mapping[str, frozenset[str]]


def _values(schema: Schema, draft: int) -> frozenset[str] | None:
    if not is_part(schema) or "$ref" in schema:
        return None
    schema = assertions(schema, draft)
    said = [frozenset({canonical(schema["const"])})] if "const" in schema else []
    listed, parts = schema.get("enum"), schema.get("allOf")
    if isinstance(listed, list):
        said.append(frozenset(map(canonical, listed)))
    if isinstance(parts, list):
        said += [values for item in parts if (values := _values(item, draft)) is not None]
    return frozenset.intersection(*said) if said else None


def _checked(found: list[Facts], where: str, keyword: str) -> list[Facts]:
    if len(found) > MAX_BRANCHES:
        raise refused(where, keyword, f"has more than {MAX_BRANCHES} alternatives")
    return found
