"""The knee: the highest rate of which most requests still keep their promises.

Definition: the highest rate of sessions at which at least `ATTAINED` of all requests (rejected, aborted and
timed-out ones among them) keep their joint SLO; DistServe's and eleven of thirteen papers' definition. It is
found by doubling or halving from a first guess until one rate is good and one is not, then by bisection of
their ratio to 2.5 %. Pure: what a rate comes to is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

ATTAINED = 0.9
PRECISION = 0.025
MOST = 8  # probes to find a bracket


class Knee(msgspec.Struct, frozen=True):
    """`rate` was good, `above` was not, and they are at most `PRECISION` apart. 0: no rate was good;
    above None: every rate was."""

    rate: float
    above: float | None
    probed: dict[str, float]  # attainment by rate

    @property
    def found(self) -> bool:
        return self.rate > 0 and self.above is not None


def find_knee(
    attainment: Callable[[float], float], guess: float, *, precision: float = PRECISION, most: int = MOST
) -> Knee:
    """attainment: of a rate. guess: where to begin. At most `most` probes for the bracket."""
    if not guess > 0:
        raise ValueError(f"a knee is looked for from a rate above 0, got {guess:g}")
    probed: dict[str, float] = {}

    def good(rate: float) -> bool:
        probed[f"{rate:.6g}"] = found = attainment(rate)
        return found >= ATTAINED

    low, high = 0.0, math.inf
    rate = guess
    for _ in range(most):
        if good(rate):
            low = rate
            rate *= 2
        else:
            high = rate
            rate /= 2
        if low and high < math.inf:
            break
    else:
        return Knee(low, high if high < math.inf else None, probed)
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        if good(middle):
            low = middle
        else:
            high = middle
    return Knee(low, high, probed)
