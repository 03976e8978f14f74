"""The cost model fitted to recorded steps.

Of every five stretches of steps three are fitted to, one gives the bound, and one is held out: what the
report says was measured on steps that nothing was fitted to. Coefficients minimise the sum of
|predicted - measured| / measured and are never negative: non-negative least squares (Lawson and Hanson 1974),
weighted anew a few times, so that a step that was interrupted counts by its distance and not by the square of
it. Pure; numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from agentserve.core.cost import StepCost
from agentserve.core.timing.features import StepLoad

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

QUANTILE = 0.99
LEAST_STEPS = 500  # a fifth of them bounds: that 99 of 100 keep to it is seen in no fewer than 100
STRETCH = 16  # steps that stay together: neighbours are much alike, and would be a test of memory
KNOTS = (0, 8, 32, 128, 512, 2048, 8192)
ROUNDS = 12  # of weighting anew
NEAR = 0.01  # relative errors below count as this: what is smaller is noise

TERMS: tuple[tuple[str, Callable[[StepLoad], float]], ...] = (
    ("fixed", lambda load: 1.0),
    ("per_decode", lambda load: load.decodes),
    ("per_chunk", lambda load: load.chunks),
    ("per_seen", lambda load: load.context),
    ("per_read", lambda load: load.read),
    ("per_pair", lambda load: load.pairs),
    ("per_reach", lambda load: load.reach),
    ("per_sample", lambda load: load.samples),
    ("per_drawn", lambda load: load.drawn),
    ("per_masked", lambda load: load.masked),
    ("per_copy", lambda load: load.copies),
    ("per_copied_byte", lambda load: load.copied),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """A step's features and the seconds it took."""

    load: StepLoad
    seconds: float


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How well a model predicts some steps. Errors are |predicted - measured| / measured."""

    steps: int
    mape: float
    median: float
    p95: float
    exceeded: float  # share of steps that took longer than the bound
    width: float  # bound / prediction, on average


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    cost: StepCost
    steps: int
    inside: Quality  # on the steps that the coefficients were fitted to
    held_out: Quality
    unseen: tuple[str, ...]  # features that no step had: what they cost is not known, and taken to be nothing


def fit(steps: Sequence[Timed], quantile: float = QUANTILE) -> Fitted:
    """Raises ValueError, in one line, if there are too few steps to fit, bound and check."""
    steps = [step for step in steps if np.isfinite(step.seconds) and step.seconds > 0]
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{len(steps)} steps are too few for a fit: {LEAST_STEPS} are needed")
    parts: tuple[list[Timed], list[Timed], list[Timed]] = ([], [], [])
    for number, step in enumerate(steps):
        parts[(0, 1, 0, 2, 0)[number // STRETCH % 5]].append(step)
    fitted, bounding, held_out = parts
    cost = bounded(coefficients(fitted), bounding, quantile)
    return Fitted(
        cost=cost,
        steps=len(steps),
        inside=quality(cost, fitted),
        held_out=quality(cost, held_out),
        unseen=tuple(name for name, term in TERMS if not any(term(step.load) for step in steps)),
    )


def coefficients(steps: Sequence[Timed]) -> StepCost:
    """The coefficients with the least relative errors; no bound."""
    most = max(step.load.rows for step in steps)
    knots = tuple(knot for knot in KNOTS if knot < most) or (0,)
    inputs = np.array([features(step.load, knots) for step in steps], np.float64)
    seconds = np.array([step.seconds for step in steps])
    scale = np.maximum(inputs.max(axis=0), 1e-300)
    relative = inputs / scale / seconds[:, None]
    weights, found = np.ones(len(steps)), np.zeros(inputs.shape[1])
    for _ in range(ROUNDS):
        found = nonnegative(relative * weights[:, None], weights)
        errors = np.abs(relative @ found - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(errors, NEAR))
    found = found / scale
    named = {name: float(value) for (name, _), value in zip(TERMS, found, strict=False)}
    return StepCost(**named, knots=knots, slopes=tuple(found[len(TERMS) :].tolist()))


def features(load: StepLoad, knots: Sequence[int]) -> list[float]:
    """What the coefficients stand for: terms, then token rows between knots."""
    ends = [*knots[1:], max(load.rows, knots[-1])]
    bent = [min(max(load.rows - start, 0), end - start) for start, end in zip(knots, ends, strict=True)]
    return [term(load) for _, term in TERMS] + [float(rows) for rows in bent]


def nonnegative(inputs: Matrix, wanted: Vector) -> Vector:
    """x >= 0 with the least |inputs @ x - wanted|: the active-set method of Lawson and Hanson."""
    columns = inputs.shape[1]
    square, target = _reduced(inputs, wanted)  # what follows solves it again and again
    found, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    enough = 1e-10 * max(float(np.abs(square.T @ target).max(initial=0.0)), 1e-300)
    for _ in range(3 * columns):
        slope = square.T @ (target - square @ found)
        slope[free] = -np.inf
        if free.all() or slope.max() <= enough:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(square[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                found = trial
                break
            # As far towards it as nothing becomes negative; what is 0 then is out.
            gaps = found[negative] - trial[negative]
            shares = np.divide(found[negative], gaps, out=np.zeros_like(gaps), where=gaps > 0)
            found = found + float(shares.min()) * (trial - found)
            free &= found > 1e-14 * max(float(found.max()), 1e-300)
            found[~free] = 0.0
    return np.maximum(found, 0.0)


def _reduced(inputs: Matrix, wanted: Vector, rows: int = 64) -> tuple[Matrix, Vector]:
    """A square system with the same least squares, by QR of `rows` rows at a time: matrices so small that no
    library calls its threads together for them, which takes ten times as long where cores are busy."""
    both = np.column_stack([inputs, wanted])
    reduced = both[:0]
    for start in range(0, len(both), rows):
        _, reduced = np.linalg.qr(np.concatenate([reduced, both[start : start + rows]]))
    return reduced[:, :-1], reduced[:, -1]


# --- the bound ---------------------------------------------------------------------------------


def bounded(cost: StepCost, steps: Sequence[Timed], quantile: float = QUANTILE) -> StepCost:
    """`cost` with the narrowest bound, ratio x predicted + extra, that `quantile` of steps keep to.

    Short steps stray by a constant (whatever else the machine does), long ones by a share: of several
    constants the one is taken with which bounds are the narrowest on average, among those that neither the
    shortest, the middle nor the longest third of steps exceeds more than twice as often as it may.
    """
    predicted = np.array([cost.predict(step.load) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    over = np.maximum(seconds - predicted, 0.0)
    extras = [0.0, *np.quantile(over, [0.25, 0.5, 0.75, 0.9, 0.95, quantile]).tolist()]
    thirds = np.array_split(np.argsort(predicted, kind="stable"), 3)
    best: tuple[bool, float, float, float] | None = None
    for extra in extras:
        ratio = max(1.0, _order_statistic((seconds - extra) / predicted, quantile))
        bound = ratio * predicted + extra
        missed = max(float((seconds[third] > bound[third]).mean()) for third in thirds)
        uneven = missed > 2 * (1 - quantile)
        candidate = (uneven, float((bound / predicted).mean()), ratio, extra)
        best = candidate if best is None else min(best, candidate)
    assert best is not None
    return msgspec.structs.replace(cost, ratio=best[2], extra=best[3])


def _order_statistic(values: Vector, quantile: float) -> float:
    """The smallest value that a share `quantile` of as many values again will not exceed, on average: that of
    rank (n + 1) x quantile (split conformal prediction)."""
    rank = min(int(np.ceil((len(values) + 1) * quantile)), len(values))
    return float(np.sort(values)[rank - 1])


def quality(cost: StepCost, steps: Sequence[Timed]) -> Quality:
    predicted = np.array([cost.predict(step.load) for step in steps])
    bounds = np.array([cost.bound(step.load) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    return judged(predicted, bounds, seconds)


def judged(predicted: Vector, bounds: Vector, seconds: Vector) -> Quality:
    """Of predictions that were made, as steps ran. All in one unit."""
    errors = np.abs(predicted - seconds) / seconds
    return Quality(
        steps=len(seconds),
        mape=float(errors.mean()),
        median=float(np.median(errors)),
        p95=float(np.quantile(errors, 0.95)),
        exceeded=float((seconds > bounds).mean()),
        width=float((bounds / np.maximum(predicted, 1e-12)).mean()),
    )
