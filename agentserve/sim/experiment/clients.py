"""Plays a trace's sessions: commands at their times, events back, a record of each request. Knows no clock.

Sessions arrive in an open loop, when they are meant to, whatever the server does; within one, the next
request follows the end of the one before and its wait. With a cap no more than so many requests are at the
server at once: others stand before it, and their time counts from when they were meant to arrive.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan
from agentserve.messages import Abort, Close, Command, Park, Submit, Token, TurnEnded, TurnUsage, pack_tokens
from agentserve.sim.experiment.metrics import met
from agentserve.sim.experiment.record import Promise, RequestRecord, Status
from agentserve.sim.experiment.script import Session, Trace, Turn, arrivals
from agentserve.types import FinishReason, Sampling, SessionId, TurnId

TOOL = "tool"
KEPT = (FinishReason.STOP, FinishReason.LENGTH)

Promises = Callable[[int, Turn], Promise]
"""What a request is promised: tokens of context that it goes on from, and the turn."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a trace is brought."""

    rate: float  # sessions per second
    cap: int | None = None  # requests at the server at once
    patience: float | None = None  # seconds from its arrival after which a client gives its request up


NOTHING = Promise(0.0, 0.0)


@dataclass(slots=True, eq=False)
class _Client:
    """One session at play."""

    script: Session
    context: array[int] = field(default_factory=lambda: array("i"))
    turn: int = 0  # index of the one that runs or comes next
    arrival: float = 0.0
    admitted: float | None = None
    marks: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)
    promise: Promise = NOTHING
    at_server: bool = False
    gave_up: bool = False

    @property
    def id(self) -> SessionId:
        return SessionId(self.script.name)

    @property
    def asked(self) -> Turn:
        return self.script.turns[self.turn]


class Clients:
    def __init__(
        self, trace: Trace, load: Load, promises: Promises, vocab_size: int, warm_up: float = 0.0
    ) -> None:
        """warm_up: a share of the sessions, the first ones, which do not count."""
        self.records: list[RequestRecord] = []
        self.missed = 0  # requests that count and have ended without keeping their promises
        self.waiting: Counter[str] = Counter()  # by tenant: turns at the server that were not admitted
        self.active: Counter[str] = Counter()  # by tenant: turns at the server
        self._load = load
        self._promises = promises
        self._vocab_size = vocab_size
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._out: list[Command] = []
        self._before: deque[_Client] = deque()  # they stand before the server
        self._there: dict[SessionId, _Client] = {}
        self._left = len(trace.sessions)
        counted = trace.sessions[int(warm_up * len(trace.sessions)) :]
        self.counted = {session.name for session in counted}
        self.total = sum(len(session.turns) for session in counted)  # requests that count
        for script, arrives in zip(trace.sessions, arrivals(trace, load.rate), strict=True):
            self._come_at(arrives, _Client(script))

    @property
    def over(self) -> bool:
        """Every session has ended."""
        return not self._left

    def next_due(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Command]:
        """Commands to hand over now, in order; what events brought about is among them."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2](now)
        commands, self._out = self._out, []
        return commands

    def planned(self, plan: Plan, now: float) -> None:
        """A step begins: whose turn is in it for the first time has been admitted."""
        for chunk in plan.chunks:
            client = self._there.get(chunk.session)
            if client is not None and client.admitted is None:
                client.admitted = now
                self.waiting[client.script.tenant] -= 1

    def heard(self, event: CoreEvent, now: float) -> None:
        if isinstance(event, Token):
            client = self._there.get(event.session)
            if client is not None:
                client.marks.append(now)
                client.generated.append(event.token)
        elif isinstance(event, TurnEnded):
            client = self._there.get(event.session)
            if client is not None:
                self._ended(client, event, now)

    def overdue(self, now: float) -> int:
        """Requests that count, are under way and have missed their first token's promise already."""
        return sum(
            not client.marks and now > client.arrival + client.promise.ttft
            for client in (*self._before, *self._there.values())
            if client.script.name in self.counted
        )

    def tenant_of(self, session: SessionId) -> str | None:
        client = self._there.get(session)
        return None if client is None else client.script.tenant

    def prompt_of(self, session: SessionId) -> int:
        """Tokens that the running turn of a session began with."""
        return len(self._there[session].context)

    # --- coming and going ----------------------------------------------------------------------

    def _come_at(self, when: float, client: _Client) -> None:
        client.arrival = when
        self._at(when, lambda now: self._come(client))

    def _come(self, client: _Client) -> None:
        client.promise = self._promises(len(client.context), client.asked)
        self._before.append(client)
        if self._load.patience is not None:
            turn = client.turn
            self._at(client.arrival + self._load.patience, lambda now: self._give_up(client, turn, now))
        self._let_in()

    def _let_in(self) -> None:
        while self._before and (self._load.cap is None or len(self._there) < self._load.cap):
            self._submit(self._before.popleft())

    def _submit(self, client: _Client) -> None:
        client.context.extend(client.asked.tokens(self._vocab_size))
        client.at_server = True
        self._there[client.id] = client
        self.waiting[client.script.tenant] += 1
        self.active[client.script.tenant] += 1
        self._out.append(submit(client.script, client.turn, client.context, client.promise, client.arrival))

    def _give_up(self, client: _Client, turn: int, now: float) -> None:
        if client.turn != turn:
            return
        if client.at_server:
            client.gave_up = True
            self._out.append(Abort(client.id, TurnId(turn + 1)))
        elif client in self._before:
            self._before.remove(client)
            self._record(client, Status.TIMEOUT, now, None, "its client's patience ended before the server")
            self._fail(client, now)

    def _ended(self, client: _Client, event: TurnEnded, now: float) -> None:
        tenant = client.script.tenant
        if client.admitted is None:
            self.waiting[tenant] -= 1
        self.active[tenant] -= 1
        del self._there[client.id]
        client.at_server = False
        self._record(client, _status(event, client.gave_up), now, event.usage, event.error)
        if event.reason in KEPT:
            self._go_on(client, event.turn, now)
        else:
            self._out.append(Close(client.id))
            self._fail(client, now)
        self._let_in()

    def _go_on(self, client: _Client, turn: TurnId, now: float) -> None:
        client.context.extend(client.generated)
        wait = client.asked.wait
        client.turn += 1
        client.marks, client.generated, client.admitted = [], [], None
        if client.turn < len(client.script.turns):
            self._out.append(Park(client.id, turn, waiting_tool=True, tools=(TOOL,)))
            self._come_at(now + wait, client)
            return
        self._left -= 1
        if len(client.script.turns) > 1:
            self._out.append(Close(client.id))
        else:
            self._out.append(Park(client.id, turn, waiting_tool=False))

    def _fail(self, client: _Client, now: float) -> None:
        """Its session ends here; what it would have asked counts as given up."""
        client.marks, client.generated, client.admitted = [], [], None
        for turn in range(client.turn + 1, len(client.script.turns)):
            client.turn, client.arrival = turn, now
            self._record(client, Status.ABORTED, now, None, "its session had failed before")
        client.turn = len(client.script.turns)
        self._left -= 1

    def _record(self, client: _Client, status: Status, now: float, usage: TurnUsage | None, why: str) -> None:
        record = RequestRecord(
            session=client.script.name,
            turn=client.turn + 1,
            tenant=client.script.tenant,
            kind=client.script.kind,
            arrival_ts=client.arrival,
            admit_ts=client.admitted,
            first_token_ts=client.marks[0] if client.marks else None,
            every_token_ts=tuple(client.marks),
            finish_ts=now,
            prompt_tokens=usage.prompt if usage is not None else 0,
            prefix_hit_tokens=usage.cached if usage is not None else 0,
            computed_tokens=usage.computed if usage is not None else 0,
            preemption_count=usage.preemptions if usage is not None else 0,
            status=status,
            slo=client.promise,
            why="" if status is Status.OK else why,
        )
        self.records.append(record)
        self.missed += record.session in self.counted and not met(record)

    def _at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), what))


def submit(script: Session, turn: int, context: array[int], promise: Promise, arrived: float) -> Submit:
    asked = script.turns[turn]
    sampling = Sampling(temperature=0.0, max_tokens=asked.output, ignore_eos=True)
    return Submit(
        SessionId(script.name),
        TurnId(turn + 1),
        pack_tokens(context),
        sampling,
        tenant=script.tenant,
        slo=promise.slo,
        arrived=arrived,
    )


def _status(event: TurnEnded, gave_up: bool) -> Status:
    if gave_up and event.reason not in KEPT:
        return Status.TIMEOUT
    match event.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return Status.OK
        case FinishReason.REFUSED:
            return Status.OOM if "KV pool" in event.error else Status.REJECTED
        case FinishReason.ABORTED:
            return Status.ABORTED
    return Status.ERROR
