"""In which order prompts are read that were begun, and what a long one leaves to turns in line.

The order is that of their promises, across tenants: whose turn enters is a matter of shares, and what has
entered holds a seat and pages until it ends. Who cannot be in time any more has no claim before others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentserve.core.admission import Place
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Draft, Times
from agentserve.core.scheduling.registry import PATIENCE
from agentserve.core.session import Session
from agentserve.core.timekeeper import Timekeeper


class Reading:
    def __init__(self, config: CoreConfig, times: Times, time: Timekeeper) -> None:
        self._config = config
        self._times = times
        self._time = time

    @property
    def _cost(self) -> StepCost:
        return self._times.cost

    def kept(self, session: Session, waiting: Sequence[Place], draft: Draft, now: float) -> tuple[int, float]:
        """Tokens and seconds of this step that a long prompt leaves to turns in line: what those need that
        should be read sooner and are short or of its own tenant, but for a page; else no more than half of
        what there is, for short ones. (Long ones of others come by their tenants' shares.)"""
        starts = [(place, len(place.session.tokens) - place.lacking) for place in waiting if place.lacking]
        mine = self.read_by(session, session.computed, now) if starts and self._cost.known else -math.inf
        sooner = [
            each
            for each in starts
            if self.read_by(each[0].session, each[1], now) < mine
            and self._in_time(each[0].session, each[1], now)
            and (each[0].short or each[0].session.tenant == session.tenant)
        ]
        share = 1.0 if sooner else 0.5
        asking = sooner or [each for each in starts if each[0].short]
        tokens = min(
            sum(place.lacking for place, _ in asking),
            round(share * draft.tokens),
            draft.tokens - self._config.page_size,
        )
        if draft.seconds is None or not asking:
            return max(tokens, 0), 0.0
        left = draft.seconds - self._cost.bound(draft.tally.load())
        needed = sum(self._cost.chunk(start, place.lacking) for place, start in asking)
        return max(tokens, 0), max(min(self._cost.at_worst(needed), share * left), 0.0)

    def _in_time(self, session: Session, start: int, now: float) -> bool:
        """Whether its prompt can still be read in time, from `start` on. Who cannot has no claim to go before
        another tenant's turns."""
        takes = self._cost.chunk(start, len(session.tokens) - start)
        return now + takes <= self._time.wanted_by(session.running_turn, takes)

    def read_by(self, session: Session, start: int, now: float) -> float:
        """When the rest of its prompt from `start` on should begin to be read. Where nobody knows what steps
        take, those that one step can end go before the others for as long as is bearable."""
        turn, lacking = session.running_turn, len(session.tokens) - start
        if self._cost.known:
            return self._time.read_by(turn, self._cost.chunk(start, lacking), now)
        return float(lacking > self._config.max_batched_tokens and now - turn.arrived < PATIENCE)
