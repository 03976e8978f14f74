"""What workers are asked, and the fleet's answers from it: views of sessions, of tiers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

from agentserve.clock import VirtualClock
from agentserve.messages import (
    Command,
    Describe,
    Description,
    SessionView,
    StepDone,
    Submit,
    TiersView,
    WorkerView,
    pack_tokens,
)
from agentserve.server.engine_port import TierReport
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.questions import Questions
from agentserve.server.workers.slot import RestartPolicy, Slot
from agentserve.types import Sampling, SessionId, SessionState, TurnId
from tests.unit.test_fleet import POLICY, Starter, Worker

VIEW = WorkerView(0, 0, 0, 50, 50, 0, 0)


def slot_of(worker: Worker | None) -> Slot:
    slot = Slot(0, RestartPolicy())
    slot.worker = worker
    return slot


async def test_answers_come_in_the_order_of_the_questions() -> None:
    questions, slot = Questions(), slot_of(worker := Worker())
    asking = asyncio.create_task(questions.ask([(slot, Describe), (slot, Describe), (slot, Describe)], 20.0))
    await asyncio.sleep(0)
    first, second, third = (command.request for command in worker.sent if isinstance(command, Describe))
    assert slot.unanswered
    answers = {request: Description(request, VIEW) for request in (third, first, second)}
    for answer in answers.values():
        questions.answered(answer)
    assert await asking == [answers[first], answers[second], answers[third]]


async def test_who_is_gone_dies_or_is_slow_answers_nothing() -> None:
    questions = Questions()
    assert await questions.ask([(slot_of(None), Describe)], 20.0) == [None]
    assert await questions.ask([], 20.0) == []
    slot = slot_of(Worker())
    asking = asyncio.create_task(questions.ask([(slot, Describe)], 20.0))
    await asyncio.sleep(0)
    questions.abandon(1)
    questions.abandon(0)
    assert await asking == [None]
    assert await questions.ask([(slot, Describe)], 0.0) == [None]
    questions.answered(Description(3, VIEW))  # too late: nobody waits for it
    questions.answered(Description(99, VIEW))


class Answering(Worker):
    """Reports what it was given, and answers every Describe."""

    def __init__(self, tiers: TiersView | None = None) -> None:
        super().__init__()
        self.view = WorkerView(0, 0, 0, 50, 50, 0, 0, tiers)
        self._steps: asyncio.Queue[StepDone | None] = asyncio.Queue()

    def report(self, tiers: TiersView) -> None:
        self.view = WorkerView(0, 0, 0, 50, 50, 0, 0, tiers)
        self._steps.put_nowait(StepDone([], self.view))

    def send(self, command: Command) -> None:
        super().send(command)
        if isinstance(command, Describe):
            name, shown = command.session, None
            if name is not None and any(isinstance(c, Submit) and c.session == name for c in self.sent):
                shown = SessionView(name, SessionState.IDLE, TurnId(1), 2, 2, 1, 0)
            self._steps.put_nowait(StepDone([Description(command.request, self.view, shown)]))

    def kill(self) -> None:
        self._steps.put_nowait(None)

    async def steps(self) -> AsyncIterator[StepDone]:
        while (step := await self._steps.get()) is not None:
            yield step


def submit(session: str) -> Submit:
    return Submit(SessionId(session), TurnId(1), pack_tokens(array("i", [1, 2])), Sampling(max_tokens=5))


async def test_each_sessions_own_worker_is_asked() -> None:
    workers = Answering(), Answering()
    async with Fleet(Starter(*workers), 2, POLICY) as fleet:
        turns = [fleet.submit(submit(name)) for name in ("a", "b", "c")]
        names = [SessionId(name) for name in ("c", "never seen", "a")]
        seen = await fleet.describe_sessions(names)
        assert sorted(seen) == ["a", "c"]
        assert all(found.view and found.view.session == name for name, found in seen.items())
        assert not any(found.old for found in seen.values())
        asked = [c.session for worker in workers for c in worker.sent if isinstance(c, Describe)]
        assert sorted(asked) == ["a", "c"], "one question each"
        assert await fleet.describe_sessions([]) == {}
        for turn in turns:
            fleet.abort(*turn.key)


async def test_tiers_are_told_as_last_reported_and_counters_outlive_workers() -> None:
    first, second = Answering(), Answering()
    clock = VirtualClock()
    async with Fleet(Starter(first, second), 1, POLICY, clock) as fleet:
        assert fleet.tiers() == ()
        bad = TiersView(disk_budget=9, hit_tokens={"disk": 16}, disk_error="full")
        clock.advance_to(7.0)
        first.report(bad)
        await fleet.describe()
        assert fleet.tiers() == (TierReport(0, bad, 7.0),)
        first.kill()
        async with asyncio.timeout(20):
            while not fleet.alive or fleet.tiers():  # noqa: ASYNC110  (the fleet tells nobody)
                await asyncio.sleep(0)
        (view,) = (await fleet.describe()).workers
        assert view.tiers is not None
        assert (view.tiers.hit_tokens, view.tiers.disk_error) == ({"disk": 16}, "")
        second.report(TiersView(disk_budget=9, hit_tokens={"disk": 4}))
        (view,) = (await fleet.describe()).workers
        assert view.tiers is not None
        assert view.tiers.hit_tokens == {"disk": 20}
