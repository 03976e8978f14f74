"""The scheduler: owner of the queues and of the order; writes one plan per step.

It knows no phases. A session whose `computed` lags behind its tokens wants that many tokens
computed; a step hands out tokens until a limit binds:

1. running sessions that lag by one token, oldest first. Each must get its page; if none can be
   had, the youngest running session is preempted, and if that is the session itself, it waits.
2. running sessions that lag by more, those that one step can finish first: a chunk as large as the
   limits allow.
3. unless somebody was preempted in this step, waiting sessions by rank, short ones first: turns of
   which all but one step's tokens have KV, as after a tool. (2) leaves them room in the step.
   Nobody is passed who has waited for PATIENCE seconds.

Objectives: (1) keeps the time between tokens short and, because the oldest can always take from
the youngest, makes some session finish whatever the load; (2) bounds the step; (3) fills it, and
lets no agent that comes back with a tool's result wait behind whole new prompts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.kv import KVManager
from agentserve.core.plan import Chunk, PageCopy, Plan, SampleSpec
from agentserve.core.radix import common_prefix
from agentserve.core.scheduling.chunking import Caps, chunk_size
from agentserve.core.session import Session, SessionTable
from agentserve.core.states import Phase
from agentserve.types import SessionId

WAITING_EXAMINED = 64  # waiting sessions looked at per step: the rest stand behind them in order
SHORT_EXAMINED = 16  # of these, how many may turn out to be short
PASSED = ("prefix", "loading")  # it waits for KV that is on its way: others may pass
PATIENCE = 4.0  # seconds for which short turns may pass one that came before


def rank(session: Session) -> tuple[int, int]:
    return session.running_turn.rank


@dataclass(slots=True)
class Draft:
    """A plan while it is being written: what is left of each limit."""

    tokens: int
    seconds: float | None
    spent: float
    copies: list[PageCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    reasons: list[tuple[SessionId, str]] = field(default_factory=list)
    preempted: list[Session] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """A waiting turn in line."""

    session: Session
    limit: str  # what keeps it from entering; empty: nothing does
    short: int  # tokens that it needs, if that is no more than a step; else 0


class Gate(Protocol):
    """What admission asks of the tiers below."""

    def holds_up(self, session: Session, room: int, now: float) -> str:
        """Whether the session waits for KV to be loaded ("loading") or for room for it ("pages").
        room: blocks that it may count on. What is to be loaded is ordered."""
        ...

    def lacking(self, session: Session) -> int:
        """Tokens of a waiting session that have KV nowhere."""
        ...

    def ranked(self, waiting: Sequence[Session], now: float) -> list[Session]:
        """The order in which to admit."""
        ...

    def lined_up(self, waiting: Sequence[Session]) -> None:
        """The order in which they will enter, short turns first."""
        ...

    def admitted(self, session: Session, hit: int, now: float) -> None: ...


class Filler(Protocol):
    """What may use the rest of a step."""

    @property
    def wants(self) -> bool:
        """Whether there is anything to add to a plan."""
        ...

    def fill(self, draft: Draft) -> None:
        """Add chunks of sessions at rest, within what is left of each limit."""
        ...

    def admitted(self, session: Session, hit: int) -> None: ...


class Scheduler:
    def __init__(self, config: CoreConfig, sessions: SessionTable, kv: KVManager, cost: StepCost) -> None:
        self.config = config
        self.cost = cost
        self.running: list[Session] = []  # in rank order
        self.waiting: list[Session] = []  # in rank order; preempted sessions keep their rank
        self._sessions = sessions
        self._kv = kv
        self.gate: Gate | None = None  # set when there are tiers below
        self.filler: Filler | None = None  # set by the engine
        self._step = 0
        self._reserve = int(config.page_reserve * min(pool.pages for pool in kv.pools))

    # --- queues ------------------------------------------------------------------------------

    def enqueue(self, session: Session) -> None:
        insort(self.waiting, session, key=rank)

    def remove(self, session: Session) -> None:
        """The turn is over, wherever it stood. Call it before the turn is ended."""
        (self.running if session.phase is Phase.RUNNING else self.waiting).remove(session)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def spoken_for(self) -> int:
        """Blocks that running sessions still need for their own input."""
        lagging = (session for session in self.running if session.lag > 1)
        return sum(self._kv.missing_blocks(session.id, len(session.tokens)) for session in lagging)

    # --- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> tuple[Plan | None, list[Session]]:
        """The next plan, and the sessions that were preempted for it."""
        if not self.has_work and not (self.filler is not None and self.filler.wants):
            return None, []
        draft = Draft(self.config.max_batched_tokens, self.config.max_step_seconds, self.cost.fixed)
        line = self._line_up(now)
        # A preemption in the second list may leave a plan with nothing in it; then the next
        # youngest goes. The oldest session alone always fits: that is what admission promised.
        while True:
            self._grant_running(draft, sum(place.short for place in line if not place.limit), now)
            if draft.chunks or len(self.running) < 2:
                break
            self._preempt(self.running[-1], draft)
        if draft.preempted:
            draft.reasons.extend((session.id, "a preemption in this step") for session in self.waiting[:1])
        else:
            self._admit(draft, line, now)
        if self.filler is not None and not self.waiting:
            self.filler.fill(draft)
        if not draft.chunks:
            return None, draft.preempted
        self._step += 1
        plan = Plan(self._step, tuple(draft.copies), tuple(draft.chunks), draft.spent, tuple(draft.reasons))
        return plan, draft.preempted

    def _line_up(self, now: float) -> list[Place]:
        """Waiting turns in the order in which they enter, as far as there is room for them, and the one
        after these. What they lack from below is ordered: for no more turns than could run with it, so
        that nobody's KV is brought only to make room for another's."""
        seats = self.config.max_num_seqs - len(self.running)
        if seats < 1 or not self.waiting:
            return [Place(session, "seats", 0) for session in self.waiting[:1]]
        # Nobody enters twice, so no more than this can be passed over or enter.
        candidates = self.waiting[: WAITING_EXAMINED + self.config.max_num_seqs]
        if self.gate is not None:
            candidates = self.gate.ranked(candidates, now)
        short = self._short_ones(candidates[:SHORT_EXAMINED])
        candidates = sorted(
            candidates,
            key=lambda s: (s.running_turn.rank[0], s.id not in short and not self._impatient(s, now)),
        )
        if self.gate is not None:
            self.gate.lined_up(candidates)
        line: list[Place] = []
        passed, room = 0, self._room
        for session in candidates:
            limit = ""
            if self.config.prefix_cache and self._prefix_is_coming(session):
                limit = "prefix"
            else:
                needed = self._kv.needed_blocks(session.namespace, session.tokens)
                if needed > room and self.running and self.config.full_input_gate:
                    limit = "gate"
                elif self.gate is not None:
                    limit = self.gate.holds_up(session, room, now)
                room -= needed
            line.append(Place(session, limit, short.get(session.id, 0)))
            passed += limit in PASSED
            if (limit and limit not in PASSED) or passed == WAITING_EXAMINED or len(line) - passed == seats:
                break
        return line

    @property
    def _room(self) -> int:
        """Blocks that turns which wait may count on."""
        free = self._kv.available - self._kv.stuck
        return free - self._reserve - self.spoken_for if self.running else free

    def _short_ones(self, candidates: Sequence[Session]) -> dict[SessionId, int]:
        """Turns that need no more than one step, each with the tokens that it needs."""
        lacking = {session.id: self._lacking(session) for session in candidates}
        return {name: tokens for name, tokens in lacking.items() if tokens <= self.config.max_batched_tokens}

    @staticmethod
    def _impatient(session: Session, now: float) -> bool:
        return now - session.running_turn.arrived >= PATIENCE

    def _lacking(self, session: Session) -> int:
        """Tokens of a waiting session that must be computed."""
        if self.gate is not None:
            return self.gate.lacking(session)
        return len(session.tokens) - self._kv.cached_tokens(session.namespace, session.tokens)

    def _grant_running(self, draft: Draft, wanted: int, now: float) -> None:
        """wanted: tokens for short turns that wait; they are left half of the step, but for one page."""
        for session in [session for session in self.running if session.lag == 1]:
            if session in draft.preempted:
                continue
            limit = self._no_room_for_one(session, draft)
            if limit:
                draft.reasons.append((session.id, limit))
                continue
            self._grant_one(session, draft)
        kept = max(min(wanted, draft.tokens // 2, draft.tokens - self.config.page_size), 0)
        draft.tokens -= kept
        lagging = [session for session in self.running if session.lag > 1]
        lagging.sort(key=lambda s: s.lag > self.config.max_batched_tokens and not self._impatient(s, now))
        for session in lagging:
            self._grant_chunk(session, session.computed, draft)
        draft.tokens += kept

    def _no_room_for_one(self, session: Session, draft: Draft) -> str:
        """Which limit leaves no room for one token of this session; the first chunk of a step always has."""
        if draft.tokens < 1:
            return "tokens"
        if draft.seconds is None or not draft.chunks:
            return ""
        return "time" if draft.spent + self.cost.chunk(session.computed, 1) > draft.seconds else ""

    def _grant_one(self, session: Session, draft: Draft) -> None:
        """One token for a session that must not wait: take pages from the youngest if need be."""
        while True:
            copies = self._kv.reserve(session.id, session.computed, session.computed + 1)
            if copies is not None:
                self._write(session, session.computed, 1, copies, draft)
                return
            youngest = self.running[-1]
            if len(self.running) == 1:
                draft.reasons.append((session.id, "pages"))
                return
            self._preempt(youngest, draft)
            if youngest is session:
                return

    def _grant_chunk(self, session: Session, start: int, draft: Draft) -> bool:
        """As large a chunk from `start` as every limit allows. False if it is none."""
        count, limit = self._chunk_size(session, start, draft)
        copies = self._kv.reserve(session.id, start, start + count) if count else None
        if copies is None:
            draft.reasons.append((session.id, limit if count == 0 else "pages"))
            return False
        if limit:
            draft.reasons.append((session.id, limit))
        self._write(session, start, count, copies, draft)
        return True

    def _chunk_size(self, session: Session, start: int, draft: Draft) -> tuple[int, str]:
        """Tokens for `session` in this step, and the limit that binds if that is not all of them.

        A chunk that is not the last ends on a page edge: (start + chunk) mod page = 0.
        """
        size, lag = self.config.page_size, len(session.tokens) - start
        held = self._kv.blocks_of(session.id) * size
        room = max(held, start // size * size) + self._kv.available * size - start

        def in_time(count: int) -> int:
            assert draft.seconds is not None
            most = self.cost.largest_chunk(start, count, draft.seconds - draft.spent)
            if draft.chunks:
                return most
            return max(most, min(count, size - start % size))  # something must run, whatever it takes

        caps = Caps(draft.tokens, room, in_time if draft.seconds is not None else None)
        return chunk_size(start, lag, size, caps)

    def _write(self, session: Session, start: int, count: int, copies: list[PageCopy], draft: Draft) -> None:
        turn, end = session.running_turn, start + count
        sample = None
        if end == len(session.tokens):
            sample = SampleSpec(turn.sampling, session.tokens, turn.prompt, end)
        draft.copies.extend(copies)
        draft.chunks.append(
            Chunk(
                session.id,
                turn.id,
                session.epoch,
                start,
                session.tokens[start:end],
                self._kv.table(session.id, end),
                sample,
            )
        )
        draft.tokens -= count
        draft.spent += self.cost.chunk(start, count)

    # --- preemption --------------------------------------------------------------------------

    def _preempt(self, victim: Session, draft: Draft) -> None:
        """Take seat and pages from a running session; it keeps its tokens and its rank.

        Its sealed pages stay in the tree, evictable: if nobody takes them, it resumes from them.
        """
        self.running.remove(victim)
        self._kv.park(victim.id, victim.tokens, victim.computed)
        self._sessions.preempt(victim)
        insort(self.waiting, victim, key=rank)
        draft.preempted.append(victim)
        draft.reasons.append((victim.id, "preempted"))

    # --- admission ---------------------------------------------------------------------------

    def _admit(self, draft: Draft, line: Sequence[Place], now: float) -> None:
        for place in line:
            session = place.session
            limit = "tokens" if draft.tokens < 1 else place.limit
            if limit:
                draft.reasons.append((session.id, limit))
                if limit in PASSED:
                    continue
                return
            if not self._enter(session, draft, now):
                return  # first come, first served: nobody passes a session that lacks pages
            self.waiting.remove(session)
            insort(self.running, session, key=rank)

    def _prefix_is_coming(self, session: Session) -> bool:
        """Is somebody else computing a prefix of this session that it could share a little later?

        Worth waiting for when the running session will compute more full pages of it than are
        cached now. Objective: compute each shared prefix once.
        """
        size = self.config.page_size
        known = -1
        for other in self.running:
            if other.lag <= size or other.namespace != session.namespace:
                continue
            shared = common_prefix(other.tokens, session.tokens) // size * size
            if shared <= other.computed // size * size:
                continue
            if known < 0:
                known = self._kv.cached_tokens(session.namespace, session.tokens)
            if shared > known + size:
                return True
        return False

    def _enter(self, session: Session, draft: Draft, now: float) -> bool:
        """Match, pass the gate, take the first chunk. On failure nothing is held."""
        kv = self._kv
        hit = kv.begin(session.id, session.namespace, session.tokens)
        needed = kv.missing_blocks(session.id, len(session.tokens))
        fits = needed <= self._room
        if not self.config.full_input_gate:
            fits = kv.available > (self._reserve if self.running else 0)
        if not fits:
            kv.release(session.id)
            draft.reasons.append((session.id, "gate" if self.config.full_input_gate else "pages"))
            return False
        if not self._grant_chunk(session, hit, draft):
            kv.release(session.id)
            return False
        self._sessions.admit(session, hit, now)
        if self.gate is not None:
            self.gate.admitted(session, hit, now)
        if self.filler is not None:
            self.filler.admitted(session, hit)
        return True
