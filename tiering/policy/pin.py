"""Pin until resumed: a session that waits on a tool stays on the device, whatever it costs.

What hard pins and streaming sessions of servers did (SGLang's pull request 18941, reverted by 21884),
with the one change without which they wedge: the pin is revocable once nothing else is left.
"""

from __future__ import annotations

import math

import msgspec

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Rest, Signal
from tiering.policy.known_sessions import KnownSessions
from tiering.policy.lru import copy_below
from tiering.types import Tier

PINNED = 1e12  # beyond any time: a pinned block is worth more than one that is not


class PinParameters(msgspec.Struct, frozen=True):
    idle: bool = False  # whether sessions that wait for their user are pinned too


class PinPolicy:
    name = "pin"
    eager = False

    def __init__(self, parameters: PinParameters | None = None) -> None:
        self.parameters = parameters or PinParameters()
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
        if self._known.at_rest(session) is None:
            return Decision(Choice.DROP, math.inf, "unknown")
        if self._pinned(session):
            return Decision(Choice.HOLD, math.inf, "pinned")
        return Decision(copy_below(market), math.inf, "not on a tool")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        entry = self._known.get(session)
        if entry is None:
            return -math.inf
        return entry.touched + (PINNED if self._pinned(session) else 0.0)

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)

    def _pinned(self, session: str) -> bool:
        entry = self._known.at_rest(session)
        if entry is None or entry.gone is not None:
            return False
        return entry.park.rest is Rest.TOOL or (self.parameters.idle and entry.park.rest is Rest.IDLE)
