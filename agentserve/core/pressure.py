"""Preemption: who is taken when pages lack, which way, and what became of it (the rule: `core/victims.py`).

Pages are had at once: the victim lets go of them, and who needs one takes it from the tail of what is idle,
whatever becomes of the rest. What is to be moved out is copied beside the steps that follow and goes without
loss from then on (`core/spill.py`), so nobody waits for a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentserve.core.kv import KVManager
from agentserve.core.lengths import Lengths
from agentserve.core.quotes import Quotes
from agentserve.core.scheduling.policy import Ran
from agentserve.core.session import Session
from agentserve.core.victims import Candidate, Offer, Way, Why, cheapest, choose, shortage
from agentserve.messages import PreemptionCounts
from agentserve.types import SessionId

EXAMINED = 8  # turns that prices are asked for, from the last on
FADE = 16  # steps over which their length is averaged
NO_TIME = 1e-6  # seconds of a step that nothing is known of


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a victim is dealt with here. asks: pages that another worker would need for it; 0: it stays."""

    why: Why
    way: Way | None  # None: as the tier policy says
    seconds: float = 0.0
    asks: int = 0


class Ends(NamedTuple):
    """When those who run are likely to end, in tokens that they will write."""

    turns: int
    session: SessionId  # that ends first
    first: float
    second: float


class Pressure:
    def __init__(self, kv: KVManager, quotes: Quotes, *, by_price: bool) -> None:
        """by_price: else who stands last goes, and the tier policy says how, as in the systems that a policy
        is named after."""
        self.quotes = quotes
        self.elsewhere = 0  # pages that another worker of the machine has for a turn
        self.lengths = Lengths()
        self._kv = kv
        self._by_price = by_price
        self._spoken_for = 0  # of these: by turns that were taken since the last step
        self._pace = 0.0
        self._lefts: dict[SessionId, float] = {}  # as they were reckoned since the last step
        self._chosen: Candidate | None = None  # who is about to be judged, if the price chose
        self._verdicts: dict[SessionId, Verdict] = {}
        self._made: dict[str, dict[str, int]] = {}
        self._asked = 0
        self._migrated = 0

    def stepped(self, ran: Sequence[Ran], seconds: float) -> None:
        """A step took so long, and did this; nothing of it has been booked yet."""
        self.quotes.stepped([(each.session.computed, each.read) for each in ran if each.read], seconds)
        self._spoken_for = 0
        self._lefts.clear()
        self._pace += (seconds - self._pace) / FADE if self._pace else seconds

    # --- whom ------------------------------------------------------------------------------

    def victim(self, among: Sequence[Session], running: Sequence[Session]) -> Session:
        """among: who may go, the last last; at least one. None stands before whoever needs the pages."""
        last = among[-1]
        if not self._by_price:
            return last
        alike = [session for session in among if _class(session) == _class(last)][-EXAMINED:]
        if len(alike) == 1:
            return last
        ends = self._ends(running)
        self._chosen = choose([self._candidate(session, ends) for session in alike])
        return next(session for session in alike if session.id == self._chosen.session)

    def judge(self, victim: Session, running: Sequence[Session], why: Why) -> None:
        """It is about to be preempted. Ask before it lets go of its pages."""
        if not self._by_price:
            self._verdicts[victim.id] = Verdict(why, None)
            return
        candidate, self._chosen = self._chosen, None
        if candidate is None or candidate.session != victim.id:
            candidate = self._candidate(victim, self._ends(running))
        best, asks = cheapest(candidate.offers), 0
        if best.way is Way.MIGRATE:
            asks = self._needed(victim)
            self._spoken_for += asks
            best = cheapest([offer for offer in candidate.offers if offer.way is not Way.MIGRATE])
        self._verdicts[victim.id] = Verdict(why, best.way, best.seconds, asks)

    def wish(self, waits: Session, running: Sequence[Session]) -> int:
        """Pages that another worker would need for a turn that waits since it was preempted; 0: it has not so
        many, or to begin there again takes as long as to wait here."""
        needed, wait = self._needed(waits), self._ends(running).first * self._seconds
        if needed > self.elsewhere or self.quotes.elsewhere(waits) >= wait:
            return 0
        self._asked += 1
        return needed

    def take(self, session: SessionId) -> Verdict:
        """What was judged; told once."""
        return self._verdicts.pop(session)

    # --- what it costs ---------------------------------------------------------------------

    @property
    def _seconds(self) -> float:
        return max(self._pace, NO_TIME)

    def _ends(self, running: Sequence[Session]) -> Ends:
        """The first turn to end, and how far away that and the next end are."""
        known = self._lefts
        for session in running:
            if session.id not in known:
                known[session.id] = self._left(session)
        lefts = [known[session.id] for session in running]
        soonest, *others = heapq.nsmallest(2, range(len(lefts)), key=lefts.__getitem__)
        second = lefts[others[0]] if others else 1.0
        return Ends(len(lefts), running[soonest].id, lefts[soonest], second)

    def _left(self, session: Session) -> float:
        turn = session.running_turn
        most = turn.limit - len(session.tokens)
        return self.lengths.left(session.tenant, session.generated, most)

    def _candidate(self, session: Session, ends: Ends) -> Candidate:
        kv = self._kv
        first_end = ends.second if session.id == ends.session else ends.first
        lack = shortage(ends.turns - 1, first_end, kv.page_size)
        scarcest = min(range(len(kv.pools)), key=lambda group: kv.pools[group].available)
        freed = kv.freed(session.id, lack.pages)[scarcest]
        first = kv.blocks_of(session.id) - freed if kv.prefix_cache else 0
        offers = self._offers(session, first, lack.steps * self._seconds)
        return Candidate(session.id, freed, lack.pages, session.running_turn.preemptions, offers)

    def _offers(self, session: Session, first: int, wait: float) -> tuple[Offer, ...]:
        redo = self.quotes.recompute(session, first)
        offers = [Offer(Way.RECOMPUTE, wait + redo)]
        swap = self.quotes.swap(session, first, redo)
        if swap is not None:
            offers.append(Offer(Way.SWAP, wait + swap))
        if self._needed(session) <= self.elsewhere - self._spoken_for:
            offers.append(Offer(Way.MIGRATE, self.quotes.elsewhere(session)))
        return tuple(offers)

    def _needed(self, session: Session) -> int:
        """Pages for it to come to its end."""
        return -(-(len(session.tokens) + int(self._left(session))) // self._kv.page_size)

    # --- figures ---------------------------------------------------------------------------

    def count(self, why: Why, way: Way, *, asked: bool) -> None:
        made = self._made.setdefault(why.value, {})
        made[way.value] = made.get(way.value, 0) + 1
        self._asked += asked

    def migrated(self) -> None:
        """Another worker goes on with a turn."""
        self._migrated += 1

    def counts(self, swapped: int = 0, returned: int = 0) -> PreemptionCounts:
        made = {why: dict(ways) for why, ways in self._made.items()}
        return PreemptionCounts(made, swapped, returned, self._asked, self._migrated)


def _class(session: Session) -> tuple[str, int]:
    """Of whose turns the price may choose: those of one tenant that are equally urgent."""
    return session.tenant, session.running_turn.rank[0]
