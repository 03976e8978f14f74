"""The worker's loop: commands in, plans out to the executor, one StepDone frame per step back.

The order is always the same: apply what has arrived, plan, run, hand the result back, report.
While there is work nothing here waits; with no work it sleeps until a command comes, a transfer
between tiers has ended, or a policy wants to look again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import BinaryIO, Protocol

from agentserve.clock import Clock
from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan, StepResult
from agentserve.core.ports import Executor
from agentserve.core.record import Commanded, Entry, Failed, Finished, Planned, encode_entry, plan_digest
from agentserve.messages import (
    Command,
    DefineGrammar,
    DropGrammar,
    Shutdown,
    StepDone,
    Submit,
    TurnEnded,
    TurnUsage,
    WorkerView,
)
from agentserve.server.workers.exchange import Exchange
from agentserve.server.workers.iterations import IterationLog
from agentserve.server.workers.link import LinkError, WorkerLink
from agentserve.types import FinishReason

log = logging.getLogger(__name__)

STEP_FAILED = "The engine failed on this turn."
STALL_TICK = 0.05  # seconds to wait when there is work but none of it can run now


class Core(Protocol):
    """The engine core as the loop sees it (`agentserve.core.engine.EngineCore`)."""

    def handle(self, command: Command, now: float) -> None: ...
    def begin_step(self, now: float) -> Plan | None: ...
    def finish_step(self, result: StepResult, now: float) -> None: ...
    def fail_step(self, plan: Plan, error: str, now: float) -> Plan | None: ...
    def take_events(self) -> list[CoreEvent]: ...
    def view(self) -> WorkerView: ...
    @property
    def has_work(self) -> bool: ...


class Recorder:
    """Writes the ordered log; without a file it does nothing."""

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file

    @property
    def active(self) -> bool:
        return self._file is not None

    def add(self, entry: Entry) -> None:
        if self._file is not None:
            self._file.write(encode_entry(entry))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class WorkerLoop:
    """Runs one core and one executor until told to leave or until the API process is gone."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        link: WorkerLink,
        *,
        clock: Clock,
        recorder: Recorder,
        exchange: Exchange | None = None,
        iterations: IterationLog | None = None,
    ) -> None:
        """exchange: with the tiers below the device; None when there are none. iterations: where it is
        written down what each step did."""
        self._core = core
        self._executor = executor
        self._link = link
        self._clock = clock
        self._recorder = recorder
        self._exchange = exchange
        self._iterations = iterations
        self._began = 0.0  # when the step that runs was begun
        self._grammars: set[str] = set()
        self._refused: list[CoreEvent] = []
        self._stopping = False

    def run(self) -> None:
        """Returns after a Shutdown or when the API process is gone. A bad frame is logged and ends it too."""
        if self._exchange is not None:
            self._report(True)  # what tiers there are is known before the first step
        try:
            while not self._stopping and not self._link.closed:
                self.turn()
        except LinkError as error:
            log.error("the API process sent a bad frame, leaving: %s", error)
        finally:
            if self._exchange is not None:
                self._exchange.close()
        self._link.flush()

    def turn(self) -> None:
        """Once around: what has arrived, a step if there is one, what it brought; else sleep for news."""
        self._apply(self._link.receive())
        if self._stopping:
            return
        if self._link.congested:
            self._link.wait()  # the API process lags: produce nothing until it has read
            return
        moved = self._exchange is not None and self._exchange.take_in()
        stepped = self._step()
        if self._exchange is not None:
            self._exchange.hand_out()
        self._report(stepped or moved)
        if not stepped:
            self._sleep(STALL_TICK if self._core.has_work else None)

    def _sleep(self, limit: float | None) -> None:
        if self._exchange is None:
            self._link.wait(limit)
        else:
            self._link.wait(self._exchange.sleep_at_most(limit), also=(self._exchange.fileno(),))

    def _apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Shutdown():
                    self._stopping = True
                    return
                case DefineGrammar(id=grammar, compiled=compiled):
                    self._define(grammar, compiled)
                case DropGrammar(id=grammar):
                    if grammar in self._grammars:
                        self._grammars.discard(grammar)
                        self._executor.drop_grammar(grammar)
                case Submit() if command.sampling.grammar not in (None, *self._grammars):
                    self._refuse(command, f'grammar "{command.sampling.grammar}" is not defined')
                case _:
                    now = self._clock.now()
                    self._recorder.add(Commanded(now, command))
                    self._core.handle(command, now)

    def _define(self, grammar: str, compiled: str) -> None:
        try:
            self._executor.define_grammar(grammar, compiled)
        except ValueError as error:
            # The turn that names it is refused; nobody else is concerned.
            log.warning('grammar "%s" cannot be used: %s', grammar, error)
        else:
            self._grammars.add(grammar)

    def _refuse(self, command: Submit, error: str) -> None:
        now = self._clock.now()
        usage = TurnUsage(
            prompt=len(command.tokens) // 4,
            cached=0,
            generated=0,
            computed=0,
            preemptions=0,
            arrived=now,
            admitted=now,
            first_token=now,
            ended=now,
        )
        self._refused.append(TurnEnded(command.session, command.turn, FinishReason.REFUSED, usage, error))

    def _step(self) -> bool:
        """One plan, if there is one: whether a step ran."""
        began = self._began = self._clock.now()
        plan = self._core.begin_step(began)
        if self._recorder.active:
            self._recorder.add(Planned(began, plan_digest(plan)))
        if plan is None:
            return False
        if self._exchange is not None:
            self._exchange.hand_out()  # what is moved now is moved while the step runs
        while plan is not None:
            plan = self._run(plan)
        return True

    def _run(self, plan: Plan) -> Plan | None:
        """Run a plan and book what came of it; what is to be run in its place if it failed."""
        try:
            result = self._executor.run(plan)
        except Exception:  # whatever a kernel or torch raises: only this plan's turns fail
            # What was raised may be about any of them: it is for the log, and for no client.
            log.exception("step %d failed, of %s", plan.step, [str(chunk.session) for chunk in plan.chunks])
            now = self._clock.now()
            self._recorder.add(Failed(now, STEP_FAILED))
            again = self._core.fail_step(plan, STEP_FAILED, now)
            self._write_down(plan, None)
            return again
        now = self._clock.now()
        self._recorder.add(Finished(now, result))
        self._core.finish_step(result, now)
        self._write_down(plan, result.seconds)
        return None

    def _write_down(self, plan: Plan, seconds: float | None) -> None:
        if self._iterations is not None:
            now = self._clock.now()
            self._iterations.ran(plan, seconds, self._began, now)
            self._began = now

    def _report(self, news: bool) -> None:
        events = self._refused + self._core.take_events()
        self._refused = []
        if events or news:
            view = self._core.view()
            if self._iterations is not None:
                events, view = self._iterations.reported(events, view)
            self._link.send(StepDone(events, view))
