"""Least recently used, in every tier, first come first served: what a server without sessions does.

Every block of a session that comes to rest is copied below at once, into every tier that there is, so
that its pages can be taken without loss (as vLLM's and SGLang's offloading do). Sessions that nobody is
expected back to go first. `PricedPolicy` is measured against this while it runs.
"""

from __future__ import annotations

import math

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.policy.known_sessions import KnownSessions
from tiering.types import Tier


class LruPolicy:
    name = "lru"
    eager = True

    def __init__(self) -> None:
        self._known = KnownSessions()

    def parked(self, park: Park) -> None:
        self._known.parked(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self._known.resumed(session, at)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._known.gone(session, why)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        entry = self._known.at_rest(session)
        if entry is None or entry.gone is not None:
            return Decision(Choice.DROP, math.inf, "nobody is expected back")
        return Decision(copy_below(market), math.inf, "at rest")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry = self._known.get(session)
        return entry.touched if entry is not None and entry.gone is None else 0.0

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)


def copy_below(market: Market) -> Choice:
    """Copies in every tier that there is."""
    if market.disk > 0:
        return Choice.DISK
    return Choice.HOST if market.host > 0 else Choice.HOLD
