"""Numbers within bounds. Where a bound is finer or further out than can be held, one within it is held."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from tools_bridge.json_schema.dialect import Part, refused
from tools_bridge.json_schema.facts import Bound, Facts
from tools_bridge.json_schema.pruning import NEVER
from tools_bridge.schemas import MAX_ENUM

MAX_INTEGER = 2**53
PLACES = 10**5  # xgrammar writes bounded numbers with six decimal places


def integer(facts: Facts) -> Part:
    low, high = _least_integer(facts.low), _most_integer(facts.high)
    for multiple in facts.multiples:
        if not isinstance(multiple, int):
            raise refused(facts.where, "multipleOf", "of a number that is no integer cannot be held")
    if low is not None and high is not None and low > high:
        return NEVER
    step = math.lcm(*(int(multiple) for multiple in facts.multiples))
    if step > 1:
        if low is None or high is None or (high - low) // step > MAX_ENUM:
            raise refused(
                facts.where, "multipleOf", f"can be held within bounds only, of {MAX_ENUM} values at most"
            )
        values = list(range(-(-low // step) * step, high + 1, step))
        return {"enum": values} if values else NEVER
    if low is not None and low > MAX_INTEGER:
        raise refused(facts.where, "minimum", f"beyond {MAX_INTEGER} cannot be held")
    if high is not None and high < -MAX_INTEGER:
        raise refused(facts.where, "maximum", f"beyond -{MAX_INTEGER} cannot be held")
    found: Part = {"type": "integer"}
    if low is not None:
        found["minimum"] = max(low, -MAX_INTEGER)
    if high is not None:
        found["maximum"] = min(high, MAX_INTEGER)
    return found


def number(facts: Facts) -> Part:
    if facts.multiples:
        if all(multiple == 1 for multiple in facts.multiples):
            return integer(facts)
        raise refused(facts.where, "multipleOf", "of type 'number' cannot be held")
    low, high = facts.low, facts.high
    if low and high and (low.value > high.value or (low.value == high.value and (low.open or high.open))):
        return NEVER
    low, high = _inside(low, math.ceil), _inside(high, math.floor)
    if low and (
        low.value > MAX_INTEGER
        or (high and (low.value > high.value or (low.value == high.value and (low.open or high.open))))
    ):
        raise refused(facts.where, "minimum", "and 'maximum' cannot be held: they are too large or too close")
    if high and high.value < -MAX_INTEGER:
        raise refused(facts.where, "maximum", f"beyond -{MAX_INTEGER} cannot be held")
    found: Part = {"type": "number"}
    if low:
        found["exclusiveMinimum" if low.open else "minimum"] = low.value
    if high:
        found["exclusiveMaximum" if high.open else "maximum"] = high.value
    return found


def _inside(bound: Bound | None, whole: Callable[[Fraction], int]) -> Bound | None:
    """The bound, or the next one that can be written."""
    if bound is None:
        return None
    if whole is math.ceil and bound.value < -MAX_INTEGER:
        return Bound(-MAX_INTEGER)
    if whole is math.floor and bound.value > MAX_INTEGER:
        return Bound(MAX_INTEGER)
    if round(bound.value, 5) == bound.value:
        return bound
    value = whole(Fraction(bound.value) * PLACES) / PLACES
    return Bound(int(value) if value.is_integer() else value)


def _least_integer(bound: Bound | None) -> int | None:
    if bound is None:
        return None
    return math.floor(bound.value) + 1 if bound.open else math.ceil(bound.value)


def _most_integer(bound: Bound | None) -> int | None:
    if bound is None:
        return None
    return math.ceil(bound.value) - 1 if bound.open else math.floor(bound.value)
