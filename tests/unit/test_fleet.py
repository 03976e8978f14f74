"""The fleet with made-up worker objects: starts that fail by the system's fault, closes in flight."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable

import pytest

from agentserve.messages import (
    Close,
    Command,
    Decided,
    Decisions,
    Devalue,
    Hello,
    Hint,
    Park,
    StepDone,
    Submit,
    TurnEnded,
    pack_tokens,
)
from agentserve.server.engine_port import EngineDown
from agentserve.server.workers import watch
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.slot import RestartPolicy
from agentserve.server.workers.supervisor import (
    KERNEL_THREADS,
    WorkerFailed,
    WorkerProcess,
    worker_environment,
)
from agentserve.types import FinishReason, Sampling, SessionId, TurnId
from tests.hello import made_up_hello
from tiering.policy.base import Departure, Hints, Residency

HELLO = made_up_hello(vocab_size=10, max_model_len=100, page_size=4, pages=10)
POLICY = RestartPolicy(first_pause=0.0, longest_pause=0.0, attempts=3)


class Worker(WorkerProcess):
    """Keeps what it was sent and reads none of it; dies when told to."""

    def __init__(self, fault: Exception | None = None, hello: Hello = HELLO) -> None:
        self.hello = hello
        self.sent: list[Command] = []
        self.died = asyncio.Event()
        self.ended = False
        self._fault = fault

    @property
    def pid(self) -> int:
        return 1

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def steps(self) -> AsyncIterator[StepDone]:
        await self.died.wait()
        if self._fault is not None:
            raise self._fault
        return
        yield

    def kill(self) -> None:
        self.died.set()

    async def end(self, grace: float = 0.0) -> str:
        self.ended = True
        return "ended"


class Starter:
    """Hands out what it was given, one per start; an exception is raised."""

    def __init__(self, *given: Worker | Exception) -> None:
        self.given = list(given)

    async def __call__(self, index: int) -> WorkerProcess:
        found = self.given.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def submit(session: str = "s") -> Submit:
    return Submit(SessionId(session), TurnId(1), pack_tokens(array("i", [1, 2])), Sampling(max_tokens=5))


async def end_of(turn: RunningTurn) -> TurnEnded:
    async with asyncio.timeout(20):
        last = [event async for event in turn][-1]
    assert isinstance(last, TurnEnded)
    return last


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (the fleet tells nobody)
            await asyncio.sleep(0)


async def test_a_start_that_fails_by_the_system_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Worker(), Worker()
    full = OSError(28, "No space left on device")
    async with Fleet(Starter(first, full, second), 1, POLICY) as fleet:
        turn = fleet.submit(submit())
        first.died.set()
        await until(lambda: bool(second.sent))
        assert fleet.alive == 1
        assert isinstance(second.sent[0], Submit)
        assert "No space left" in caplog.text
        fleet.abort(*turn.key)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"weights_digest": "12" * 32, "namespace": "12" * 32}, "the model's files are not those"),
        ({"namespace": "12" * 32, "backend": "cpu-avx2"}, "computes otherwise than the first worker"),
    ],
)
async def test_a_turn_never_goes_on_with_another_model(
    changed: dict[str, str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = made_up_hello(vocab_size=10, max_model_len=100, page_size=4, pages=10, **changed)
    first, foreign, second = Worker(), Worker(hello=other), Worker()
    async with Fleet(Starter(first, foreign, second), 1, POLICY) as fleet:
        turn = fleet.submit(submit())
        first.died.set()
        await until(lambda: bool(second.sent))
        assert foreign.ended
        assert not foreign.sent
        assert text in caplog.text
        fleet.abort(*turn.key)


async def test_workers_that_differ_do_not_start_together() -> None:
    other = made_up_hello(vocab_size=10, max_model_len=100, page_size=4, pages=10, weights_digest="12" * 32)
    workers = Worker(), Worker(hello=other)
    with pytest.raises(WorkerFailed, match="not those that the server started with"):
        await Fleet(Starter(*workers), 2, POLICY).start()
    assert all(worker.ended for worker in workers)


async def test_where_no_start_succeeds_any_more_turns_end_and_are_refused() -> None:
    first = Worker()
    async with Fleet(Starter(first, OSError("a"), OSError("b"), OSError("c")), 1, POLICY) as fleet:
        turn = fleet.submit(submit())
        first.died.set()
        ended = await end_of(turn)
        assert (ended.reason, ended.error) == (FinishReason.ERROR, "no worker is left")
        assert fleet.hopeless
        with pytest.raises(EngineDown):
            fleet.submit(submit("t"))


@pytest.mark.parametrize("others", [0, 1])
async def test_a_keeper_that_fails_otherwise_gives_its_place_up(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Worker(RuntimeError("a fault of ours"))
    second = [Worker() for _ in range(others)]
    async with Fleet(Starter(faulty, *second), 1 + others, POLICY) as fleet:
        turn = fleet.submit(submit())
        assert turn.slot == 0
        faulty.died.set()
        if others:
            await until(lambda: bool(second[0].sent))
            assert not fleet.hopeless
        else:
            assert (await end_of(turn)).error == "no worker is left"
            assert fleet.hopeless
        assert fleet.alive == others
        assert faulty.ended
        assert "a fault of ours" in caplog.text


async def test_a_closed_sessions_turn_does_not_go_on_when_its_worker_dies() -> None:
    first, second = Worker(), Worker()
    async with Fleet(Starter(first, second), 1, POLICY) as fleet:
        turn = fleet.submit(submit())
        fleet.close(SessionId("s"))
        assert isinstance(first.sent[-1], Close)
        first.died.set()  # before it has read any of it
        assert (await end_of(turn)).reason is FinishReason.ABORTED
        await until(lambda: bool(fleet.alive))
        assert not second.sent


class Clockless:
    """In place of `asyncio.sleep`: each look comes when the last is over, and `then` says what happened."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.looks = 0
        self._then = then

    async def __call__(self, seconds: float) -> None:
        self.looks += 1
        assert seconds == 1.0
        self._then(self.looks)


async def looks_until_killed(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[Worker, int], None], has_work: Callable[[], bool]
) -> int:
    worker = Worker()
    sleep = Clockless(lambda look: then(worker, look))
    monkeypatch.setattr(watch.asyncio, "sleep", sleep)
    await watch.kill_when_hung(worker, has_work, float(watch.LOOKS))
    assert worker.died.is_set()
    return sleep.looks


async def test_only_a_whole_span_of_silence_with_work_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(worker: Worker, look: int) -> None:
        pass

    def speaks_at_five(worker: Worker, look: int) -> None:
        worker.heard += look == 5

    assert await looks_until_killed(monkeypatch, nothing, lambda: True) == watch.LOOKS
    assert await looks_until_killed(monkeypatch, speaks_at_five, lambda: True) == 5 + watch.LOOKS
    work = iter([True] * 7 + [False] * 20 + [True] * watch.LOOKS)
    assert await looks_until_killed(monkeypatch, nothing, lambda: next(work)) == 27 + watch.LOOKS


def test_workers_do_not_spin_unless_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH_OF_MINE", "kept")
    found = worker_environment()
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert 0 < int(found["GOMP_SPINCOUNT"]) < 10_000
    assert found["PATH_OF_MINE"] == "kept"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert worker_environment()["OMP_WAIT_POLICY"] == "active"


class Reporting(Worker):
    """Reports what the test gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: asyncio.Queue[StepDone] = asyncio.Queue()

    async def steps(self) -> AsyncIterator[StepDone]:
        while True:
            yield await self.reports.get()


async def test_decisions_are_heard_whether_or_not_a_turn_runs() -> None:
    worker = Reporting()
    fleet = Fleet(Starter(worker), 1, POLICY)
    heard: list[Decisions] = []
    await fleet.start()
    made = Decisions(((SessionId("s"), 0, Decided(1.0, "host", "a while", 0.5, Residency(1, 0, 0, 0))),))
    worker.reports.put_nowait(StepDone([made]))  # nobody listens yet: no harm
    await until(worker.reports.empty)
    fleet.on_decisions(heard.append)
    worker.reports.put_nowait(StepDone([made]))
    await until(lambda: bool(heard))
    assert heard == [made]
    await fleet.stop()


async def test_only_the_worker_that_has_a_session_is_told_of_it() -> None:
    one, two, again = Worker(), Worker(), Worker()
    fleet = Fleet(Starter(one, two, again), 2, POLICY)
    await fleet.start()
    fleet.submit(submit())
    name = SessionId("s")
    news = [Hint(name, Hints(priority=1)), Devalue(name, Departure.ABANDONED)]
    parks = [Park(name, TurnId(1), True, ("t",), Hints(priority=1))]
    assert fleet.holds(name)
    assert not fleet.holds(SessionId("other"))
    for item in news:
        fleet.tell(item)
    fleet.park(parks[0])
    fleet.tell(Devalue(SessionId("other"), Departure.ABANDONED))
    assert one.sent[1:] == [*news, *parks]
    assert two.sent == []
    fleet.close(name)
    assert not fleet.holds(name)
    fleet.tell(news[1])
    assert one.sent[-1] == Close(name)
    fleet.submit(submit("dies"))
    one.kill()
    await until(lambda: again in [slot.worker for slot in fleet._slots])
    assert not any(isinstance(command, Devalue | Park | Hint) for command in [*two.sent, *again.sent])
    await fleet.stop()
