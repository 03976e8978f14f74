"""The engine as a fleet of worker processes (implements `engine_port.Engine`).

Turns go to the worker that knows their session, else to the least loaded. A worker's death is
seen by the end of its socket: its turns go on elsewhere with what they have generated, a new
worker is started after a pause that grows, and after too many quick deaths its place is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from agentserve.clock import Clock, WallClock
from agentserve.messages import (
    Abort,
    Close,
    Command,
    Decisions,
    DefineGrammar,
    Description,
    Displaced,
    DropGrammar,
    Fork,
    Hello,
    Park,
    ResetPrefixCache,
    StepDone,
    Submit,
    Token,
    Withdrawn,
)
from agentserve.server.engine_port import (
    EngineDown,
    FleetHealth,
    FleetView,
    Hear,
    News,
    SeenSession,
    TierReport,
)
from agentserve.server.workers.grammar_room import surplus
from agentserve.server.workers.moving import Moving
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import RestartPolicy, Slot
from agentserve.server.workers.supervisor import WorkerFailed, WorkerProcess, check_same
from agentserve.server.workers.views import Views
from agentserve.server.workers.watch import kill_when_hung
from agentserve.types import FinishReason, SessionId, TurnId

log = logging.getLogger(__name__)

MAX_MOVES = 3  # a turn that was running at this many deaths is taken for their cause
MAX_HOMES = 100_000  # sessions whose worker is remembered; beyond, only cache hits are lost
RESET_SECONDS = 30.0  # that workers have to drop their caches
HANG_SECONDS = 120.0  # far beyond any step; a worker reports each one

StartWorker = Callable[[int], Awaitable[WorkerProcess]]


class Fleet:
    """N workers behind one face. Everything runs on one event loop; only `start` and `stop` wait long."""

    def __init__(
        self,
        start_worker: StartWorker,
        count: int,
        policy: RestartPolicy | None = None,
        clock: Clock | None = None,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        """A worker that has work and says nothing for `hang_seconds` is killed and replaced."""
        self._start_worker = start_worker
        self._clock = clock or WallClock()
        self._policy = policy or RestartPolicy()
        self._hang_seconds = hang_seconds
        self._slots = [Slot(index, self._policy) for index in range(count)]
        self._turns: dict[tuple[SessionId, TurnId], RunningTurn] = {}
        self._homes: OrderedDict[SessionId, int] = OrderedDict()
        self._grammars: OrderedDict[str, str] = OrderedDict()
        self._views = Views(self._slots, self._homes, self._clock, self._has_work, hang_seconds)
        self._moving = Moving(self._slots, self._turns, self._views.silent)
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._lost = asyncio.Event()
        self._hello: Hello | None = None
        self._hear: Hear = lambda decisions: None

    # --- life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all workers and wait until all are ready. Raises WorkerFailed; none is left then."""
        starts = [asyncio.ensure_future(self._start_worker(slot.index)) for slot in self._slots]
        try:
            workers = await asyncio.gather(*starts)
            self._hello = workers[0].hello
            for worker in workers:
                check_same(worker.hello, self._hello)
        except BaseException:
            for start in starts:
                start.cancel()
            for result in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(result, WorkerProcess):
                    await result.end()
            raise
        for slot, worker in zip(self._slots, workers, strict=True):
            slot.up(worker, self._clock.now())
            self._keepers.append(asyncio.create_task(self._keep(slot)))

    async def lost(self) -> None:
        """Returns once no worker lives and none will come back."""
        await self._lost.wait()

    async def stop(self, grace: float = 5.0) -> None:
        """End running turns with an error, stop the workers, leave no process behind."""
        self._stopping = True
        for turn in list(self._turns.values()):
            self._end(turn, FinishReason.ERROR, "the server is shutting down")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*(worker.end(grace) for worker in workers))
        for slot in self._slots:
            slot.worker = None

    async def __aenter__(self) -> Fleet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- the engine's face --------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        if self._hello is None:
            raise EngineDown("no worker has started yet")
        return self._hello

    @property
    def alive(self) -> int:
        return sum(slot.worker is not None for slot in self._slots)

    @property
    def hopeless(self) -> bool:
        """No worker lives and none will come back."""
        return self._stopping or all(slot.given_up for slot in self._slots)

    def submit(self, command: Submit) -> RunningTurn:
        if self.hopeless:
            raise EngineDown("the server is shutting down" if self._stopping else "no worker is left")
        turn = RunningTurn(command, self._clock.now())
        if turn.key in self._turns:
            raise ValueError(f"turn {command.turn} of session {command.session} runs already")
        self._turns[turn.key] = turn
        self._place(turn)
        return turn

    def abort(self, session: SessionId, turn: TurnId) -> None:
        running = self._turns.get((session, turn))
        if running is None:
            return
        running.aborted = True
        if running.slot is None:
            self._end(running, FinishReason.ABORTED, "")
        else:
            self._slots[running.slot].send(Abort(session, turn))

    def park(self, command: Park) -> None:
        self._send_home(command.session, command)

    def holds(self, session: SessionId) -> bool:
        return session in self._homes

    def on_decisions(self, hear: Hear) -> None:
        self._hear = hear

    def tell(self, news: News) -> None:
        self._send_home(news.session, news)

    def fork(self, session: SessionId, child: SessionId, length: int) -> None:
        # Without a home nothing is shared, and the child's first turn brings its own context.
        if (home := self._homes.get(session)) is not None:
            self._remember(child, home)
            self._slots[home].send(Fork(session, child, length))

    def close(self, session: SessionId) -> None:
        self._send_home(session, Close(session))
        self._homes.pop(session, None)
        self._views.forget(session)
        for turn in [turn for turn in self._turns.values() if turn.key[0] == session]:
            turn.aborted = True  # should its worker die before it reads this, the turn does not go on
            if turn.slot is None:
                self._end(turn, FinishReason.ABORTED, "")

    async def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """Idempotent and cheap: call it before every Submit, for an old grammar may have been dropped."""
        known = grammar_id in self._grammars
        self._grammars[grammar_id] = compiled
        self._grammars.move_to_end(grammar_id)
        if not known:
            self._send_all(DefineGrammar(grammar_id, compiled))
            self._drop_old_grammars()

    async def describe(self, session: SessionId | None = None) -> FleetView:
        return await self._views.fleet(session)

    async def describe_sessions(self, sessions: Sequence[SessionId]) -> dict[SessionId, SeenSession]:
        return await self._views.sessions(sessions)

    def health(self) -> FleetHealth:
        return self._views.health()

    def tiers(self) -> tuple[TierReport, ...]:
        return self._views.tiers()

    async def reset_prefix_cache(self) -> bool:
        answers = await self._views.ask(
            [(slot, ResetPrefixCache) for slot in self._slots if slot.worker is not None], RESET_SECONDS
        )
        return bool(answers) and all(answer is not None for answer in answers)

    # --- placing turns ------------------------------------------------------------------

    def _place(self, turn: RunningTurn, slot: Slot | None = None) -> None:
        """Send a turn to `slot`, else to its session's worker, else to the least loaded that speaks; with
        none up it waits."""
        if slot is None and (home := self._homes.get(turn.command.session)) is not None:
            slot = self._slots[home]
        if slot is None or slot.worker is None:
            slot = self._moving.least_loaded()
        if slot is None:
            return
        self._views.owes(slot)
        turn.slot = slot.index
        self._remember(turn.command.session, slot.index)
        slot.send(turn.continuation())

    def _migrate(self, slot: Slot, event: Withdrawn, now: float) -> None:
        """A worker has given a turn up, if it did: it goes where there is room."""
        turn, target = self._moving.withdrawn(slot, event, now) or (None, None)
        if turn is not None and turn.aborted:
            self._end(turn, FinishReason.ABORTED, "")
        elif turn is not None:
            self._place(turn, target)

    def _remember(self, session: SessionId, home: int) -> None:
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def _end(self, turn: RunningTurn, reason: FinishReason, error: str) -> None:
        turn.end(reason, error, self._clock.now())
        self._moving.close_behind(turn)
        self._turns.pop(turn.key, None)

    # --- talking to workers -------------------------------------------------------------

    def _send_home(self, session: SessionId, command: Command) -> None:
        if (home := self._homes.get(session)) is not None:
            self._slots[home].send(command)

    def _send_all(self, command: Command) -> None:
        for slot in self._slots:
            slot.send(command)

    def _drop_old_grammars(self) -> None:
        used = {turn.command.sampling.grammar for turn in self._turns.values()}
        for grammar in surplus(self._grammars, used):
            del self._grammars[grammar]
            self._send_all(DropGrammar(grammar))

    def _dispatch(self, slot: Slot, step: StepDone) -> None:
        now = self._clock.now()
        if step.worker is not None:
            slot.report(step.worker, now)
            self._moving.tell(now)
        for event in step.events:
            if isinstance(event, Description):
                slot.report(event.worker, now)
                slot.unanswered = False
                self._views.answered(event)
                continue
            if isinstance(event, Decisions):
                self._hear(event)
                continue
            if isinstance(event, Displaced):
                self._moving.asked(slot, event, now)
                continue
            if isinstance(event, Withdrawn):
                self._migrate(slot, event, now)
                continue
            turn = self._turns.get((event.session, event.turn))
            if turn is None or turn.slot != slot.index:
                continue
            try:
                turn.accept(event, now)
            except ValueError as error:
                log.error("worker %d: %s", slot.index, error)
                slot.send(Abort(event.session, event.turn))
                self._end(turn, FinishReason.ERROR, "the engine repeated or lost a token")
            if turn.over:
                self._turns.pop(turn.key, None)
            if turn.behind and (turn.over or isinstance(event, Token)):
                self._moving.close_behind(turn)

    # --- keeping workers alive ----------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Keep one place until told to stop. If that fails by a fault of ours the place is given up, and
        said to be: nobody waits for a worker that will not come."""
        try:
            await self._replace_deaths(slot)
        except Exception:
            log.exception("worker %d: its keeper failed", slot.index)
            worker, slot.worker = slot.worker, None
            if worker is not None:
                await worker.end()
            self._give_up(slot)
            self._abandon(slot)

    async def _replace_deaths(self, slot: Slot) -> None:
        """Read one place's worker and replace it when it dies, until it is hopeless."""
        while slot.worker is not None:
            worker = slot.worker
            watch = asyncio.create_task(
                kill_when_hung(worker, lambda: self._has_work(slot), self._hang_seconds)
            )
            try:
                async for step in worker.steps():
                    self._dispatch(slot, step)
            finally:
                watch.cancel()
            slot.down(self._clock.now())
            self._abandon(slot)
            log.error("worker %d (process %d) died: %s", slot.index, worker.pid, await worker.end())
            await self._revive(slot)

    def _has_work(self, slot: Slot) -> bool:
        return slot.unanswered or any(turn.slot == slot.index for turn in self._turns.values())

    def _abandon(self, slot: Slot) -> None:
        """The worker in `slot` is gone: nothing waits for it, its turns move."""
        homeless = [session for session, home in self._homes.items() if home == slot.index]
        self._views.abandon(slot, homeless)
        for session in homeless:
            del self._homes[session]
        now = self._clock.now()
        for turn in [turn for turn in self._turns.values() if turn.slot == slot.index]:
            turn.lost(now)
            if turn.aborted:
                self._end(turn, FinishReason.ABORTED, "")
            elif turn.exhausted:
                self._end(turn, FinishReason.LENGTH, "")
            elif turn.moves >= MAX_MOVES:
                self._end(turn, FinishReason.ERROR, f"{turn.moves} workers died while they ran this turn")
            else:
                self._place(turn)

    async def _revive(self, slot: Slot) -> None:
        while (pause := slot.next_pause()) is not None:
            await asyncio.sleep(pause)
            try:
                worker = await self._start_again(slot)
            except (WorkerFailed, OSError) as error:  # OSError: no room for its socket, no descriptor left
                log.error("worker %d could not be started again: %s", slot.index, error)
                slot.failed_start()
                continue
            slot.up(worker, self._clock.now())
            log.info("worker %d runs again (process %d)", slot.index, worker.pid)
            for grammar, compiled in self._grammars.items():
                slot.send(DefineGrammar(grammar, compiled))
            for turn in [turn for turn in self._turns.values() if turn.slot is None]:
                self._place(turn)
            return
        log.error("worker %d is given up after %d quick deaths", slot.index, slot.quick_deaths)
        self._give_up(slot)

    async def _start_again(self, slot: Slot) -> WorkerProcess:
        worker = await self._start_worker(slot.index)
        try:
            check_same(worker.hello, self.hello)
        except WorkerFailed:
            await worker.end()
            raise
        return worker

    def _give_up(self, slot: Slot) -> None:
        slot.given_up = True
        if self.hopeless:
            self._lost.set()
            for turn in list(self._turns.values()):
                self._end(turn, FinishReason.ERROR, "no worker is left")
