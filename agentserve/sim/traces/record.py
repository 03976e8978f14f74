"""What became of a turn, and sums over many."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentserve.types import FinishReason


class Played(msgspec.Struct, frozen=True):
    """One ended turn; times in seconds of the clock it was played by.

    `fresh` is how many prompt tokens nobody could have had KV of; what was computed beyond it and the
    generated tokens was computed again.
    """

    session: str
    turn: int
    resumed: bool  # it continues a session; false: its first turn, or one after a compaction
    reason: FinishReason
    arrived: float
    first_token: float
    ended: float
    prompt: int
    cached: int
    computed: int
    generated: int
    fresh: int
    preemptions: int

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived

    @property
    def recomputed(self) -> int:
        return max(0, self.computed - max(0, self.generated - 1) - self.fresh)


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
