"""Survival curves of waits: how likely it is that somebody is still waiting after t seconds.

A `Curve` is a survival function on fixed, log-spaced edges with a constant hazard between two edges,
so that every question about it (chance to return, expected time held) has a closed form. A curve
never reaches zero: a wait that nobody has seen is unlikely, not impossible. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

FIRST = 1e-3  # seconds: the end of the first bin
HORIZON = 1e6  # seconds (11.6 days): what has not come by then is treated as never coming
PER_DECADE = 16  # bins per decade: one is 15 % wide

EDGES: tuple[float, ...] = (
    0.0,
    *(FIRST * 10 ** (i / PER_DECADE) for i in range(9 * PER_DECADE)),
    HORIZON,
)
BINS = len(EDGES) - 1
LEAST = 1e-12  # the smallest survival that a curve knows


def bin_of(seconds: float) -> int:
    """The bin of a wait; what is beyond the horizon counts in the last."""
    return min(bisect_right(EDGES, clean(seconds)) - 1, BINS - 1)


def clean(seconds: float) -> float:
    """A time that formulas can take: not a number and negative are 0; never beyond 1,000 horizons."""
    return min(seconds, 1000 * HORIZON) if seconds > 0 else 0.0


class Wait(Protocol):
    """What is known about the length W of one wait. Times count from its start."""

    def survival(self, t: float) -> float: ...

    def conditional(self, elapsed: float, dt: float) -> float: ...

    def expected_hold(self, elapsed: float, tau: float) -> float: ...

    def quantile(self, q: float) -> float: ...


class Curve:
    """A survival function S(t) = P(W > t), with a constant hazard between `EDGES`."""

    __slots__ = ("_area", "_values")

    def __init__(self, values: Sequence[float]) -> None:
        """values: S at each of `EDGES`; brought into [LEAST, 1], non-increasing, starting at 1."""
        if len(values) != len(EDGES):
            raise ValueError(f"a curve has {len(EDGES)} values, not {len(values)}")
        least, kept = 1.0, [1.0]
        for value in values[1:]:
            least = min(least, max(value, LEAST))  # in this order, what is not a number changes nothing
            kept.append(least)
        self._values = tuple(kept)
        area, total = [0.0], 0.0
        for (left, right), (high, low) in zip(pairwise(EDGES), pairwise(kept), strict=True):
            total += high * (right - left) * _mean_of_decay(low / high)
            area.append(total)
        self._area = tuple(area)

    @property
    def values(self) -> tuple[float, ...]:
        return self._values

    def survival(self, t: float) -> float:
        """P(W > t)."""
        t = clean(t)
        i = bisect_right(EDGES, t) - 1
        if i >= BINS:
            return self._values[-1]
        high, low = self._values[i], self._values[i + 1]
        return float(high * (low / high) ** ((t - EDGES[i]) / (EDGES[i + 1] - EDGES[i])))

    def conditional(self, elapsed: float, dt: float) -> float:
        """P(W <= elapsed + dt | W > elapsed)."""
        elapsed = clean(elapsed)
        return max(0.0, 1.0 - self.survival(elapsed + clean(dt)) / self.survival(elapsed))

    def expected_hold(self, elapsed: float, tau: float) -> float:
        """E[min(W - elapsed, tau) | W > elapsed]: how long something is held that is given up after tau."""
        elapsed, tau = clean(elapsed), clean(tau)
        held = (self._integral(elapsed + tau) - self._integral(elapsed)) / self.survival(elapsed)
        return min(max(held, 0.0), tau)

    def quantile(self, q: float) -> float:
        """The time by which a share q has come back; `HORIZON` if it never is."""
        target = 1.0 if math.isnan(q) else 1.0 - min(max(q, 0.0), 1.0)
        if target >= 1.0:
            return 0.0
        if target < self._values[-1]:
            return HORIZON
        low, high = 0, BINS  # S(EDGES[high]) <= target < S(EDGES[low])
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._values[middle] > target else (low, middle)
        share = math.log(self._values[low] / target) / math.log(self._values[low] / self._values[high])
        return EDGES[low] + share * (EDGES[high] - EDGES[low])

    def _integral(self, t: float) -> float:
        """Integral of S from 0 to t."""
        i = bisect_right(EDGES, t) - 1
        if i >= BINS:
            return self._area[-1] + self._values[-1] * (t - HORIZON)
        high = self._values[i]
        return self._area[i] + high * (t - EDGES[i]) * _mean_of_decay(self.survival(t) / high)


class PointWait:
    """A wait whose length is known: what an oracle has."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = clean(seconds)

    def survival(self, t: float) -> float:
        return 1.0 if clean(t) < self._seconds else 0.0

    def conditional(self, elapsed: float, dt: float) -> float:
        return 1.0 if clean(elapsed) + clean(dt) >= self._seconds else 0.0

    def expected_hold(self, elapsed: float, tau: float) -> float:
        return min(max(self._seconds - clean(elapsed), 0.0), clean(tau))

    def quantile(self, q: float) -> float:
        return self._seconds if q > 0 else 0.0


def _mean_of_decay(ratio: float) -> float:
    """Mean of an exponential decay from 1 to `ratio` over its interval."""
    if ratio >= 1.0 - 1e-9:
        return 1.0 - (1.0 - ratio) / 2
    return (1.0 - ratio) / -math.log(ratio)


def through(knots: Sequence[tuple[float, float]]) -> Curve:
    """The curve through points (seconds, survival), straight in log-log; 1 before the first."""
    return Curve([_log_log(t, knots) for t in EDGES])


def _log_log(t: float, knots: Sequence[tuple[float, float]]) -> float:
    if t <= knots[0][0]:
        share = t / knots[0][0]
        return 1.0 + share * (knots[0][1] - 1.0)
    for (left, high), (right, low) in pairwise(knots):
        if t <= right:
            share = math.log(t / left) / math.log(right / left)
            return math.exp(math.log(high) + share * (math.log(low) - math.log(high)))
    return knots[-1][1]


def mixture(parts: Sequence[tuple[float, Curve]]) -> Curve:
    """The wait of somebody who is of kind i with chance weight i / sum of weights."""
    total = sum(weight for weight, _ in parts)
    if total <= 0:
        raise ValueError("a mixture needs a positive weight")
    columns = zip(*(curve.values for _, curve in parts), strict=True)
    weights = [weight / total for weight, _ in parts]
    return Curve([sum(w * s for w, s in zip(weights, column, strict=True)) for column in columns])


def longest(curves: Sequence[Curve]) -> Curve:
    """The wait for all of several independent ones: S = 1 - product of (1 - S_i)."""
    columns = zip(*(curve.values for curve in curves), strict=True)
    return Curve([1.0 - math.prod(1.0 - s for s in column) for column in columns])


def around(seconds: float, sharpness: float = 4.0) -> Curve:
    """A wait of about `seconds`: log-logistic, S(t) = 1 / (1 + (t / seconds)^sharpness).

    At sharpness 4, 88 % of it lies within a factor 2 around `seconds`.
    """
    middle = min(max(clean(seconds), FIRST), HORIZON)
    return Curve([1.0 / (1.0 + (t / middle) ** sharpness) for t in EDGES])


# Tool calls of Claude Code on SWE-bench Pro: P50 1.10 s, P90 2.03 s, P99 19.98 s, P99.95 83.6 s
# (n = 16,886; MORI, arXiv 2606.00866). Below the median and beyond P99.95 nothing is published: a
# spike near a second and a thin tail to hours are assumed.
TOOL_PRIOR = through(
    (
        (0.01, 0.99),
        (0.1, 0.93),
        (0.5, 0.78),
        (1.10, 0.5),
        (2.03, 0.1),
        (19.98, 0.01),
        (83.6, 5e-4),
        (3600.0, 1e-4),
        (HORIZON, 1e-6),
    )
)

# A user's pause. Published is a mean of 28.6 s for chat (InferCept, ICML 2024, table 1) and that 91 %
# of cached prefixes are read again within 60 s; the shape, and a tail to days, are assumed.
IDLE_PRIOR = through(
    (
        (0.1, 0.97),
        (1.0, 0.9),
        (5.0, 0.75),
        (15.0, 0.5),
        (60.0, 0.12),
        (3600.0, 0.02),
        (86400.0, 2e-3),
        (HORIZON, 1e-4),
    )
)
