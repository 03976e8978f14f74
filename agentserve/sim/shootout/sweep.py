"""Tuning: every policy gets the same number of parameter sets, drawn alike, on the same agents.

The grid of a policy is read off its parameter struct: around each default, powers of two. What is tuned
is tuned on seeds that are not reported, so nobody is tuned to the test.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TypeVar

import msgspec

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TRIES = 20  # draws for one candidate, before the budget is left unspent

P = TypeVar("P", bound=msgspec.Struct)


def candidates(
    default: P, budget: int, seed: int, accepts: Callable[[P], bool] = lambda one: True
) -> list[P]:
    """At most `budget` different parameter sets; the default, which is the published one, is the first.

    Numbers are multiplied by a factor each, switches are thrown; a set that the struct refuses
    (ValueError) or that is not accepted is drawn again.
    """
    found, rng = [default], random.Random(f"sweep {seed} {type(default).__name__}")
    while len(found) < budget:
        for _ in range(TRIES):
            drawn = _draw(default, rng)
            if drawn is not None and drawn not in found and accepts(drawn):
                found.append(drawn)
                break
        else:
            break
    return found


def best(found: list[P], score: Callable[[P], float]) -> tuple[P, float]:
    """The candidate with the highest score; the earlier one of equals."""
    scores = [score(one) for one in found]
    at = max(range(len(found)), key=lambda index: (scores[index], -index))
    return found[at], scores[at]


def _draw(default: P, rng: random.Random) -> P | None:
    changes = {
        name: _near(getattr(default, name), rng)
        for name in default.__struct_fields__
        if isinstance(getattr(default, name), (bool, int, float))
    }
    try:
        return msgspec.structs.replace(default, **changes)
    except ValueError:
        return None


def _near(value: bool | int | float, rng: random.Random) -> bool | int | float:
    if isinstance(value, bool):
        return rng.random() < 0.5
    factor = rng.choice(FACTORS)
    if isinstance(value, int):
        return max(1, round(value * factor)) if value > 0 else value
    return value * factor if math.isfinite(value) else value
