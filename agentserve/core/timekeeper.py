"""Keeps promises in view: how long a step may take, which turns can still be in time, which never began.

Everything here is a prediction by the cost model and moves no queue: the scheduler asks, and does it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.draft import Times
from agentserve.core.load import Load, load_of_running
from agentserve.core.scheduling.deadlines import first_due, least_slack, read_by, wanted_by, within
from agentserve.core.scheduling.forecast import NOTHING, Pace, Room, Work, ahead_of, first_token
from agentserve.core.scheduling.policy import Form
from agentserve.core.session import Session, Turn
from agentserve.messages import PromiseCounts
from agentserve.types import NO_SLO, SessionId, Slo

PATIENCE = 4.0  # seconds for which deadlines of tokens may keep prompts from being read
LEAST = 1 / 16  # of the time of steps that prompts have, if they want it, once patience is at its end
REFRESHED = 16  # estimates that are made anew for a forecast: caches have changed meanwhile
RELEGATED = 16  # turns that are looked at before a step
RECENT = 0.1  # what the last turn counts in the average


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A turn that is about to be submitted."""

    tenant: str
    slo: Slo
    arrived: float
    rank: int  # -priority
    start: int  # leading tokens that have KV somewhere
    lacking: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """seconds: from now to its first token; alone: if nobody else were there."""

    seconds: float
    alone: float


@dataclass(frozen=True, slots=True)
class _Estimate:
    session: Session
    work: Work
    short: bool
    due: float
    latest: float  # when it must have begun to be in time, alone

    @property
    def place(self) -> tuple[float, int]:
        return self.latest, self.session.running_turn.rank[1]


class Timekeeper:
    def __init__(
        self, config: CoreConfig, form: Form, times: Times, lacking: Callable[[Session], int]
    ) -> None:
        """lacking: tokens of a waiting session that must be computed."""
        self._config = config
        self._form = form
        self._times = times
        self._lacking = lacking
        self._line: dict[SessionId, Session] = {}  # those that wait
        self._estimates: dict[SessionId, _Estimate] = {}  # of these, as far as anybody asked; oldest first
        self._latest: dict[bool, list[_Estimate]] = {
            True: [],
            False: [],
        }  # with a promise: short ones, others
        self._load = Load()
        self._calm = -math.inf  # until then nobody is late who was not, if nothing else happens
        self._asked = 0.0  # when a step was last asked for
        self._owed = 0.0  # seconds of steps that deadlines keep from prompts
        self._lasting = 0.0
        self.unattainable = self.overruled = self.relegated = self.shed = 0

    @property
    def _cost(self) -> StepCost:
        return self._times.cost

    @property
    def _safety(self) -> float:
        """What the guess at how far steps stray is, where that was not measured."""
        return 1.0 if self._cost.bounded else self._config.scheduling.safety

    def _load_of(self, running: Sequence[Session]) -> Load:
        return load_of_running(running, self._cost, self._times.attention, self._before)

    def _before(self, turn: Turn, takes: float) -> float:
        """Before whom a prompt goes that was begun. One that is late already lets others pass, but it has the
        seat and the pages: it counts as before everybody."""
        return self.wanted_by(turn, takes) if self._form.short_first else -math.inf

    def wanted_by(self, turn: Turn, takes: float) -> float:
        """When its prompt should have been read, the rest of which takes so many seconds."""
        return wanted_by(self._promised(turn), turn.arrived, takes)

    def _promised(self, turn: Turn) -> Slo:
        """What counts for its prompt."""
        return turn.slo if self._form.keeps_deadlines and not turn.first_token else NO_SLO

    def read_by(self, turn: Turn, takes: float, now: float) -> float:
        """When the rest of its prompt should begin to be read, which takes so many seconds."""
        return read_by(self._promised(turn), turn.arrived, takes, now)

    def counts(self) -> PromiseCounts:
        return PromiseCounts(self.relegated, self.shed, self.unattainable, self.overruled)

    # --- how long a step may take ------------------------------------------------------------

    def step_seconds(
        self, running: Sequence[Session], waiting: Sequence[Session], now: float
    ) -> float | None:
        """What the step's bound may come to; None: as long as it likes.

        Tokens that can be in time are not made late by prompts. Those that cannot be are set aside. And where
        prompts have not been read for `PATIENCE` seconds for all that, or have less than `LEAST` of the time,
        this step is not cut: what is promised to one turn stops nobody else, however little it leaves them.
        """
        most = self._config.max_step_seconds
        if not self._form.keeps_deadlines:
            return most
        self._load = load = self._load_of(running)
        least, dues = self._cost.at_worst(load.least), load.dues
        if not dues or not (waiting or load.begun):
            self._owed, self._asked = 0.0, now
            if not dues:
                return most
        self._owed = min(self._owed + (now - self._asked) * LEAST, PATIENCE * LEAST)
        self._asked = now
        safety = self._safety
        slack, missed = least_slack(dues, now, least * safety)
        self.unattainable += missed
        if self._owed >= PATIENCE * LEAST * (1 - 1e-9):  # it is a sum of many
            self.overruled += 1
            return most
        # Never less than the decodes take: they are the ones that it is for.
        allowed = max(slack / safety, least * (1 + 1e-9))
        return min(allowed, most) if most is not None else allowed

    def planned(self, predicted: float) -> None:
        """A step with prompts was planned."""
        # Of steps that nothing is known of none is cut.
        self._owed = max(self._owed - (predicted - self._load.least), 0.0) if predicted else 0.0

    # --- who waits ---------------------------------------------------------------------------

    def lined_up(self, session: Session) -> None:
        turn = session.running_turn
        self._line[session.id] = session
        self._calm = -math.inf
        promised = turn.slo.ttft is not None or turn.slo.total is not None
        if self._form.keeps_deadlines and promised and not turn.relegated and not turn.first_token:
            self._watch(self._estimated(session))

    def left(self, session: Session) -> None:
        self._line.pop(session.id, None)
        self._calm = -math.inf
        estimate = self._estimates.pop(session.id, None)
        if estimate is not None:
            self._unwatch(estimate)

    def _estimated(self, session: Session) -> _Estimate:
        lacking = self._lacking(session)
        start = len(session.tokens) - lacking
        work = Work(lacking, self._cost.chunk(start, lacking), 1.0, -(-lacking // self._config.page_size))
        alone = self._alone(work)
        due = first_due(session.running_turn.slo, session.running_turn.arrived)
        short = self._form.short_first and lacking <= self._config.max_batched_tokens
        return _Estimate(session, work, short, due, due - alone)

    def _alone(self, work: Work) -> float:
        return Pace(self._cost.empty, self._config.max_batched_tokens).reading(work)

    def _watch(self, estimate: _Estimate) -> None:
        self._estimates[estimate.session.id] = estimate
        insort(self._latest[estimate.short], estimate, key=_place)

    def _unwatch(self, estimate: _Estimate) -> bool:
        """Whether it was watched."""
        line = self._latest[estimate.short]
        found = bisect_left(line, estimate.place, key=_place)
        if found == len(line) or line[found] is not estimate:
            return False
        del line[found]
        return True

    # --- who cannot be in time any more ------------------------------------------------------

    def hopeless(self, now: float) -> list[Session]:
        """Turns in line whose first token would be late, behind the prompts that are being read and the turns
        of their tenant that must begin sooner and can be in time. They are not told again. Asked after
        `step_seconds`."""
        if now < self._calm or not any(self._latest.values()):
            return []
        pace, found, busy = self._pace(self._load), [], len(self._line) > 1
        queue: dict[
            str, tuple[float, float]
        ] = {}  # by tenant: tokens and seconds; short turns are first in it
        margin = math.inf
        for line in self._latest.values():
            for estimate in line[:RELEGATED]:
                tenant, begun = estimate.session.tenant, self._load.before(estimate.due)
                tokens, seconds = queue.get(tenant, (0.0, 0.0))
                tokens, seconds = tokens + begun.tokens, seconds + begun.seconds
                left = self._left(estimate, tokens, seconds, pace, busy=busy) - now
                if left < 0:
                    self._unwatch(estimate)
                    estimate = self._estimates[estimate.session.id] = self._estimated(estimate.session)
                    left = self._left(estimate, tokens, seconds, pace, busy=busy) - now
                    if left < 0:
                        found.append(estimate.session)
                        continue
                    self._watch(estimate)
                margin = min(margin, left)
                tokens, seconds = queue.get(tenant, (0.0, 0.0))
                queue[tenant] = tokens + estimate.work.tokens, seconds + estimate.work.seconds
        self.relegated += len(found)
        # Halved, as contexts grow meanwhile; those behind the ones that were found have not been looked at.
        self._calm = now + margin / 2 if not found else -math.inf
        return found

    @staticmethod
    def _left(estimate: _Estimate, tokens: float, seconds: float, pace: Pace, *, busy: bool) -> float:
        """By when it must begin to be read, with so much before it."""
        work = estimate.work
        takes = pace.takes(tokens + work.tokens, seconds + work.seconds, busy=busy or tokens > 0)
        return estimate.due - takes

    def _pace(self, load: Load) -> Pace:
        """How fast prompts are read beside those that run."""
        config, allowed = self._config, self._config.max_step_seconds
        if self._form.keeps_deadlines and load.beat < math.inf:
            promised = load.beat / self._safety
            allowed = promised if allowed is None else min(allowed, promised)
        tokens = max(config.max_batched_tokens - load.decodes, 1)
        predicted = math.inf if allowed is None else self._cost.within(allowed)
        if predicted in (math.inf, load.least) or predicted < load.least:
            return Pace(load.least, tokens)  # nothing is cut for what cannot be kept anyway
        return Pace(load.least, tokens, predicted - load.least)

    # --- who need not begin ------------------------------------------------------------------

    def forecast(
        self, newcomer: Newcomer, running: Sequence[Session], *, seats: int, blocks: int, held: int
    ) -> Forecast:
        """seats, blocks: free, or to be had; held: blocks of the turns that run."""
        seconds = self._cost.chunk(newcomer.start, newcomer.lacking)
        own = Work(newcomer.lacking, seconds, 1.0, newcomer.blocks)
        short = self._form.short_first and newcomer.lacking <= self._config.max_batched_tokens
        load = self._load_of(running)
        pace = self._pace(load)
        work = self._waiting(newcomer, short=short)
        mine = work.pop(newcomer.tenant, NOTHING)
        if self._form.shares:
            weight = self._config.scheduling.weight
            others = [(weight(name) / weight(newcomer.tenant), theirs) for name, theirs in work.items()]
            ahead = mine + ahead_of(mine + own, others)
        else:
            ahead = sum(work.values(), mine)
        ahead += load.before(wanted_by(newcomer.slo, newcomer.arrived, seconds))
        room = Room(seats, blocks, len(running), held, self._lasting)
        return Forecast(first_token(own, ahead, pace, room), self._alone(own))

    def _waiting(self, newcomer: Newcomer, *, short: bool) -> dict[str, Work]:
        """By tenant, what waits and would go before it."""
        self._refresh()
        found: dict[str, list[float]] = {}
        due = newcomer.arrived + within(newcomer.slo)
        for estimate in self._estimates.values():
            session = estimate.session
            turn = session.running_turn
            if session.tenant == newcomer.tenant and self._goes_behind(
                turn, estimate, newcomer.rank, due, short
            ):
                continue
            sums = found.setdefault(session.tenant, [0.0, 0.0, 0.0, 0.0])
            sums[0] += estimate.work.tokens
            sums[1] += estimate.work.seconds
            sums[2] += 1.0
            sums[3] += estimate.work.blocks
        return {tenant: Work(*sums) for tenant, sums in found.items()}

    def _goes_behind(self, turn: Turn, estimate: _Estimate, rank: int, due: float, short: bool) -> bool:
        if turn.rank[0] != rank:
            return turn.rank[0] > rank
        if not self._form.keeps_deadlines:
            return False
        return turn.relegated or (short and not estimate.short) or turn.arrived + within(turn.slo) > due

    def _refresh(self) -> None:
        """Every turn that waits has an estimate, and the oldest few are made anew."""
        for old in list(islice(self._estimates.values(), REFRESHED)):
            watched = self._unwatch(old)
            del self._estimates[old.session.id]
            fresh = self._estimates[old.session.id] = self._estimated(old.session)
            if watched:
                self._watch(fresh)
        for name, session in self._line.items():
            if name not in self._estimates:
                self._estimates[name] = self._estimated(session)

    # --- how turns went ----------------------------------------------------------------------

    def ended(self, turn: Turn, now: float) -> None:
        """A turn has written all that it had to say."""
        if turn.first_token:
            seconds = now - turn.first_token
            self._lasting = (
                seconds if not self._lasting else self._lasting + RECENT * (seconds - self._lasting)
            )


def _place(estimate: _Estimate) -> tuple[float, int]:
    return estimate.place
