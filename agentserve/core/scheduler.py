"""The scheduler: owner of the queues; writes one plan per step, in the order that a policy gives.

It knows no phases. A session whose `computed` lags behind its tokens wants that many tokens
computed; a step hands out tokens until a limit binds:

1. running sessions that lag by one token. Each must get its page; if none can be had, a running session
   that stands behind it is preempted, or it itself (`victims.py` says whom), but never who stands first.
2. running sessions that lag by more: a chunk as large as the limits allow.
3. unless somebody was preempted in this step, waiting sessions as the policy lines them up.

Objectives: (1) keeps the time between tokens short and, because who stands first can always take from
those behind it, makes some session finish whatever the load; (2) bounds the step; (3) fills it. Whom
order and form of the step are to serve, each policy says (`scheduling/registry.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from agentserve.core.admission import PASSED, Admission, Place
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Draft, Filler, Gate, Standing, Times
from agentserve.core.grants import Grants
from agentserve.core.kv import KVManager
from agentserve.core.line import arrival, place_of
from agentserve.core.plan import Plan
from agentserve.core.pressure import Pressure
from agentserve.core.quotes import ComputedQuotes
from agentserve.core.reading import Reading
from agentserve.core.scheduling.policy import Ran
from agentserve.core.scheduling.registry import PATIENCE, make_policy
from agentserve.core.session import Session, SessionTable
from agentserve.core.states import Phase
from agentserve.core.timekeeper import Forecast, Newcomer, Timekeeper
from agentserve.core.timing.tally import Tally, shared
from agentserve.core.victims import Why


class Scheduler:
    def __init__(self, config: CoreConfig, sessions: SessionTable, kv: KVManager, times: Times) -> None:
        self.config = config
        self.running: list[Session] = []  # by arrival, as are those that wait; orders say who goes first
        self.waiting: list[Session] = []
        self._sessions = sessions
        self._kv = kv
        self.policy = make_policy(config.scheduling, config.max_batched_tokens, self)
        self._times = times
        self._grants = Grants(config, kv, times, self.policy.form)
        self._admission = Admission(config, sessions, kv, self._grants, self.policy)
        quotes = ComputedQuotes(config.page_size, lambda: self.cost)
        self.pressure = Pressure(kv, quotes, by_price=self.policy.form.victims_by_price)
        self.filler: Filler | None = None  # set by the engine
        self.time = Timekeeper(config, self.policy.form, times, self.lacking)
        self._reading = Reading(config, times, self.time)
        self._decoded = 0.0  # the time of the last step without prefill
        self.seen = 0.0  # the time of the last plan
        self._step = 0

    @property
    def cost(self) -> StepCost:
        """What steps cost by now."""
        return self._times.cost

    @property
    def gate(self) -> Gate | None:
        """The tiers below the device, if there are any."""
        return self._admission.gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        self._admission.gate = gate

    # --- queues ------------------------------------------------------------------------------

    def enqueue(self, session: Session) -> None:
        insort(self.waiting, session, key=arrival)

    def line_up(self, session: Session, now: float) -> None:
        """Give a turn that was enqueued its place in line, now that the tiers know it."""
        self.policy.order.entered(session, now)
        self.time.lined_up(session)

    def remove(self, session: Session, now: float) -> None:
        """The turn is over, wherever it stood. Call it before the turn is ended."""
        if session.phase is Phase.RUNNING:
            del self.running[place_of(session, self.running)]
        else:
            del self.waiting[place_of(session, self.waiting)]
            self._leave_line(session, now)
        self.policy.order.ended(session, now)

    def _leave_line(self, session: Session, now: float) -> None:
        self.policy.order.left(session, now)
        self.time.left(session)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        """A step has run: what it did for each turn is charged."""
        self.pressure.stepped(ran, seconds)
        self.policy.order.stepped(ran, seconds, now)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def _lagging(self) -> list[Session]:
        """Who runs and lags by more than a token."""
        return [s for s in self.running if len(s.tokens) - s.computed > 1]

    @property
    def spoken_for(self) -> int:
        """Blocks that running sessions still need for their own input."""
        return self._admission.spoken_for(self._lagging())

    # --- what orders ask (policy.Outlook) ------------------------------------------------------

    def lacking(self, session: Session) -> int:
        return self._admission.lacking(session)

    def cached(self, session: Session) -> int:
        return self._kv.cached_tokens(session.namespace, session.tokens)

    def seconds(self, session: Session) -> float:
        lacking = self.lacking(session)
        return self.cost.step([(len(session.tokens) - lacking, lacking)])

    def ranked(self, waiting: Sequence[Session], now: float) -> list[Session]:
        return self.gate.ranked(waiting, now) if self.gate is not None else list(waiting)

    # --- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[Plan | None, list[Session], list[Session]]:
        """The next plan, and the sessions that were preempted and that were admitted for it."""
        if not self.has_work and not (self.filler is not None and self.filler.wants):
            return None, [], []
        self.seen = now
        seconds = self.time.step_seconds(self.running, self.waiting, now)
        self._relegate(now)
        draft = Draft(self.config.max_batched_tokens, seconds, Tally(self._times.attention), self._lagging())
        line = self._admission.line_up(self.running, draft.lagging, self.waiting, now)
        standing = Standing(self.policy.order, self.running, now)
        if self.policy.form.decodes_ride:
            self._grant_all(standing, line, draft, now)
        else:
            self._grant_prefill_alone(standing, line, draft, now)
        if self.filler is not None and not self.waiting:
            self.filler.fill(draft)
        if not draft.chunks:
            return None, draft.preempted, draft.admitted
        self._step += 1
        # Who shares with whom takes a look at every decode: only where it is known what that saves.
        cost = self._times.cost
        load = draft.tally.load(shared(draft.chunks, self._times.attention) if cost.per_read else 0)
        predicted = cost.predict(load)
        if draft.prefill:
            self.time.planned(predicted)
        plan = Plan(
            self._step, tuple(draft.copies), tuple(draft.chunks), predicted, tuple(draft.reasons),
            load, cost.at_worst(predicted),
        )  # fmt: skip
        return plan, draft.preempted, draft.admitted

    def _grant_all(
        self, standing: Sequence[Session], line: Sequence[Place], draft: Draft, now: float
    ) -> None:
        if self.policy.form.displaces:
            self._displace(standing, line, draft, now)
        # A preemption in the second list may leave a plan with nothing in it; then who stands last among
        # the rest goes. Who stands first alone always fits: that is what admission promised.
        while True:
            self._grant_decodes(standing, draft, now)
            self._grant_chunks(standing, line, draft, now)
            if draft.chunks or len(self.running) < 2:
                break
            self._preempt(self._victim(standing, draft), draft, now, Why.STUCK)
        if draft.preempted and draft.chunks:
            draft.reasons.extend((session.id, "a preemption in this step") for session in self.waiting[:1])
        else:
            self._admit(line, draft, now)

    def _grant_prefill_alone(
        self, standing: Sequence[Session], line: Sequence[Place], draft: Draft, now: float
    ) -> None:
        """Prompts first; decodes only in a step without any, or when they have waited for long."""
        if not any(session.lag == 1 for session in self.running):
            self._decoded = now
        if now - self._decoded < PATIENCE:
            self._grant_chunks(standing, (), draft, now)
            self._admit(line, draft, now)
        while not draft.chunks and self.running:
            self._grant_decodes(standing, draft, now)
            if draft.chunks or len(self.running) < 2:
                break
            self._preempt(self._victim(standing, draft), draft, now, Why.STUCK)
        if not draft.prefill:
            self._decoded = now

    def _grant_decodes(self, standing: Sequence[Session], draft: Draft, now: float) -> None:
        decodes = [s for s in self.running if len(s.tokens) - s.computed == 1]
        if not decodes or self._grants.each_one(decodes, draft):
            return
        for session in [session for session in standing if session.lag == 1]:
            if session in draft.preempted:
                continue
            limit = self._grants.room_for_one(session, draft)
            if limit:
                draft.reasons.append((session.id, limit))
                continue
            self._grant_one(session, standing, draft, now)

    def _grant_one(self, session: Session, standing: Sequence[Session], draft: Draft, now: float) -> None:
        """One token for a session that must not wait: pages come from one behind it, if need be."""
        while not self._grants.one(session, draft):
            if len(self.running) == 1:
                draft.reasons.append((session.id, "pages"))
                return
            victim = self._victim(standing, draft, session)
            self._preempt(victim, draft, now, Why.DECODE)
            if victim is session:
                return

    def _grant_chunks(
        self, standing: Sequence[Session], line: Sequence[Place], draft: Draft, now: float
    ) -> None:
        """Prompts that were begun, the most urgent first. Long ones leave something to turns in line."""
        lagging = draft.lagging
        if len(lagging) > 1:
            lagging = [session for session in standing if session.lag > 1 and session not in draft.preempted]
        short: list[Session] = []  # a turn that was begun is ended before another one is
        if self.policy.form.short_first:
            short = [session for session in lagging if session.lag <= self.config.max_batched_tokens]
            lagging.sort(key=lambda s: self._reading.read_by(s, s.computed, now))
        kept = None
        for session in lagging:
            if kept is None and session not in short:
                kept = self._reading.kept(session, [place for place in line if not place.limit], draft, now)
                draft.keep(*kept)
            self._grants.chunk(session, session.computed, draft)
        if kept is not None:
            draft.keep(-kept[0], -kept[1])

    def _admit(self, line: Sequence[Place], draft: Draft, now: float) -> None:
        for place in line:
            session = place.session
            limit = "tokens" if draft.tokens < 1 else place.limit
            if limit:
                draft.reasons.append((session.id, limit))
                if limit in PASSED:
                    continue
                return
            hit = self._admission.enter(session, self.running, draft, now)
            if hit is None:
                return  # nobody passes a session that lacks pages
            if self.filler is not None:
                self.filler.admitted(session, hit)
            del self.waiting[place_of(session, self.waiting)]
            self._leave_line(session, now)
            insort(self.running, session, key=arrival)
            if session.lag > 1:
                insort(draft.lagging, session, key=arrival)
            draft.admitted.append(session)

    # --- promises ----------------------------------------------------------------------------

    def _relegate(self, now: float) -> None:
        """Turns that cannot be in time any more stand behind those of their tenant that can."""
        for session in self.time.hopeless(now):
            self.policy.order.left(session, now)
            self._sessions.relegate(session)
            self.policy.order.entered(session, now)

    def forecast(self, newcomer: Newcomer) -> Forecast:
        """When a turn would write its first token, were it submitted now."""
        return self.time.forecast(
            newcomer,
            self.running,
            seats=self.config.max_num_seqs - len(self.running),
            blocks=self._admission.room(self.running, self._lagging()),
            held=sum(self._kv.blocks_of(session.id) for session in self.running),
        )

    # --- preemption --------------------------------------------------------------------------

    def _displace(self, standing: Sequence[Session], line: Sequence[Place], draft: Draft, now: float) -> None:
        """Seat and pages for who stands first in line, from those it outranks: it enters with the next."""
        place = next((place for place in line if place.limit not in PASSED), None)
        if place is None or not place.limit:
            return
        outranks = self.policy.order.outranks
        if not any(outranks(place.session, session) for session in self.running):
            return  # who stands last need not be found
        needed = self._kv.needed_blocks(place.session.namespace, place.session.tokens)
        while self.running:
            victim = next(session for session in reversed(standing) if session not in draft.preempted)
            if not outranks(place.session, victim):
                return
            self._preempt(victim, draft, now, Why.SEAT)
            if needed <= self._admission.room(self.running, draft.lagging):
                return

    def _victim(self, standing: Sequence[Session], draft: Draft, needy: Session | None = None) -> Session:
        """Who gives up its pages for `needy`, or for whoever stands first: one of those behind it, or, but
        for who stands first while others are there, itself."""
        gone = set(draft.preempted)
        left = [session for session in standing if session not in gone]
        among = left[max(left.index(needy), 1) if needy is not None else 1 :]
        return self.pressure.victim(among, self.running) if among else left[-1]

    def _preempt(self, victim: Session, draft: Draft, now: float, why: Why) -> None:
        """Take seat and pages from a running session; it keeps its tokens and its rank.

        Its sealed pages stay in the tree, evictable: if nobody takes them, it resumes from them.
        """
        self.pressure.judge(victim, self.running, why)
        del self.running[place_of(victim, self.running)]
        if victim in draft.lagging:
            draft.lagging.remove(victim)
        self._kv.park(victim.id, victim.tokens, victim.computed)
        self._sessions.preempt(victim)
        self.enqueue(victim)
        self.line_up(victim, now)
        draft.preempted.append(victim)
        draft.reasons.append((victim.id, "preempted"))
