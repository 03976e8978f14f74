"""The worker's loop: commands in, plans out to the executor, one StepDone frame per step back.

The order is always the same: apply what has arrived, plan, run, hand the result back, report.
While there is work nothing here waits; with no work it sleeps until a command comes, a transfer
between tiers has ended, or a policy wants to look again.

With overlap, what a step brought about is reported while the next one computes, and then what has arrived
by then is applied, where it can neither take pages from the step that runs nor change its result. The next
plan is made when that step is over, of all that has arrived: made earlier it would be of less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from agentserve.clock import Clock
from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan, StepResult
from agentserve.core.ports import Executor
from agentserve.core.record import Commanded, Failed, Finished
from agentserve.messages import (
    Command,
    DefineGrammar,
    Description,
    DropGrammar,
    RunCounts,
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
from agentserve.server.workers.meanwhile import Meanwhile
from agentserve.server.workers.recorder import Recorder
from agentserve.types import FinishReason

log = logging.getLogger(__name__)

STEP_FAILED = "The engine failed on this turn."
FOR_LATER = (Shutdown, DefineGrammar, DropGrammar)  # the loop's and the executor's own
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
    def must_wait(self, command: Command) -> bool: ...


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
        when_computing: Callable[[Callable[[], None]], None] | None = None,
        runs: Callable[[], RunCounts] | None = None,
    ) -> None:
        """exchange: with the tiers below the device; None when there are none. iterations: where it is
        written down what each step did. when_computing: has the executor call what it is given in each run,
        when the model computes and Python does not; None: nothing overlaps. runs: how steps were run, to
        be told with everything else of the worker."""
        self._core = core
        self._executor = executor
        self._link = link
        self._clock = clock
        self._recorder = recorder
        self._exchange = exchange
        self._iterations = iterations
        self._runs = runs
        self._began = 0.0  # when the step that runs was begun
        self._grammars: set[str] = set()
        self._refused: list[CoreEvent] = []
        self._later: list[Command] = []  # arrived while a step ran, and are not for that time
        self._unreported = False  # a step has run of which the API process was not told
        self._stopping = False
        self._meanwhile = Meanwhile() if when_computing is not None else None
        if when_computing is not None and self._meanwhile is not None:
            when_computing(self._meanwhile.begin)

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
            if self._meanwhile is not None:
                self._meanwhile.close()
            if self._exchange is not None:
                self._exchange.close()
        if self._unreported and not self._link.closed:
            self._report(False)
        self._recorder.flush()
        self._link.flush()

    def turn(self) -> None:
        """Once around: what has arrived, a step if there is one, what it brought; else sleep for news."""
        arrived, self._later = self._later, []
        self._apply(arrived)
        self._apply(self._link.receive())
        if self._stopping:
            return
        if self._link.congested:
            self._link.wait()  # the API process lags: produce nothing until it has read
            return
        moved = self._exchange is not None and self._exchange.take_in()
        stepped = self._step()
        if stepped and self._meanwhile is not None and self._core.has_work:
            self._unreported = True  # it is reported while the next one computes
            return
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

    def _while_computing(self) -> None:
        """On the second thread, while the first one is in the kernels."""
        self._report(False)
        for command in self._link.receive():
            if self._later or isinstance(command, FOR_LATER) or self._core.must_wait(command):
                self._later.append(command)
            else:
                self._apply([command])
        if self._exchange is not None:
            self._exchange.take_in()
            self._exchange.hand_out()
        self._report(False)

    def _apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if self._stopping:
                return
            match command:
                case Shutdown():
                    self._stopping = True
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
        self._recorder.planned(began, plan)
        if plan is None:
            return False
        if self._iterations is not None:
            self._iterations.planned(plan)
        if self._exchange is not None:
            self._exchange.hand_out()  # what is moved now is moved while the step runs
        while plan is not None:
            plan = self._run(plan)
        return True

    def _run(self, plan: Plan) -> Plan | None:
        """Run a plan and book what came of it; what is to be run in its place if it failed."""
        if self._meanwhile is not None:
            self._meanwhile.arm(self._while_computing)
        result = self._result(plan)
        if self._meanwhile is not None:
            self._meanwhile.finish()
        now, again = self._clock.now(), None
        if result is None:
            self._recorder.add(Failed(now, STEP_FAILED))
            again = self._core.fail_step(plan, STEP_FAILED, now)
        else:
            self._recorder.add(Finished(now, result))
            self._core.finish_step(result, now)
        self._write_down(plan, result)
        return again

    def _result(self, plan: Plan) -> StepResult | None:
        """What the executor makes of it; None: it raised."""
        try:
            return self._executor.run(plan)
        except Exception:  # whatever a kernel or torch raises: only this plan's turns fail
            # What was raised may be about any of them: it is for the log, and for no client.
            log.exception("step %d failed, of %s", plan.step, [str(chunk.session) for chunk in plan.chunks])
            return None

    def _write_down(self, plan: Plan, result: StepResult | None) -> None:
        if self._iterations is not None:
            now = self._clock.now()
            self._iterations.ran(plan, result.seconds if result is not None else None, self._began, now)
            self._began = now

    def _report(self, news: bool) -> None:
        self._recorder.flush()  # what was told is in the log
        events = self._refused + self._core.take_events()
        self._refused = []
        if events or news or self._unreported:
            self._unreported = False
            view = self._core.view()
            if self._runs is not None:
                events, view = _with_runs(events, view, self._runs())
            if self._iterations is not None:
                events, view = self._iterations.reported(events, view)
            self._link.send(StepDone(events, view))


def _with_runs(
    events: Sequence[CoreEvent], view: WorkerView, runs: RunCounts
) -> tuple[list[CoreEvent], WorkerView]:
    """What is about to be told, with how steps were run in every view of the worker."""
    replace = msgspec.structs.replace
    told = [
        replace(event, worker=replace(event.worker, runs=runs)) if isinstance(event, Description) else event
        for event in events
    ]
    return told, replace(view, runs=runs)
