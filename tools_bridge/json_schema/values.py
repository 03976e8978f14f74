"""Whether a value that a schema lists is allowed by all else that it says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tools_bridge.json_schema.dialect import Schema, refused
from tools_bridge.json_schema.facts import Facts, canonical, type_of
from tools_bridge.json_schema.flat import Flattener
from tools_bridge.schemas import GrammarError

MOST_STEPS = 20_000  # values times what is said of them


class Judge:
    def __init__(self, flattener: Flattener) -> None:
        self._flattener = flattener
        self._steps = 0

    def allows(self, schema: Schema, value: object, where: str) -> bool:
        if isinstance(schema, bool):
            return schema
        return any(self.fits(facts, value) for facts in self._flattener.flat(schema, where))

    def fits(self, facts: Facts, value: object) -> bool:
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
            return _text_fits(facts, value)
        if isinstance(value, dict):
            return self._object_fits(facts, value)
        assert isinstance(value, list | tuple)
        return self._array_fits(facts, value)

    def _object_fits(self, facts: Facts, value: dict[str, object]) -> bool:
        most = facts.max_properties
        if len(value) < facts.min_properties or (most is not None and len(value) > most):
            return False
        if not all(name in value for name in facts.required):
            return False
        return all(
            self.allows(facts.property_of(name), item, facts.where)
            and all(self.allows(schema, name, facts.where) for schema in facts.names)
            for name, item in value.items()
        )

    def _array_fits(self, facts: Facts, value: Sequence[object]) -> bool:
        most = facts.max_items
        if len(value) < facts.min_items or (most is not None and len(value) > most):
            return False
        if facts.unique and len(set(map(canonical, value))) < len(value):
            return False
        for contains in facts.contains:
            met = sum(self.allows(contains.schema, item, facts.where) for item in value)
            if met < contains.least or (contains.most is not None and met > contains.most):
                return False
        return all(self.allows(facts.item(index), item, facts.where) for index, item in enumerate(value))


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


def _text_fits(facts: Facts, value: str) -> bool:
    if len(value) < facts.min_length or (facts.max_length is not None and len(value) > facts.max_length):
        return False
    return all(pattern.found_in(value) for pattern in facts.patterns)  # formats of listed values are theirs
