"""Least recently used, in every tier, first come first served: what a server without sessions does.

Every block of a session that comes to rest is copied below, so that its pages can be taken without
loss: to the host slab, or through it to disk once the slab is full. This is also what `PricedPolicy`
is measured against while it runs.
"""

from __future__ import annotations

import math

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.policy.ledger import Ledger
from tiering.types import Tier


class LruPolicy:
    name = "lru"

    def __init__(self) -> None:
        self._ledger = Ledger()

    def parked(self, park: Park) -> None:
        self._ledger.parked(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self._ledger.resumed(session, at)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        self._ledger.gone(session, why)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        if self._ledger.at_rest(session) is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        return Decision(copy_below(residency.device - residency.copied, market), math.inf, "at rest")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry = self._ledger.get(session)
        return entry.touched if entry is not None else -math.inf

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)


def copy_below(blocks: int, market: Market) -> Choice:
    """Where to copy `blocks` blocks so that nothing is lost: the fastest tier with room for them."""
    if market.disk > 0 and blocks > market.host_free:
        return Choice.DISK
    return Choice.HOST if market.host > 0 else Choice.HOLD
