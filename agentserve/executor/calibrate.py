"""How long a step takes on this machine: made-up plans through the real executor, and a fit.

The plans span what a step consists of: one row and several, small and large chunks, near the
beginning of a context and far into it. They write into pages that nobody uses yet.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec
import numpy as np
import numpy.typing as npt

from agentserve.core.cost import StepCost, pairs
from agentserve.core.plan import Chunk, Plan, SampleSpec
from agentserve.core.ports import Executor
from agentserve.types import Sampling, SessionId, TurnId

Shape = tuple[tuple[int, int], ...]
"""A plan as its chunks: (start, count) each."""

LARGE, SMALL, FAR = 512, 64, 8192  # tokens
RUNS = 3
CAUTION = 1.2  # bound / prediction, at least
INCAUTION = 2.0  # and at most: a run that was interrupted is no measure of the others


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan's shape and the seconds it took."""

    shape: Shape
    seconds: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the made-up plans must keep to. `pages`: of the smallest KV group."""

    groups: int
    pages: int
    page_size: int
    positions: int
    rows: int
    tokens: int
    vocab_size: int

    @property
    def largest(self) -> int:
        """Tokens of the largest chunk: whole pages, unless not even one is allowed."""
        most = min(LARGE, self.tokens, self.positions - 1, self.pages * self.page_size)
        return max(1, most // self.page_size * self.page_size or most)


def measure_cost(executor: Executor, bounds: Bounds) -> StepCost:
    """The cost model of `executor`. Takes some seconds; raises ValueError if a plan fails.

    Each plan counts with the median of `RUNS` runs, after one whose time does not count. So few runs say
    little of how far steps stray: the bound is what the worst of them needs, and no less than `CAUTION`.
    """
    shapes = plan_shapes(bounds)
    for shape in shapes:  # the first one writes the pages that the others read
        _run(executor, shape, bounds)
    runs = [(shape, [_run(executor, shape, bounds) for _ in range(RUNS)]) for shape in shapes]
    cost = fit([Timed(shape, statistics.median(seconds)) for shape, seconds in runs])
    worst = max(max(seconds) / max(cost.step(shape), 1e-9) for shape, seconds in runs)
    return msgspec.structs.replace(cost, ratio=min(max(worst, CAUTION), INCAUTION))


def plan_shapes(bounds: Bounds) -> list[Shape]:
    """Plans that tell the four coefficients apart, as far as the bounds allow; the largest chunk first."""
    size, large = bounds.page_size, bounds.largest
    small = min(SMALL, max(1, large // 4))
    far = max(0, min(FAR, bounds.positions) - small) // size * size
    rows = max(1, min(8, bounds.rows, bounds.tokens - small))
    near = ((small, 1),) if small < bounds.positions else ((0, 1),)
    shapes: list[Shape] = [
        ((0, large),),
        ((0, small),),
        ((0, max(1, large // 2)),),
        ((far, small),),
        ((far, 1),),
        near,
        near * rows,
        (*near * (rows - 1), (0, small)),
    ]
    return list(dict.fromkeys(shapes))


def fit(times: Sequence[Timed]) -> StepCost:
    """The coefficients, none negative, with the least squared relative errors.

    There are four, so every choice of those that are not zero is tried: what an active-set method
    (Lawson and Hanson 1974) would search for.
    """
    rows = np.array([_terms(timed.shape) for timed in times], dtype=np.float64)
    seconds = np.array([max(timed.seconds, 1e-9) for timed in times])
    scale = np.maximum(rows.max(axis=0), 1.0)
    relative = rows / scale / seconds[:, None]
    best, least = np.zeros(4), np.inf
    for count in range(1, 5):
        for columns in combinations(range(4), count):
            found, *_ = np.linalg.lstsq(relative[:, columns], np.ones(len(times)), rcond=None)
            error = float(np.square(relative[:, columns] @ found - 1.0).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(4), error
                best[list(columns)] = found
    fixed, per_row, per_token, per_context = (best / scale).tolist()
    return StepCost(fixed=fixed, per_row=per_row, per_token=per_token, per_context=per_context)


def _terms(shape: Shape) -> npt.NDArray[np.float64]:
    tokens = sum(count for _, count in shape)
    return np.array([1, len(shape), tokens, sum(pairs(start, count) for start, count in shape)], np.float64)


def _run(executor: Executor, shape: Shape, bounds: Bounds) -> float:
    chunks = tuple(_chunk(number, start, count, bounds) for number, (start, count) in enumerate(shape))
    result = executor.run(Plan(0, (), chunks, 0.0, ()))
    for chunk in result.chunks:
        if chunk.error:
            raise ValueError(f"the cost of a step cannot be measured: {chunk.error}")
    return result.seconds


def _chunk(number: int, start: int, count: int, bounds: Bounds) -> Chunk:
    """A chunk that samples greedily. Contexts longer than the written pages read those again and again."""
    size = bounds.page_size
    written = max(1, bounds.largest // size)
    table = array("i", [block % written for block in range(-(-(start + count) // size))])
    tokens = array("i", [(position * 31 + 7) % bounds.vocab_size for position in range(count)])
    sample = SampleSpec(Sampling(temperature=0.0), tokens, count, count)
    return Chunk(SessionId(f"cost-{number}"), TurnId(1), 0, start, tokens, (table,) * bounds.groups, sample)
