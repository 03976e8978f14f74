"""Runs turns: submit, fold tokens into deltas, and commit or roll back. The only place that does.

Every way out of a turn ends in exactly one of the two: a turn that completes is committed (on disk
too, where sessions are kept there) before its last delta is handed on; a cancelled task, a refusal
or a failure rolls it back.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentserve.clock import Clock
from agentserve.messages import StateChange, Submit, Token, TurnEnded, pack_tokens
from agentserve.metrics import Metrics
from agentserve.server.engine_port import WORKER_LOST, Engine, TurnStream
from agentserve.server.sessions.answer import Answer, Delta, Outcome
from agentserve.server.sessions.errors import (
    SessionClosed,
    StorageFailed,
    TurnCancelled,
    TurnFailed,
    TurnRefused,
    TurnShed,
)
from agentserve.server.sessions.origin import asked_by
from agentserve.server.sessions.request_log import Course, RequestLog
from agentserve.slo_classes import NO_PROMISE, Promise
from agentserve.types import FinishReason, Sampling, SessionId, TurnId


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has the turn: it was not refused at once."""


MOST_UNREAD = 16_384  # pieces of one request that wait for its reader; who is so far behind does not read

Piece = Started | Delta | Outcome
Emit = Callable[[Piece], None]


class Seat(Protocol):
    """Whom a turn runs for. `commit` and `rollback` are called once, one of them."""

    @property
    def key(self) -> SessionId: ...

    @property
    def turn(self) -> TurnId: ...

    @property
    def live(self) -> bool:
        """Whether the turn may still be committed: a session can be closed under it."""
        ...

    def note(self, change: StateChange) -> None: ...

    async def begun(self) -> None:
        """Wait until the turn's number cannot be used again, whatever happens. StorageFailed."""
        ...

    async def commit(self, prompt: array[int], outcome: Outcome) -> bool:
        """False when the session was closed meanwhile. StorageFailed if the turn cannot be kept."""
        ...

    def rollback(self, reason: str, *, abandoned: bool = False) -> None:
        """Undo the turn and tell the engine to forget what it need not know. abandoned: whoever wanted it
        has gone away."""
        ...


class Meter(Protocol):
    """Is told what turns cost, by whom they were asked for."""

    def begin(self, tenant: str, turns: int) -> None:
        """So many begin at once, or none: raises where they may not."""
        ...

    def end(self, tenant: str, turns: int) -> None: ...

    def spent(self, tenant: str, prompt: int, generated: int) -> None:
        """Tokens: of a prompt when the engine has it, of an answer at its end."""
        ...

    def judged(self, tenant: str, prompt: int, ended: TurnEnded) -> None:
        """What became of a turn's promises. One that was shed costs nothing."""
        ...


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One choice of one request, ready to run."""

    seat: Seat
    tenant: str
    prompt: array[int]
    sampling: Sampling
    answer: Callable[[], Answer]
    namespace: str = ""
    priority: int = 0
    promise: Promise = NO_PROMISE
    watch: Emit | None = None  # sees each piece when it is made, however slowly the pieces are read


class TurnRunner:
    def __init__(
        self, engine: Engine, metrics: Metrics, clock: Clock, meter: Meter, log: RequestLog | None = None
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._meter = meter
        self._log = log or RequestLog(metrics.requests, clock)

    async def choices(self, groups: Sequence[Sequence[TurnSpec]]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Run the choices of each prompt, one group a prompt; pieces of different choices interleave.

        A group's first choice leads: the others are submitted when its first token is there, so
        that the prompt is computed once and they find its KV. The first failure ends all of them.
        All are of one tenant; what its meter raises comes before any of them begins.
        """
        queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()
        specs = [spec for group in groups for spec in group]
        places = [place for group in groups for place in [(group[0], asyncio.Event())] * len(group)]
        courses = self._courses(specs)

        def emit(index: int, spec: TurnSpec, piece: Piece) -> None:
            if spec.watch is not None:
                spec.watch(piece)
            queue.put_nowait((index, piece))

        def check_room() -> None:
            if queue.qsize() >= MOST_UNREAD:
                raise TurnCancelled("The client does not read what is said to it.")

        async def guarded(index: int, spec: TurnSpec) -> None:
            problem: BaseException | None = None
            leader, prompt_ready = places[index]
            try:
                if spec is not leader:
                    await prompt_ready.wait()
                    if spec.seat.live:
                        self._engine.fork(leader.seat.key, spec.seat.key, len(spec.prompt))
                await self._run(
                    spec,
                    courses[index],
                    lambda piece: emit(index, spec, piece),
                    prompt_ready,
                    check_room,
                    leads=spec is leader,
                )
            except asyncio.CancelledError as error:
                # Does nothing after an end of its own.
                spec.seat.rollback(_why(error), abandoned=_abandoned(error))
                raise
            except Exception as error:
                problem = error
            queue.put_nowait((index, problem))

        tenant = specs[0].tenant
        self._begin(tenant, courses)
        tasks = [asyncio.create_task(guarded(index, spec)) for index, spec in enumerate(specs)]
        running = len(tasks)
        because: str | None = None
        try:
            while running:
                index, piece = await queue.get()
                if isinstance(piece, BaseException):
                    because = "another choice failed"
                    raise piece
                if piece is None:
                    running -= 1
                else:
                    yield index, piece
        finally:
            for task in tasks:
                task.cancel(because)
            await asyncio.gather(*tasks, return_exceptions=True)
            self._meter.end(tenant, len(specs))
            for spec in specs:  # of tasks that never began
                spec.seat.rollback(because or "cancelled", abandoned=because is None)
            for course in courses:
                self._log.over(course)

    def _begin(self, tenant: str, courses: Sequence[Course]) -> None:
        try:
            self._meter.begin(tenant, len(courses))
        except Exception:
            for course in courses:
                self._log.over_limit(course)
            raise

    def _courses(self, specs: Sequence[TurnSpec]) -> list[Course]:
        origin, now = asked_by(), self._clock.now()
        arrived = now if origin is None else origin.begin()
        return [
            self._log.begin(origin, arrived, spec.tenant, spec.seat.key, spec.seat.turn) for spec in specs
        ]

    async def _run(
        self,
        spec: TurnSpec,
        course: Course,
        emit: Emit,
        first_token: asyncio.Event,
        check_room: Callable[[], None],
        *,
        leads: bool,
    ) -> None:
        """One turn from submission to its outcome, which is the last piece emitted. leads: nobody has been
        told anything of its group yet."""
        seat = spec.seat
        submitted = False
        reason = FinishReason.ABORTED
        ended: TurnEnded | None = None
        try:
            if not seat.live:  # a Submit would open the session on the engine again
                raise SessionClosed
            command = self._command(spec, leads=leads)
            course.submit(command, self._clock.now())
            stream = self._engine.submit(command)
            submitted = True
            self._metrics.turn_submitted()
            self._meter.spent(spec.tenant, len(spec.prompt), 0)
            await seat.begun()  # while the engine computes: it costs the turn nothing
            answer, ended = await self._follow(spec, course, stream, emit, first_token, check_room=check_room)
            course.ended(ended)
            reason = ended.reason
            self._meter.judged(spec.tenant, len(spec.prompt), ended)
            self._check(ended, answer.stopped)
            if answer.stopped and reason is FinishReason.ABORTED:
                reason = FinishReason.STOP  # we ended it, at a stop string
            delta, outcome = answer.finish(reason, ended.usage)
            if not await seat.commit(spec.prompt, outcome):
                raise SessionClosed
            course.done(reason, self._clock.now())
            emit(delta)
            emit(outcome)
        except BaseException as error:
            if submitted and ended is None:
                self._engine.abort(seat.key, seat.turn)
                reason = (
                    FinishReason.ABORTED if isinstance(error, asyncio.CancelledError) else FinishReason.ERROR
                )
            elif isinstance(error, StorageFailed):
                reason = FinishReason.ERROR
            course.failed(error, self._clock.now())
            seat.rollback(_why(error), abandoned=_abandoned(error))
            raise
        finally:
            first_token.set()
            if submitted:
                self._metrics.turn_left(reason, ended.usage if ended else None)

    async def _follow(
        self,
        spec: TurnSpec,
        course: Course,
        stream: TurnStream,
        emit: Emit,
        first_token: asyncio.Event,
        *,
        check_room: Callable[[], None],
    ) -> tuple[Answer, TurnEnded]:
        answer = spec.answer()

        def say(piece: Piece) -> None:
            check_room()
            emit(piece)

        try:
            return answer, await self._read(spec, course, answer, stream, say, first_token=first_token)
        finally:
            self._meter.spent(spec.tenant, 0, answer.count)

    async def _read(
        self,
        spec: TurnSpec,
        course: Course,
        answer: Answer,
        stream: TurnStream,
        emit: Emit,
        *,
        first_token: asyncio.Event,
    ) -> TurnEnded:
        started = False
        last: float | None = None
        async for event in stream:
            if not started and not isinstance(event, TurnEnded):
                started = True
                emit(Started())
            if isinstance(event, StateChange):
                spec.seat.note(event)
                course.change(event)
                if event.reason == WORKER_LOST:
                    self._metrics.requests.worker_lost()
            elif isinstance(event, Token):
                if event.index < answer.count:
                    continue  # a repeat
                now = self._clock.now()
                self._metrics.token(None if last is None else now - last)
                last = now
                course.token(now)
                first_token.set()
                if answer.stopped:
                    self._engine.abort(spec.seat.key, spec.seat.turn)
                if delta := answer.push(event):
                    emit(delta)
            else:
                return event
        raise TurnFailed("The engine ended the turn without a result.")

    @staticmethod
    def _check(ended: TurnEnded, stopped: bool) -> None:
        """Endings that are not an answer become TurnErrors."""
        if ended.reason is FinishReason.REFUSED:
            raise TurnRefused(ended.error or "The request cannot run on this server.")
        if ended.reason is FinishReason.SHED:
            raise TurnShed(ended.error, ended.wait)
        if ended.reason is FinishReason.ERROR:
            raise TurnFailed(ended.error or "The engine failed on this turn.")
        if ended.reason is FinishReason.ABORTED and not stopped:
            raise TurnCancelled(ended.error or "The turn was cancelled.")

    @staticmethod
    def _command(spec: TurnSpec, *, leads: bool) -> Submit:
        return Submit(
            session=spec.seat.key,
            turn=spec.seat.turn,
            tokens=pack_tokens(spec.prompt),
            sampling=spec.sampling,
            namespace=spec.namespace,
            priority=spec.priority,
            tenant=spec.tenant,
            slo=spec.promise.slo,
            shed=spec.promise.shed and leads,
        )


def _why(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return str(error) or "cancelled"
    return str(error) or type(error).__name__


def _abandoned(error: BaseException) -> bool:
    """Nobody waits for the turn any more; a cancel for another reason names it."""
    return isinstance(error, asyncio.CancelledError) and not str(error)
