"""In which order prompts are read that were begun, and what a long one leaves to turns in line.

The order is that of their promises, across tenants: whose turn enters is a matter of shares, and what has
entered holds a seat and pages until it ends. Who cannot be in time any more has no claim before others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agentserve.core.admission import Place
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Draft, Times
from agentserve.core.scheduling.policy import Form
from agentserve.core.scheduling.registry import PATIENCE
from agentserve.core.session import Session
from agentserve.core.timekeeper import Timekeeper


class Reading:
    def __init__(
        self,
        config: CoreConfig,
        form: Form,
        times: Times,
        time: Timekeeper,
        lacking: Callable[[Session], int],
    ) -> None:
        """lacking: tokens of a waiting session that must be computed."""
        self._config = config
        self._form = form
        self._times = times
        self._time = time
        self._lacking = lacking

    @property
    def _cost(self) -> StepCost:
        return self._times.cost

    def kept(self, session: Session, waiting: Sequence[Place], draft: Draft, now: float) -> tuple[int, float]:
        """Tokens and seconds of this step that a long prompt leaves to turns in line: what those need that
        should be read sooner, but for a page; else no more than half of what there is, for short ones."""
        starts = [(place, len(place.session.tokens) - place.lacking) for place in waiting if place.lacking]
        mine = self.read_by(session, session.computed, now) if starts and self._cost.known else -math.inf
        sooner = [
            each
            for each in starts
            if self.read_by(each[0].session, each[1], now) < mine
            and self._in_time(each[0].session, each[1], now)
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

    def is_later(self, lagging: Sequence[Session], now: float) -> Callable[[Session], bool] | None:
        """Whether a long prompt in line would be read, in time, only after one that was begun; None: there is
        none."""
        step = self._config.max_batched_tokens
        if not (self._form.short_first and self._cost.known):
            return None
        begun = [s for s in lagging if s.lag > step and self._in_time(s, s.computed, now)]
        if not begun:
            return None
        soonest = min(self.read_by(session, session.computed, now) for session in begun)

        def is_later(session: Session) -> bool:
            lacking = self._lacking(session)
            start = len(session.tokens) - lacking
            if lacking <= step or self.read_by(session, start, now) < soonest:
                return False
            return self._in_time(session, start, now)

        return is_later

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
