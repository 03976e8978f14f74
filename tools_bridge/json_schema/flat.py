"""Schemas as alternatives of `Facts`: references followed, allOf merged, anyOf spread out.

What is left says the same as the schema, with one exception: of a oneOf whose branches overlap only those
values remain that are in no other branch (`_apart`). With `cover`, alternatives may say less than the
schema does instead, so that what they rule out is ruled out by it: see `impossible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tools_bridge.json_schema.dialect import NEVER_HELD, Part, Schema, assertions, is_part, refused
from tools_bridge.json_schema.facts import TYPES, Facts, both, canonical, merged, type_of
from tools_bridge.json_schema.reading import read_facts, schemas_of
from tools_bridge.json_schema.references import References
from tools_bridge.schemas import MAX_BRANCHES, GrammarError

MAX_STEPS = 10_000
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
        self._step()
        part = self.known(schema, where)
        if isinstance(part, bool):
            return [Facts(where=where)] if part else []
        alternatives = [read_facts(part, where)]
        for keyword, follow in self._followers(part, where, cover):
            if keyword in part:
                alternatives = _spread(alternatives, follow(), where, keyword)
        return [self._unevaluated(facts, part, where, cover) for facts in alternatives]

    def _followers(
        self, part: Part, where: str, cover: bool
    ) -> Iterable[tuple[str, Callable[[], list[Facts]]]]:
        def each(keyword: str) -> list[list[Facts]]:
            return [
                self.flat(item, f"{where}.{keyword}[{n}]", cover=cover)
                for n, item in enumerate(schemas_of(part, keyword, where))
            ]

        def all_of() -> list[Facts]:
            found = [Facts(where=where)]
            for alternatives in each("allOf"):
                found = _spread(found, alternatives, where, "allOf")
            return found

        yield "$ref", lambda: self._referred(part["$ref"], where, cover)
        yield "allOf", all_of
        yield "anyOf", lambda: _checked([facts for found in each("anyOf") for facts in found], where, "anyOf")
        yield "oneOf", lambda: self._one_of(each("oneOf"), where, cover)
        if cover:
            return
        yield "not", lambda: self.negated(part["not"], f"{where}.not", "not")
        yield "if", lambda: self._conditional(part, where)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            yield keyword, lambda keyword=keyword: self._dependent(part[keyword], where, keyword)  # type: ignore[misc]

    def _step(self) -> None:
        """What is spread out can be much more than the schema."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch("the schema is too complex: its references and alternatives are too many")

    def _referred(self, pointer: object, where: str, cover: bool) -> list[Facts]:
        target, name = self._references.target(pointer, where)
        if name in self._open:
            raise GrammarError(f"{where}: $ref {name!r} refers to itself without anything between")
        self._open.append(name)
        try:
            return self.flat(target, name, cover=cover)
        finally:
            self._open.pop()

    def _one_of(self, branches: list[list[Facts]], where: str, cover: bool) -> list[Facts]:
        _checked([facts for branch in branches for facts in branch], where, "oneOf")
        if cover:
            return [facts for branch in branches for facts in branch]
        found: list[Facts] = []
        for index, branch in enumerate(branches):
            others = [facts for n, other in enumerate(branches) if n != index for facts in other]
            found += [self._apart(facts, others, where) for facts in branch]
        return found

    def _apart(self, facts: Facts, others: Sequence[Facts], where: str) -> Facts:
        """`facts`, without the values that `others` allow, too."""
        if facts.properties and facts.additional is None and facts.types & {"object"}:
            facts = replace(facts, additional=False)  # what is made of it is closed anyway
        for other in others:
            if self.impossible(merged(facts, other)):
                continue
            for name in facts.properties:  # one property that tells them apart must be there
                told = merged(facts, replace(other, required=(*other.required, name)))
                if self.impossible(told):
                    facts = replace(facts, required=tuple(dict.fromkeys([*facts.required, name])))
                    break
            if not self.impossible(merged(facts, other)):
                raise refused(where, "oneOf", "cannot be held: its branches overlap; use anyOf")
        return facts

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
        met = self.flat(both([part["if"], then]), f"{where}.then")
        unmet = self.negated(part["if"], f"{where}.if", "if")
        return [*met, *_spread(unmet, self.flat(otherwise, f"{where}.else"), where, "if")]

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
                present = _spread(there, self.flat(needs, f"{where}.{keyword}.{name}"), where, keyword)
            other = Facts(types=Facts().types - {"object"}, where=where)
            found = _spread(found, [absent, *present, other], where, keyword)
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
                    found += self.flat(value, f"{where}.not")
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


def _spread(found: list[Facts], more: list[Facts], where: str, keyword: str) -> list[Facts]:
    if len(found) * len(more) > MAX_BRANCHES:
        raise refused(where, keyword, f"makes more than {MAX_BRANCHES} alternatives")
    return [merged(a, b) for a in found for b in more]


def _checked(found: list[Facts], where: str, keyword: str) -> list[Facts]:
    if len(found) > MAX_BRANCHES:
        raise refused(where, keyword, f"has more than {MAX_BRANCHES} alternatives")
    return found
