"""In which order prompts are read that were begun, and what a long one leaves to turns in line.

The order is that of their promises, across tenants: whose turn enters is a matter of shares, and what has
entered holds a seat and pages until it ends. Who cannot be in time any more has no claim before others.
"""

from __future__ import annotations

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
        mine = self.read_by(session, session.computed, now)
        asking: list[tuple[Place, float]] = []  # with what it takes
        sooner: list[tuple[Place, float]] = []
        for place in waiting:
            other, start = place.session, len(place.session.tokens) - place.lacking
            if not place.lacking or not (place.short or other.tenant == session.tenant):
                continue
            takes = self._cost.chunk(start, place.lacking)
            if place.short:
                asking.append((place, takes))
            if self._cost.known and self._goes_before(other, takes, mine, now):
                sooner.append((place, takes))
        share, asking = (1.0, sooner) if sooner else (0.5, asking)
        tokens = min(
            sum(place.lacking for place, _ in asking),
            round(share * draft.tokens),
            draft.tokens - self._config.page_size,
        )
        if draft.seconds is None or not asking:
            return max(tokens, 0), 0.0
        left = draft.seconds - self._cost.bound(draft.tally.load())
        needed = self._cost.at_worst(sum(takes for _, takes in asking))
        return max(tokens, 0), max(min(needed, share * left), 0.0)

    def _goes_before(self, session: Session, takes: float, moment: float, now: float) -> bool:
        """Whether a prompt in line should be read before one that should be at `moment`. Who cannot be in
        time any more has no claim to it."""
        turn = session.running_turn
        if now + takes > self._time.wanted_by(turn, takes):
            return False
        return self._time.read_by(turn, takes, now) < moment

    def read_by(self, session: Session, start: int, now: float) -> float:
        """When the rest of its prompt from `start` on should begin to be read. Where nobody knows what steps
        take, those that one step can end go before the others for as long as is bearable."""
        turn, lacking = session.running_turn, len(session.tokens) - start
        if self._cost.known:
            return self._time.read_by(turn, self._cost.chunk(start, lacking), now)
        return float(lacking > self._config.max_batched_tokens and now - turn.arrived < PATIENCE)
