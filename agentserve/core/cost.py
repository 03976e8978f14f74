"""The cost model of one step: how long will this plan take, and how long at worst?

Piecewise linear in what a step consists of, with coefficients that are never negative: a larger step is
never predicted to be faster, and no step jumps. Fitted from recorded steps, not from FLOPs. Everyone who
asks what computing costs asks this: scheduler, tier policy, simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from agentserve.core.plan import Plan
from agentserve.core.timing.features import StepLoad, pairs
from agentserve.core.timing.tally import EVERYTHING, Tally, Wanted, load_of_shape

__all__ = ["NEVER_LESS", "StepCost", "pairs"]

NEVER_LESS = 1.0  # the bound is at least the prediction


class StepCost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Seconds of a step: the sum of coefficients x features (`StepLoad`), times `pace`.

    `per_row`, `per_token` and `per_context` are of decodes and longer chunks alike; the others of what they
    name. `slopes[i]` is per token row between `knots[i]` and the next knot: weights are read once for all
    rows of a step, and from some number of rows on it is products that take the time.

    The bound is prediction x `ratio` + `extra`: what so many of 100 steps do not exceed, as fitted.
    """

    knots: tuple[int, ...] = ()  # token rows, ascending from 0
    slopes: tuple[float, ...] = ()
    fixed: float = 0.0
    per_row: float = 0.0  # per chunk in the plan
    per_token: float = 0.0  # per token row
    per_context: float = 0.0  # per (query token, key token) pair
    per_decode: float = 0.0
    per_chunk: float = 0.0
    per_chunk_token: float = 0.0
    per_seen: float = 0.0  # per token that a decode attends to
    per_read: float = 0.0  # per token that decodes fetch from memory
    per_pair: float = 0.0  # per pair of longer chunks
    per_reach: float = 0.0  # per token of context of a longer chunk
    per_sample: float = 0.0
    per_drawn: float = 0.0
    per_masked: float = 0.0
    per_copy: float = 0.0
    per_copied_byte: float = 0.0
    pace: float = 1.0  # how much slower this machine is than when the coefficients were fitted
    ratio: float = 1.0
    extra: float = 0.0  # seconds

    def __post_init__(self) -> None:
        # A refreshed model is made after every step, so the usual case is to be quick.
        numbers = msgspec.structs.astuple(self)[2:] + self.slopes
        if not (min(numbers) >= 0 and sum(numbers) < math.inf):
            raise ValueError(f"cost model: {self._wrong()} must be a number that is not negative")
        if len(self.knots) != len(self.slopes) or (
            self.knots and list(self.knots) != sorted({0, *self.knots})
        ):
            raise ValueError("cost model: knots ascend from 0, each with a slope")
        if self.ratio < NEVER_LESS or not self.pace:
            raise ValueError("cost model: ratio is at least 1, and pace is above 0")

    def _wrong(self) -> str:
        """The field with a number that is none, or negative."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not all(
                0 <= number < math.inf for number in (value if isinstance(value, tuple) else (value,))
            ):
                return name
        return "the sum"

    @property
    def bounded(self) -> bool:
        """Whether it was measured how far steps stray from what is predicted."""
        return self.ratio > NEVER_LESS or self.extra > 0

    @property
    def minds_copies(self) -> bool:
        return self.per_copy > 0 or self.per_copied_byte > 0

    @property
    def known(self) -> bool:
        """Whether anything was measured: without, every step is predicted to take no time."""
        return self.fixed > 0 or self.step([(0, 1)]) > 0

    # --- a step ------------------------------------------------------------------------------

    def predict(self, load: StepLoad) -> float:
        """What the step takes, in the middle: as many steps take longer as do not."""
        return self.pace * (
            self.fixed
            + self.per_row * (load.decodes + load.chunks)
            + self.per_token * (load.decodes + load.tokens)
            + self.per_context * (load.context + load.pairs)
            + self.per_decode * load.decodes
            + self.per_chunk * load.chunks
            + self.per_chunk_token * load.tokens
            + self.per_seen * load.context
            + self.per_read * load.read
            + self.per_pair * load.pairs
            + self.per_reach * load.reach
            + self.per_sample * load.samples
            + self.per_drawn * load.drawn
            + self.per_masked * load.masked
            + self.per_copy * load.copies
            + self.per_copied_byte * load.copied
            + (self._bent(load.rows) if self.slopes else 0.0)
        )

    def bound(self, load: StepLoad) -> float:
        """What the step hardly exceeds."""
        return self.at_worst(self.predict(load))

    def at_worst(self, predicted: float) -> float:
        """The bound of a step that is predicted to take so long."""
        return predicted * self.ratio + self.extra

    def _bent(self, rows: int) -> float:
        seconds, knots = 0.0, self.knots
        for number, slope in enumerate(self.slopes):
            if rows <= knots[number]:
                break
            end = min(rows, knots[number + 1]) if number + 1 < len(knots) else rows
            seconds += slope * (end - knots[number])
        return seconds

    # --- the inverse -------------------------------------------------------------------------

    def largest(self, tally: Tally, wanted: Wanted, budget: float) -> int:
        """The largest count, at most `wanted.most`, with which the step's bound is within `budget` seconds;
        0: there is none.

        Times are nearly linear in the count, so the line through the last two trials finds it in a few more;
        every third trial halves what is left.
        """

        def takes(count: int) -> float:
            sampling = wanted.sampling if count >= wanted.ending else None
            return self.bound(tally.with_chunk(wanted.start, count, sampling))

        most = wanted.most
        if most < 1 or (over := takes(most)) <= budget:
            return max(most, 0)
        if most == 1 or (under := takes(2)) > budget:
            return int(takes(1) <= budget)
        low, high = 2, most  # low fits, high does not
        before, last = (high, over), (low, under)
        for trial in range(high):
            if high - low == 1:
                break
            rise = (last[1] - before[1]) / (last[0] - before[0])
            if trial % 3 == 2 or rise <= 0:
                middle = (low + high) // 2
            else:
                middle = math.floor(last[0] + min(max((budget - last[1]) / rise, -most), most))
            middle = min(max(middle, low + 1), high - 1)
            before, last = last, (middle, takes(middle))
            if last[1] <= budget:
                low = middle
            else:
                high = middle
        return low

    def plan(self, plan: Plan) -> float:
        """What the plan takes."""
        if plan.load is not None:
            return self.predict(plan.load)
        return self.step((chunk.start, len(chunk.tokens)) for chunk in plan.chunks)

    # --- by shape ----------------------------------------------------------------------------

    def step(self, chunks: Iterable[tuple[int, int]]) -> float:
        """What a step with these chunks, each (start, count), takes; every layer attends to everything."""
        return self.predict(load_of_shape(tuple(chunks), EVERYTHING))

    @property
    def empty(self) -> float:
        """What a step with nothing in it takes."""
        return self.pace * self.fixed

    def chunk(self, start: int, count: int) -> float:
        """What a chunk adds to an empty step; every layer attends to everything. For looks ahead: beside
        others it adds another share of what rows cost."""
        if count == 1:
            return self.step([(start, 1)]) - self.empty
        return self.pace * (
            self.per_row
            + self.per_chunk
            + (self.per_token + self.per_chunk_token) * count
            + (self.per_context + self.per_pair) * pairs(start, count)
            + self.per_reach * (start + count)
            + self._bent(count)
        )

    def within(self, bound: float) -> float:
        """The prediction whose bound is `bound`; not below 0."""
        return max(bound - self.extra, 0.0) / self.ratio

    def prefill_line(self, chunk: int) -> tuple[float, float, float]:
        """(fixed, per token, per pair) of a long prefill in steps of `chunk` tokens, as tiers' prices."""
        # A chunk reads its context once, and has so many pairs for each token of it.
        per_pair = self.pace * (self.per_context + self.per_pair + self.per_reach / chunk)
        step = self.step([(0, chunk)])
        return self.pace * self.fixed, max(step - per_pair * pairs(0, chunk), 0.0) / chunk, per_pair
