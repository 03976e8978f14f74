"""A policy that does what a benchmark says: every session's KV is where it is wanted, and stays there."""

from __future__ import annotations

import math

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.types import Tier


class SteeredPolicy:
    name = "steered"
    eager = False

    def __init__(self) -> None:
        self.choice = Choice.HOLD  # for every session that is asked about

    def parked(self, park: Park) -> None: ...

    def resumed(self, session: str, at: float, waited: float) -> None: ...

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None: ...

    def gone(self, session: str, at: float, why: Departure) -> None: ...

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        return Decision(self.choice, math.inf, "the benchmark says so")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return 1.0

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)
