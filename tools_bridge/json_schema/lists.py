"""Lists without equal items, where few can be in them: all there are.

No grammar of reasonable size says of long ones that no item comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools_bridge.json_schema.dialect import refused
from tools_bridge.json_schema.facts import Facts, canonical
from tools_bridge.json_schema.numbers import integer
from tools_bridge.json_schema.pruning import NEVER
from tools_bridge.schemas import MAX_ENUM

MOST_STEPS = 10 * MAX_ENUM  # beginnings that are looked at
NO_TYPES = (("boolean", (False, True)), ("null", (None,)))

Listing = Callable[[object, str], "Sequence[object] | None"]
"""(schema, place) -> all values that it allows; None where they are not few."""


def unlike_lists(facts: Facts, listing: Listing) -> list[list[object]]:
    """All that the facts of a list with `uniqueItems` allow, the shortest first. A GrammarError where there
    are too many."""
    places, rest, most = _places(facts, listing)
    found: list[list[object]] = []
    layer: list[tuple[tuple[str, ...], list[object]]] = [((), [])]
    steps = 0
    for length in range(most + 1):
        if length >= facts.min_items:
            found += [said for _, said in layer]
        if length == most:
            break
        values = places[length] if length < len(places) else rest
        steps += len(layer) * (1 + len(values))
        if len(found) > MAX_ENUM or steps > MOST_STEPS:
            raise _too_many(facts)
        layer = [
            ((*keys, key), [*said, value])
            for keys, said in layer
            for key, value in values.items()
            if key not in keys
        ]
    if len(found) > MAX_ENUM:
        raise _too_many(facts)
    return found


def _places(facts: Facts, listing: Listing) -> tuple[list[dict[str, object]], dict[str, object], int]:
    """(the values of the first items, those of all others, how many items there may be)."""
    prefix = facts.prefix[: facts.max_items]
    closed = facts.items is None and bool(prefix) and facts.min_items <= len(prefix)  # as in other lists
    needs_rest = not closed and (facts.max_items is None or facts.max_items > len(prefix))
    places = [_keyed(listing(schema, facts.where), facts) for schema in prefix]
    rest: dict[str, object] = {}
    if needs_rest:
        rest = _keyed(listing(facts.items, f"{facts.where}.items"), facts)
    most = min(len({key for values in (*places, rest) for key in values}), len(places) + len(rest))
    return places, rest, most if facts.max_items is None else min(most, facts.max_items)


def _keyed(values: Sequence[object] | None, facts: Facts) -> dict[str, object]:
    if values is None:
        raise refused(facts.where, "uniqueItems", "cannot be held, except over items whose values are few")
    return {canonical(value): value for value in values}


def few_values(facts: Facts) -> list[object] | None:
    """Of facts that list none themselves."""
    found: list[object] = []
    types = set(facts.types)
    for kind, values in NO_TYPES:
        if kind in types:
            found += values
            types.remove(kind)
    if types == {"integer"} and facts.low is not None and facts.high is not None:
        part = integer(facts)
        listed, low, high = part.get("enum"), part.get("minimum"), part.get("maximum")
        if isinstance(listed, list):
            found += listed
        elif isinstance(low, int) and isinstance(high, int) and high - low <= MAX_ENUM:
            found += range(low, high + 1)
        elif part != NEVER:
            return None
    elif types:
        return None
    apart = set(map(canonical, facts.apart))
    return [value for value in found if canonical(value) not in apart]


def _too_many(facts: Facts) -> Exception:
    return refused(facts.where, "uniqueItems", f"cannot be held: more than {MAX_ENUM} lists are valid")
