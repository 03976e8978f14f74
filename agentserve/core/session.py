"""The session table: tokens, how many of them are computed, and the running turn.

The only place where any of these change. A session owns its token ids for life; a turn is one
generation within it. `computed` counts the leading tokens that have KV in the session's block
table: every scheduling question is "how far does computed lag behind len(tokens)?".
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentserve.core.scheduling.deadlines import Course, judged, paced_from
from agentserve.core.states import Happening, Phase, after, public_state
from agentserve.core.timing.features import picks
from agentserve.messages import TurnUsage
from agentserve.types import NO_SLO, Sampling, SessionId, SessionState, Slo, TurnId

NO_TURN = TurnId(0)


@dataclass(slots=True)
class Turn:
    """One generation. `tokens[:prompt]` came in, `tokens[prompt:]` were generated."""

    id: TurnId
    prompt: int
    sampling: Sampling
    limit: int  # the session ends with LENGTH when it has this many tokens
    rank: tuple[int, int]  # (-priority, arrival number): smaller goes first, among its tenant's
    arrived: float
    before: array[int]  # the tokens to go back to if the turn is rolled back
    program: str = ""  # turns of one agent share it
    slo: Slo = NO_SLO
    ends: frozenset[int] = frozenset()  # tokens that end it, from `min_tokens` on
    given: int = 0  # tokens that it had generated on another worker
    relegated: bool = False  # it could not be in time any more, and stood behind those that could
    late: int = 0  # tokens after the first that came after they were due
    wide: int = 0  # gaps between tokens that were longer than promised
    last_token: float = 0.0  # when it came
    # Asked at every token, and so reckoned once. inf: nothing was promised.
    picks: int = field(init=False)  # how its tokens are picked: `timing.features.picks`
    beat: float = field(init=False)  # seconds per token that keep all promises about tokens
    gap: float = field(init=False)  # seconds that may lie between any two tokens
    over_by: float = field(init=False)  # when all of it is due
    paced_from: float = 0.0  # the moment that the times of its tokens count from; 0: there is none yet
    admitted: float = 0.0
    first_token: float = 0.0
    ran: bytearray = field(default_factory=bytearray)  # prompt positions the executor has run: 1
    reached: int = 0  # leading prompt tokens that had KV at some time
    computed: int = 0  # token rows run, recomputation included
    preemptions: int = 0
    swaps: int = 0  # of these: those for which its KV was to be moved out

    @property
    def cached(self) -> int:
        """Prompt tokens that the executor never ran for this turn, however often it was admitted."""
        return self.ran.count(0, 0, self.reached)

    def usage(self, generated: int, now: float, *, whole: bool) -> TurnUsage:
        """What it took, if it ends now. whole: nobody cut it off."""
        course = Course(
            self.arrived,
            self.first_token,
            now,
            generated,
            self.late,
            self.wide,
            whole,
            moved=bool(self.given),
        )
        kept, missed = judged(self.slo, course)
        return TurnUsage(
            prompt=self.prompt,
            cached=self.cached,
            generated=generated,
            computed=self.computed,
            preemptions=self.preemptions,
            arrived=self.arrived,
            admitted=self.admitted,
            first_token=self.first_token,
            ended=now,
            kept=kept,
            missed=missed,
            relegated=self.relegated,
            swaps=self.swaps,
        )

    def __post_init__(self) -> None:
        self.picks = picks(self.sampling)
        pace, total = self.slo.pace, self.slo.total
        self.beat = math.inf if pace is None else pace
        self.gap = math.inf if self.slo.gap is None else self.slo.gap
        self.over_by = math.inf if total is None else self.arrived + total

    def next_due(self, after_first: int) -> float:
        """When token number `after_first` after the first (1, 2, ...) is due, by all that was promised. Asked
        once its first token has come; inf: at no time."""
        paced = self.paced_from + self.beat * after_first
        return min(paced, self.last_token + self.gap, self.over_by)

    def wrote(self, index: int, now: float) -> None:
        """Token `index` of the turn has come."""
        if self.first_token == 0.0:
            self.first_token = now
            self.paced_from = paced_from(self.slo, self.arrived, now)
        else:
            self.wide += now - self.last_token > self.gap
            if self.slo.tbt is not None:
                self.late += now > self.paced_from + self.slo.tbt * (index - self.given)
        self.last_token = now


@dataclass(slots=True, eq=False)
class Session:
    id: SessionId
    namespace: bytes = b""
    tenant: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    computed: int = 0
    phase: Phase = Phase.IDLE
    epoch: int = 0  # run epoch: +1 whenever results in flight become stale
    turn: Turn | None = None
    last_turn: TurnId = NO_TURN
    shown: SessionState = SessionState.IDLE
    preemptions: int = 0

    @property
    def lag(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def state(self) -> SessionState:
        return public_state(self.phase, self.lag)

    @property
    def running_turn(self) -> Turn:
        if self.turn is None:
            raise RuntimeError(f"{self.id} has no turn")
        return self.turn

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.running_turn.prompt


class SessionTable:
    """All sessions of a worker, by id."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, Session] = {}
        self.get = self._sessions.get  # the session of an id, or None

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def open(self, session: SessionId) -> Session:
        """The session of that id; a new one if there is none."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = Session(session)
        return found

    def adopt_tokens(self, session: Session, tokens: array[int], namespace: bytes, tenant: str = "") -> None:
        """Give a session at rest its history (fork, re-open)."""
        session.tokens, session.namespace, session.computed = tokens, namespace, 0
        session.tenant = tenant

    def begin_turn(
        self, session: Session, turn: Turn, tokens: array[int], namespace: bytes, tenant: str = ""
    ) -> None:
        session.phase = after(session.phase, Happening.SUBMIT)
        session.turn, session.last_turn = turn, turn.id
        self.adopt_tokens(session, tokens, namespace, tenant)

    def admit(self, session: Session, hit: int, now: float) -> None:
        """The session got a seat; its first `hit` tokens have KV."""
        turn = session.running_turn
        session.phase = after(session.phase, Happening.ADMIT)
        session.computed = hit
        if not turn.preemptions:
            turn.admitted = now
            turn.ran = bytearray(turn.prompt)

    def advance(self, session: Session, rows: int) -> int:
        """`rows` more tokens have been computed; returns how many are now."""
        turn, start = session.running_turn, session.computed
        end = session.computed = start + rows
        turn.computed += rows
        if start < turn.prompt:
            end = min(end, turn.prompt)
            turn.ran[start:end] = b"\x01" * (end - start)
            turn.reached = max(turn.reached, end)
        return session.computed

    def append(self, session: Session, token: int, now: float) -> int:
        """Add a generated token; returns its index within the turn."""
        turn = session.running_turn
        index = len(session.tokens) - turn.prompt
        turn.wrote(index, now)
        session.tokens.append(token)
        return index

    def preempt(self, session: Session) -> None:
        session.phase = after(session.phase, Happening.PREEMPT)
        session.computed = 0
        session.epoch += 1
        session.preemptions += 1
        session.running_turn.preemptions += 1

    def relegate(self, session: Session) -> None:
        """Its turn waits, and cannot be in time any more."""
        session.running_turn.relegated = True

    def swapped(self, session: Session) -> None:
        """Its KV is to be moved out, for the last preemption."""
        session.running_turn.swaps += 1

    def end_turn(self, session: Session, *, keep: bool) -> Turn:
        """The turn is over; `keep` its tokens, or roll back to before it."""
        turn = session.running_turn
        session.phase = after(session.phase, Happening.END)
        session.turn = None
        session.epoch += 1
        if not keep:
            session.tokens = turn.before
        session.computed = 0  # at rest nothing is held; a resume matches again
        return turn

    def await_tool(self, session: Session, *, waiting: bool) -> None:
        if waiting and session.phase is Phase.IDLE:
            session.phase = after(session.phase, Happening.AWAIT_TOOL)
        elif not waiting and session.phase is Phase.WAITING_TOOL:
            session.phase = after(session.phase, Happening.RELEASE)

    def close(self, session: Session) -> None:
        session.phase = after(session.phase, Happening.CLOSE)
        del self._sessions[session.id]
