"""What clients say about their waits, from honest to hostile.

A hint is raw: it is what a client would send, not what the server makes of it. Noise is log-normal
because predictions of durations err by factors; noise of a quarter was enough to make a published
system slower than one without prediction (TokenCake, arXiv 2510.18586).
"""

from __future__ import annotations

import math
import random
from enum import Enum

import msgspec

NEVER = 1e300  # seconds: "I shall not come back"
AT_ONCE = 0.001
HONEST_LIMIT = 3600.0  # seconds: who knows that nobody will come back says an hour


class HintMix(Enum):
    """Which clients there are. MIXED has some of each, as a server open to everybody would."""

    NONE = "none"
    HONEST = "honest"  # the true wait
    NOISY = "noisy"  # the true wait times exp(N(0, 1))
    WRONG = "wrong"  # another call's wait: right on the whole, uncorrelated with the truth
    HOSTILE = "hostile"  # "at once" after every call, "never", or no number at all
    MIXED = "mixed"


class RawHint(msgspec.Struct, frozen=True):
    """What a client says when a turn of its ends in tool calls."""

    expected_wait: float | None = None  # seconds; anything a float can be
    priority: int = 0


class Teller:
    """One agent's way to hint; drawn once, since a client that lies does so all the time."""

    def __init__(self, mix: HintMix, rng: random.Random) -> None:
        if mix is HintMix.MIXED:
            mix = rng.choice([each for each in HintMix if each is not HintMix.MIXED])
        self.mix = mix
        self._lie = rng.choice([AT_ONCE, NEVER, math.nan])

    def hint(self, wait: float, other: float, rng: random.Random) -> RawHint | None:
        """About a wait of `wait` seconds (inf: nobody comes back); `other` is that of an unrelated call."""
        match self.mix:
            case HintMix.HONEST:
                return RawHint(min(wait, HONEST_LIMIT))
            case HintMix.NOISY:
                return RawHint(min(wait, HONEST_LIMIT) * rng.lognormvariate(0.0, 1.0))
            case HintMix.WRONG:
                return RawHint(other)
            case HintMix.HOSTILE:
                return RawHint(self._lie, priority=1_000_000)
            case _:
                return None
