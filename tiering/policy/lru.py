"""The plain policy: every block of a session at rest is copied down at once; the least recently used go
first in every tier; turns are admitted first come, first served. What vLLM's and SGLang's offloading do."""

from __future__ import annotations

import math

from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Park, Residency, Signal
from tiering.types import Tier


class LruPolicy:
    name = "lru"

    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # when each session was last at work
        self._left: set[str] = set()

    def parked(self, park: Park) -> None:
        self._used[park.session] = park.at
        self._left.discard(park.session)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self._used[session] = at
        self._left.discard(session)

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        pass

    def gone(self, session: str, at: float, why: Departure) -> None:
        if why is Departure.FINISHED:
            self._used.pop(session, None)
            self._left.discard(session)
        elif session in self._used:
            self._left.add(session)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        if session not in self._used or session in self._left:
            return Decision(Choice.DROP, math.inf, "nobody is expected back")
        if market.disk:
            return Decision(Choice.DISK, math.inf, "copied down when it parks")
        if market.host:
            return Decision(Choice.HOST, math.inf, "copied down when it parks")
        return Decision(Choice.HOLD, math.inf, "there is no tier below")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return 0.0 if session in self._left else self._used.get(session, 0.0)

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (arrived,)
