"""The engine core: one ordered log in, plans and events out.

Everything that influences a decision enters through `handle`, `begin_step`, `finish_step`, `fail_step`,
`finish_transfers` and `tick`, each with the time now; everything it brings about leaves as a plan, as
transfers or as events. No clock, no thread, no socket: the server, the simulator and the tests run this
same object, and feeding it a recorded log again reproduces every plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentserve.core.ahead import Ahead
from agentserve.core.checking import check_queues
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.kv import KVManager
from agentserve.core.leaving import PRESSURE, Leaving
from agentserve.core.market import TierParts
from agentserve.core.namespaces import Namespaces
from agentserve.core.plan import ChunkResult, Plan, StepResult
from agentserve.core.refusals import Refusals, arrival
from agentserve.core.scheduler import Scheduler
from agentserve.core.scheduling.policy import Ran
from agentserve.core.session import Session, SessionTable, Turn
from agentserve.core.states import Phase
from agentserve.core.tiers import Tiers
from agentserve.core.timing.learning import Learning
from agentserve.core.timing.tally import Attention
from agentserve.core.views import session_view, worker_view
from agentserve.messages import (
    Abort,
    Close,
    Command,
    Decisions,
    Describe,
    Description,
    Devalue,
    Displaced,
    Fork,
    Hint,
    Neighbour,
    Park,
    ResetPrefixCache,
    SessionView,
    StateChange,
    Submit,
    Token,
    ToolSignal,
    TurnEnded,
    TurnUsage,
    Withdraw,
    Withdrawn,
    WorkerView,
    unpack_tokens,
)
from agentserve.types import FinishReason, KVGroup, SessionId, SessionState, TurnId
from tiering.policy.base import Signal
from tiering.types import Change, Transfer, TransferDone

CoreEvent = StateChange | Token | TurnEnded | Description | Decisions | Displaced | Withdrawn


class EngineCore:
    def __init__(
        self,
        config: CoreConfig,
        groups: tuple[KVGroup, ...],
        pages: tuple[int, ...],
        cost: StepCost | None = None,
        tiers: TierParts | None = None,
    ) -> None:
        """groups, pages: the KV groups of the model and how many pages each pool has.
        tiers: what is below the device; None: nothing."""
        if len(groups) != len(pages):
            raise ValueError(f"{len(groups)} KV groups, but {len(pages)} pool sizes")
        if tiers is not None and not config.prefix_cache:
            raise ValueError("tiers need the prefix cache: a block that comes back is entered there")
        self.config = config
        self.sessions = SessionTable()
        self.kv = KVManager(config.page_size, pages, prefix_cache=config.prefix_cache)
        self.learning = Learning(
            cost or StepCost(), Attention(groups, config.page_size), config.max_batched_tokens,
            tiers.book if tiers is not None else None,
        )  # fmt: skip
        self.scheduler = Scheduler(config, self.sessions, self.kv, self.learning)
        self.tiers = Tiers(tiers, self.kv, self.scheduler) if tiers is not None else None
        self.scheduler.gate = self.tiers
        self._leaving = Leaving(self.sessions, self.scheduler, self.tiers)
        self.limit = min(config.max_model_len, self.kv.capacity)
        self.ahead = Ahead(config, self.kv, self.scheduler, self.tiers, self.limit)
        self.scheduler.filler = self.ahead
        self._ends = frozenset(config.eos_token_ids)
        self._events: list[CoreEvent] = []
        self._arrivals = 0
        self.namespaces = Namespaces(config.namespace)
        self.refusals = Refusals(config, self.limit, self.kv, self.scheduler, self.tiers)

    # --- commands ----------------------------------------------------------------------------

    def handle(self, command: Command, now: float) -> None:
        """Apply one command. A client's mistake becomes an event, never an exception."""
        match command:
            case Submit():
                self._submit(command, now)
            case Abort(session=name, turn=turn):
                self._abort(name, turn, now)
            case Withdraw(session=name, turn=turn):
                self._events += self._leaving.withdraw(name, turn, now)
            case Neighbour(pages=pages):
                self._events += self._leaving.neighbour(pages)
            case Park():
                self._park(command, now)
            case Hint() | ToolSignal() | Devalue():
                self._advise(command, now)
            case Fork(session=name, child=child, length=length):
                self._fork(name, child, length, now)
            case Close(session=name):
                self._close(name, now)
            case Describe(request=request, session=asked):
                self._events.append(Description(request, self.view(), self._describe(asked)))
            case ResetPrefixCache(request=request):
                self.kv.evict_all()
                if self.tiers is not None:
                    self.tiers.reset()
                    self.ahead.moved()
                self._events.append(Description(request, self.view()))
            case _:  # grammars belong to the executor, Shutdown to the worker's loop
                pass

    def must_wait(self, command: Command) -> bool:
        """Whether it is not to be handled while a plan runs: it could let go of pages that the plan uses."""
        match command:
            case Abort() | Fork() | Close() | ResetPrefixCache():
                return True
            case Submit(session=name) | Park(session=name) | ToolSignal(session=name) | Devalue(session=name):
                return self.ahead.flying(name)
            case _:
                return False

    def _abort(self, name: SessionId, turn: TurnId, now: float) -> None:
        session = self.sessions.get(name)
        if session is None or session.last_turn != turn:
            return
        self.ahead.stop(name)
        if session.turn is not None:
            self._end(session, FinishReason.ABORTED, now)

    def _advise(self, command: Hint | ToolSignal | Devalue, now: float) -> None:
        """News that make a session's KV worth more or less. Nothing relies on them."""
        session, tiers = self.sessions.get(command.session), self.tiers
        if session is None:
            return
        match command:
            case Hint(hints=hints) if tiers is not None:
                tiers.signalled(session.id, Signal.EXPECTED, now, hints)
            case ToolSignal(turn=turn, signal=signal, tokens=tokens):
                if session.turn is not None or session.last_turn != turn:
                    return
                if signal is Signal.BROKEN:
                    self.ahead.stop(session.id)
                    return
                if tiers is not None:
                    tiers.signalled(session.id, signal, now)
                if tokens and session.phase is Phase.WAITING_TOOL:
                    self.ahead.expect(session, unpack_tokens(tokens))
            case Devalue(why=why):
                self.ahead.stop(session.id)
                if tiers is not None:
                    tiers.departed(session.id, why, now)

    def _submit(self, command: Submit, now: float) -> None:
        tokens = unpack_tokens(command.tokens)
        sampling, prompt = command.sampling, len(tokens) - command.generated
        namespace = self.namespaces.of(command.namespace)
        before = self.sessions.get(command.session)
        refusal = self.refusals.of(command, tokens, before, namespace, now)
        if refusal is not None:
            usage = TurnUsage(max(prompt, 0), 0, 0, 0, 0, now, now, now, now)
            self._events.append(
                TurnEnded(command.session, command.turn, refusal.reason, usage, refusal.error, refusal.wait)
            )
            return
        session = self.sessions.open(command.session)
        self._arrivals += 1
        turn = Turn(
            command.turn,
            prompt,
            sampling,
            min(prompt + sampling.max_tokens, self.limit),
            (-command.priority, self._arrivals),
            arrival(command, now),
            session.tokens,
            command.program or command.session,
            command.slo,
            frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._ends),
            command.generated,
        )
        self.sessions.begin_turn(session, turn, tokens, namespace, command.tenant)
        self.ahead.submitted(session)
        self.scheduler.enqueue(session)
        if self.tiers is not None:
            self.tiers.submitted(session, now)
        self.scheduler.line_up(session, now)
        self._show(session, now)

    def _park(self, command: Park, now: float) -> None:
        session = self.sessions.get(command.session)
        if session is None or session.turn is not None or session.last_turn != command.turn:
            return
        self.sessions.await_tool(session, waiting=command.waiting_tool)
        if not command.waiting_tool:
            self.ahead.forget(session.id)
        if self.tiers is not None:
            self.tiers.parked(session, now, command.tools, command.hints, waiting=command.waiting_tool)
        self._show(session, now)

    def _fork(self, name: SessionId, child: SessionId, length: int, now: float) -> None:
        """A child at rest shares by content: its parent's pages are in the tree, the last one as a tail."""
        parent = self.sessions.get(name)
        if parent is None or self.sessions.get(child) is not None:
            return
        if parent.phase is Phase.RUNNING:
            self.kv.share_tail(parent.id, parent.tokens, parent.computed)
        opened = self.sessions.open(child)
        self.sessions.adopt_tokens(opened, parent.tokens[:length], parent.namespace, parent.tenant)
        if self.tiers is not None:
            self.tiers.ended(opened, now)

    def _close(self, name: SessionId, now: float) -> None:
        session = self.sessions.get(name)
        if session is None:
            return
        if session.turn is not None:
            self._end(session, FinishReason.ABORTED, now)
        self.ahead.forget(name)
        self.sessions.close(session)
        if self.tiers is not None:
            self.tiers.closed(name, now)
        self._show(session, now)

    # --- steps -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def begin_step(self, now: float) -> Plan | None:
        """The next plan to run, or None. Its pages are reserved until it is finished or has failed."""
        if self.tiers is not None:
            self.tiers.begin(now)
        plan, preempted, admitted = self.scheduler.plan(now)
        for session in preempted:
            self._events += self._leaving.displaced(session, now)
            self._show(session, now, PRESSURE)
        self.learning.begun(plan)
        for session in admitted:  # of the others none has changed
            self._show(session, now)
        return plan

    def finish_step(self, result: StepResult, now: float) -> None:
        """Book what a plan computed. Results of another epoch are stale and dropped."""
        self.kv.plan_done()
        self.learning.ended(result)
        if self.tiers is not None:
            self.tiers.stepped([chunk.session for chunk in result.chunks], result.seconds)
        fresh: list[tuple[Session, ChunkResult]] = []
        ran: list[Ran] = []
        for chunk in result.chunks:
            if chunk.sampled is None and self.ahead.finished(chunk):
                continue
            session = self.sessions.get(chunk.session)
            if session is None or session.epoch != chunk.epoch or session.phase is not Phase.RUNNING:
                continue
            read = chunk.computed if len(session.tokens) - session.computed > 1 else 0
            fresh.append((session, chunk))
            ran.append(Ran(session, read, 0 if chunk.sampled is None else 1))
        # Charged before it is booked: afterwards no turn lags any more, and some have ended.
        self.scheduler.stepped(ran, result.seconds, now)
        for session, chunk in fresh:
            if chunk.error:
                reason = FinishReason.REFUSED if chunk.refused else FinishReason.ERROR
                self._end(session, reason, now, chunk.error)
            else:
                self._advance(session, chunk, now)

    def _advance(self, session: Session, chunk: ChunkResult, now: float) -> None:
        sampled, turn = chunk.sampled, session.running_turn
        computed = self.sessions.advance(session, chunk.computed)
        if chunk.computed > 1 or not computed % self.config.page_size:
            self.kv.seal(session.id, session.tokens, computed)
        if sampled is None:
            self._show(session, now)
            return
        token = sampled.token
        index = self.sessions.append(session, token, now)
        self._events.append(Token(session.id, turn.id, index, token, sampled.logprob, sampled.top))
        if sampled.ended or (token in turn.ends and index + 1 >= turn.sampling.min_tokens):
            self._end(session, FinishReason.STOP, now)
        elif len(session.tokens) >= turn.limit:
            self._end(session, FinishReason.LENGTH, now)
        elif session.shown is not SessionState.DECODING:
            self._show(session, now)

    def fail_step(self, plan: Plan, error: str, now: float) -> Plan | None:
        """The executor raised. Work ahead in the plan is given up, and what else is in it returned, to be run
        in its place: no turn is to fail for it. Without such work its turns fail; everybody else goes on."""
        ahead = self.ahead.failed()
        turns = tuple(chunk for chunk in plan.chunks if chunk.session not in ahead)
        if ahead and turns:
            return self.learning.cut(plan, turns)
        self.kv.plan_done()
        for chunk in turns:
            session = self.sessions.get(chunk.session)
            if session is not None and session.phase is Phase.RUNNING and session.epoch == chunk.epoch:
                self._end(session, FinishReason.ERROR, now, error)
        return None

    def _end(self, session: Session, reason: FinishReason, now: float, error: str = "") -> None:
        """End a turn wherever it stands. STOP and LENGTH keep its tokens, all else rolls back."""
        keep = reason in (FinishReason.STOP, FinishReason.LENGTH)
        generated = session.generated
        self.scheduler.remove(session, now)
        if keep:
            self.scheduler.pressure.lengths.ended(session.tenant, generated)
        if reason is FinishReason.ERROR:
            self.kv.release(session.id)
        else:
            self.kv.park(session.id, session.tokens, session.computed)
        self.ahead.forget(session.id)
        turn = self.sessions.end_turn(session, keep=keep)
        usage = turn.usage(generated, now, whole=keep)
        if keep:
            self.scheduler.time.ended(turn, now)
        if self.tiers is not None:
            self.tiers.ended(session, now)
        self._show(session, now, reason.value)
        self._events.append(TurnEnded(session.id, turn.id, reason, usage, error))

    # --- tiers -------------------------------------------------------------------------------

    def take_transfers(self) -> list[Transfer]:
        """Orders for the mover since the last call, in order. Each is to be answered once."""
        return self.tiers.manager.flights.take_orders() if self.tiers is not None else []

    def take_changes(self) -> list[Change]:
        """What is to be said of transfers in flight since the last call, after the new ones were given."""
        return self.tiers.manager.flights.take_changes() if self.tiers is not None else []

    def finish_transfers(self, done: Sequence[TransferDone], now: float) -> None:
        """What became of orders. An answer to no open order changes nothing."""
        if self.tiers is not None and done:
            self.tiers.finish(done, now)
            self.ahead.moved()

    def next_timer(self) -> float | None:
        """When to call `tick`, if nothing happens before; None: never."""
        return self.tiers.next_timer() if self.tiers is not None else None

    def tick(self, now: float) -> None:
        """Time has passed: decisions that asked for it are looked at again."""
        if self.tiers is not None:
            self.tiers.tick(now)

    # --- events and views --------------------------------------------------------------------

    def take_events(self) -> list[CoreEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        if self.tiers is not None and (news := self.tiers.news.take()) is not None:
            events.append(news)
        return events

    def _show(self, session: Session, now: float, reason: str = "") -> None:
        """Tell the world if the public state has changed."""
        state = session.state
        if state is not session.shown:
            session.shown = state
            self._events.append(StateChange(session.id, session.last_turn, state, now, reason))

    def _describe(self, name: SessionId | None) -> SessionView | None:
        session = self.sessions.get(name) if name is not None else None
        if session is None:
            return None
        view = session_view(session, self.kv)
        return self.tiers.describe(view) if self.tiers is not None else view

    def view(self) -> WorkerView:
        tiers = self.tiers.view() if self.tiers is not None else None
        counts = self.ahead.counts, self._leaving.counts()
        return worker_view(self.scheduler, len(self.sessions), self.kv, tiers, counts)

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken (INVARIANTS.md). For tests: O(pages)."""
        self.kv.check()
        check_queues(self.sessions, self.scheduler, self.kv, self.ahead)
        if self.tiers is not None:
            self.tiers.check()
