"""Whether a value that a schema lists is allowed by all else that it says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from tools_bridge.json_schema import formats
from tools_bridge.json_schema.dialect import Schema, refused, type_of
from tools_bridge.json_schema.facts import Contains, Facts, canonical
from tools_bridge.json_schema.flat import Flattener
from tools_bridge.json_schema.pattern_tree import Work
from tools_bridge.json_schema.patterns import Pattern, read_pattern
from tools_bridge.schemas import GrammarError

MOST_STEPS = 20_000  # values times what is said of them


class Judge:
    def __init__(self, flattener: Flattener) -> None:
        self._flattener = flattener
        self._steps = 0
        self._work = Work(times=2)

    def allows(self, schema: Schema, value: object, where: str, *, cover: bool = False) -> bool:
        """Certainly; with `cover`: perhaps."""
        if isinstance(schema, bool):
            return schema
        alternatives = self._flattener.flat(schema, where, cover=cover)
        return any(self.fits(facts, value, cover=cover) for facts in alternatives)

    def fits(self, facts: Facts, value: object, *, cover: bool = False) -> bool:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise GrammarError(f"{facts.where}: too much is said of the values that are listed")
        kind = type_of(value)
        if kind not in facts.types or canonical(value) in map(canonical, facts.apart):
            return False
        if facts.values is not None and canonical(value) not in map(canonical, facts.values):
            return False
        if isinstance(value, bool) or value is None:
            return True
        if isinstance(value, int | float):
            return _number_fits(facts, value)
        if isinstance(value, str):
            return _text_fits(facts, value, cover, self._work)
        if isinstance(value, dict):
            return self._object_fits(facts, value, cover)
        assert isinstance(value, list | tuple)
        return self._array_fits(facts, value, cover)

    def _object_fits(self, facts: Facts, value: dict[str, object], cover: bool) -> bool:
        most = facts.max_properties
        if len(value) < facts.min_properties or (most is not None and len(value) > most):
            return False
        if not all(name in value for name in facts.required):
            return False
        return all(
            self.allows(facts.property_of(name), item, facts.where, cover=cover)
            and all(self.allows(schema, name, facts.where, cover=cover) for schema in facts.names)
            for name, item in value.items()
        )

    def _array_fits(self, facts: Facts, value: Sequence[object], cover: bool) -> bool:
        most = facts.max_items
        if len(value) < facts.min_items or (most is not None and len(value) > most):
            return False
        if facts.unique and len(set(map(canonical, value))) < len(value):
            return False
        for contains in facts.contains:
            if self._met(contains, value, facts.where, cover) < contains.least:
                return False
            most = len(value) if contains.most is None else contains.most
            if self._met(contains, value, facts.where, not cover) > most:
                return False
        return all(
            self.allows(facts.item(index), item, facts.where, cover=cover) for index, item in enumerate(value)
        )

    def _met(self, contains: Contains, value: Sequence[object], where: str, cover: bool) -> int:
        return sum(self.allows(contains.schema, item, where, cover=cover) for item in value)


def _number_fits(facts: Facts, value: int | float) -> bool:
    low, high = facts.low, facts.high
    if low and (value < low.value or (low.open and value == low.value)):
        return False
    if high and (value > high.value or (high.open and value == high.value)):
        return False
    for multiple in facts.multiples:
        if not (isinstance(multiple, int) and isinstance(value, int)):
            raise refused(facts.where, "multipleOf", "of numbers that are no integers cannot be held")
    return all(Fraction(value) % Fraction(multiple) == 0 for multiple in facts.multiples)


def _text_fits(facts: Facts, value: str, cover: bool, work: Work) -> bool:
    if len(value) < facts.min_length or (facts.max_length is not None and len(value) > facts.max_length):
        return False
    if cover:
        return all(
            pattern.found_in(value, work) or pattern.matches(value, work) for pattern in facts.patterns
        )
    return all(pattern.found_in(value, work) for pattern in facts.patterns) and all(
        _is_of(form, value, facts.where, work) for form in facts.formats
    )


def _is_of(form: str, value: str, where: str, work: Work) -> bool:
    """Where a format is held more narrowly than the standard has it, other values are refused."""
    if form in formats.UNHELD:
        raise refused(where, "format", f"{form!r} cannot be held")
    if form not in formats.PATTERNS or _pattern(form).found_in(value, work):
        return True
    if form in formats.WHOLE:
        return False
    raise refused(where, "format", f"{form!r} cannot be told of {value[:60]!r}")


@cache
def _pattern(form: str) -> Pattern:
    return read_pattern(f"^({formats.PATTERNS[form]})$", form, ours=True)
