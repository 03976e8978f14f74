"""A worker that says nothing: it holds nobody up, what it said last is shown as old, and it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentserve.clock import VirtualClock
from agentserve.messages import Command, Describe, Description, StepDone, Submit
from agentserve.server.engine_port import FleetHealth, SeenSession, Silence
from agentserve.server.workers import views
from agentserve.server.workers.fleet import Fleet
from agentserve.types import SessionId
from tests.unit.test_fleet import POLICY, Starter, until
from tests.unit.test_questions import VIEW, Answering, submit

HANG = 120.0
A, B, C = (SessionId(name) for name in "abc")


class Stoppable(Answering):
    """Says nothing while it is stopped, and then all that it owes."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        self.owed: list[Command] = []

    def send(self, command: Command) -> None:
        if self.stopped:
            self.owed.append(command)
        else:
            super().send(command)

    def go_on(self) -> None:
        self.stopped = False
        for command in self.owed:
            super().send(command)


@asynccontextmanager
async def two(clock: VirtualClock) -> AsyncIterator[tuple[Fleet, Stoppable, Stoppable]]:
    workers = Stoppable(), Stoppable()
    async with Fleet(Starter(*workers), 2, POLICY, clock, HANG) as fleet:
        yield fleet, *workers


async def test_only_the_first_to_ask_waits_for_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    async with two(clock) as (fleet, first, _):
        turns = [fleet.submit(submit(name)) for name in (A, B)]
        before = await fleet.describe_sessions([A, B])
        assert [before[name].old for name in (A, B)] == [False, False]
        first.stopped = True
        clock.advance_to(5.0)
        with monkeypatch.context() as patch:
            patch.setattr(views, "ANSWER_SECONDS", 0.01)
            seen = await fleet.describe_sessions([A])
        assert seen[A] == SeenSession(before[A].view, before[A].at, old=True)
        monkeypatch.setattr(views, "ANSWER_SECONDS", 1e6)  # who waited for it now would never come back
        clock.advance_to(2e6)
        seen = await fleet.describe_sessions([A, B])
        assert seen[A] == SeenSession(before[A].view, before[A].at, old=True)
        assert (seen[B].at, seen[B].old) == (2e6, False)
        assert (await fleet.describe()).ages == {0: 2e6 - (before[A].at or 0.0), 1: 0.0}
        assert sum(isinstance(command, Describe) for command in first.owed) == 1, "it is asked once"
        first.go_on()
        await until(lambda: fleet.health().silent == ())
        assert not (await fleet.describe_sessions([A]))[A].old
        for turn in turns:
            fleet.abort(*turn.key)


async def test_of_a_session_that_was_never_seen_nothing_is_said_but_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "ANSWER_SECONDS", 0.01)
    async with two(VirtualClock()) as (fleet, first, _):
        first.stopped = True
        turn = fleet.submit(submit(A))
        assert await fleet.describe_sessions([A, C]) == {A: SeenSession(None, None, old=True)}
        fleet.close(A)
        assert await fleet.describe_sessions([A]) == {}
        fleet.abort(*turn.key)


async def test_who_has_work_and_says_nothing_is_told_and_then_not_counted_on() -> None:
    clock = VirtualClock()
    async with two(clock) as (fleet, first, second):
        clock.advance_to(1000.0)  # it had nothing to say until now
        assert fleet.health() == FleetHealth(2, 2)
        await until(lambda: not any(slot.unanswered for slot in fleet._slots))
        first.stopped = second.stopped = True
        turn = fleet.submit(submit(A))
        for seconds, silent, serving in ((9, 0, 2), (11, 1, 2), (29, 2, 2), (31, 2, 1), (60, 2, 0)):
            clock.advance_to(1000.0 + seconds)
            health = fleet.health()
            assert (len(health.silent), health.serving) == (silent, serving), seconds
        assert health.silent == (Silence(0, 1000.0), Silence(1, 1009.0)), "asked when somebody looked"
        second.go_on()
        await until(lambda: fleet.health().serving == 1)
        assert fleet.health().silent == (Silence(0, 1000.0),)
        fleet.abort(*turn.key)


async def test_new_turns_go_to_a_worker_that_speaks() -> None:
    clock = VirtualClock()
    async with two(clock) as (fleet, first, second):
        first.stopped = True
        turns = [fleet.submit(submit(A))]
        clock.advance_to(HANG / 2)
        turns += [fleet.submit(submit(name)) for name in ("d", "e", "f")]
        assert sum(isinstance(command, Submit) for command in second.sent) == 3
        for turn in turns:
            fleet.abort(*turn.key)


async def test_a_long_step_of_a_worker_that_reports_is_no_silence() -> None:
    clock = VirtualClock()
    async with two(clock) as (fleet, first, _):
        turn = fleet.submit(submit(A))
        first.stopped = True
        for _ in range(20):
            clock.advance_to(clock.now() + 9.0)
            first._steps.put_nowait(StepDone([], VIEW))
            await until(lambda: fleet._slots[0].heard_at == clock.now())
            assert fleet.health().silent == ()
        fleet.abort(*turn.key)


async def test_what_a_dead_worker_said_of_sessions_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stoppable(), Stoppable()
    async with Fleet(Starter(first, second), 1, POLICY, VirtualClock()) as fleet:
        turn = fleet.submit(submit(A))
        assert (await fleet.describe_sessions([A]))[A].view is not None
        second.stopped = True
        first.kill()
        await until(lambda: bool(second.owed))
        monkeypatch.setattr(views, "ANSWER_SECONDS", 0.01)
        assert await fleet.describe_sessions([A]) == {A: SeenSession(None, None, old=True)}
        fleet.abort(*turn.key)


def test_an_answer_about_a_session_that_was_closed_is_not_kept() -> None:
    clock = VirtualClock()
    kept = views.Views([], {}, clock, lambda slot: False, HANG)
    worker = Answering()
    worker.sent.append(submit(A))
    worker.send(Describe(1, A))
    (step,) = [worker._steps.get_nowait()]
    assert step is not None
    (description,) = step.events
    assert isinstance(description, Description)
    kept.answered(description)
    assert not kept._seen
