"""The cost model of one step: how long will this plan take?

Linear in what a step consists of, with coefficients that are never negative, so that a larger
step is never predicted to be faster. Fitted from recorded steps, not from FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def pairs(start: int, count: int) -> int:
    """(query token, key token) pairs of a causal chunk of `count` tokens at position `start`."""
    return count * start + count * (count + 1) // 2


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step = fixed + per_row·rows + per_token·tokens + per_context·(pairs attended)."""

    fixed: float = 0.0
    per_row: float = 0.0  # per chunk in the plan
    per_token: float = 0.0  # per token row
    per_context: float = 0.0  # per (query token, key token) pair

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"cost model: {name} must not be negative")

    def step(self, chunks: Iterable[tuple[int, int]]) -> float:
        """What a step with these chunks, each (start, count), takes."""
        return self.fixed + sum(self.chunk(start, count) for start, count in chunks)

    def chunk(self, start: int, count: int) -> float:
        """What a chunk of `count` tokens at position `start` adds."""
        return self.per_row + self.per_token * count + self.per_context * pairs(start, count)

    def decodes(self, count: int, context: int) -> float:
        """What so many chunks of one token add, at positions that are `context` together."""
        return (self.per_row + self.per_token + self.per_context) * count + self.per_context * context

    def largest_chunk(self, start: int, most: int, budget: float) -> int:
        """The largest count ≤ most that adds at most `budget` seconds."""
        if self.chunk(start, most) <= budget:
            return most
        low, high = 0, most  # chunk(low) fits (or is 0), chunk(high) does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.chunk(start, middle) <= budget:
                low = middle
            else:
                high = middle
        return low
