"""Between core and mover: orders out, ends in, timers; and the worker's loop with both."""

from __future__ import annotations

import io
import logging
import socket
import threading
from array import array
from collections.abc import Callable, Iterator

import msgspec
import pytest

from agentserve.clock import VirtualClock, WallClock
from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.core.record import Entry, Ordered, Ticked, Transferred, decode_entries, orders_digest
from agentserve.messages import Command, Event, Shutdown, StepDone, Submit, TurnEnded, pack_tokens
from agentserve.server.workers.exchange import SHORTEST_SLEEP, Exchange, Tiering
from agentserve.server.workers.fault_log import BURST
from agentserve.server.workers.link import FrameDecoder, WorkerLink, encode_frame
from agentserve.server.workers.loop import WorkerLoop
from agentserve.server.workers.recorder import Recorder
from agentserve.types import KVGroup, Sampling, SessionId, TurnId
from tests.tiers import FakeMover, FakeTierCore, done, transfer
from tests.unit.test_loop import Executor
from tiering.types import Change, TierFault, Word


class Log:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.active = False

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)


class Desk:
    """An exchange and both its sides."""

    def __init__(self) -> None:
        self.core, self.mover, self.clock, self.log = FakeTierCore(), FakeMover(), VirtualClock(), Log()
        self.released = False
        self.exchange = Exchange(Tiering(self.core, self.mover, self.release), self.clock, self.log)

    def release(self) -> None:
        self.released = True


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.mover.release()


def test_orders_go_out_once_and_in_order(desk: Desk) -> None:
    desk.core.orders = [transfer(1), transfer(2)]
    desk.exchange.hand_out()
    desk.exchange.hand_out()
    assert [order.id for order in desk.mover.taken] == [1, 2]
    assert desk.log.entries == []


def test_a_log_keeps_a_digest_of_the_orders_for_its_replay_to_compare(desk: Desk) -> None:
    desk.log.active = True
    orders = [transfer(1), transfer(2)]
    desk.core.orders = orders
    desk.exchange.hand_out()
    desk.exchange.hand_out()
    assert desk.log.entries == [Ordered(orders_digest(orders))]
    assert orders_digest(orders) != orders_digest(orders[:1]) != orders_digest([]) == b""


def test_ends_come_in_and_are_recorded_as_the_core_got_them(desk: Desk) -> None:
    desk.clock.advance_to(5.0)
    assert not desk.exchange.take_in()
    first, second = done(transfer(1)), done(transfer(2), "no space left")
    desk.mover.finish(first, second)
    assert desk.exchange.take_in()
    assert desk.core.finished == [((first, second), 5.0)]
    assert desk.log.entries == [Transferred(5.0, (first, second))]
    assert not desk.exchange.take_in()


def test_a_timer_ticks_when_it_is_due_and_not_before(desk: Desk) -> None:
    desk.core.timers = [2.0, 3.0]
    assert not desk.exchange.take_in()
    assert desk.exchange.sleep_at_most(None) == 2.0
    assert desk.exchange.sleep_at_most(0.05) == 0.05
    desk.clock.advance_to(2.5)
    assert desk.exchange.sleep_at_most(None) == SHORTEST_SLEEP, "it is due, but not served yet"
    assert not desk.exchange.take_in(), "nothing was moved"
    assert desk.core.ticks == [2.5]
    assert desk.log.entries == [Ticked(2.5)]
    assert desk.exchange.sleep_at_most(None) == 0.5
    desk.core.timers = []
    assert desk.exchange.sleep_at_most(None) is None
    assert desk.exchange.sleep_at_most(0.05) == 0.05


def test_a_failing_disk_is_said_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(1, 5):
            desk.mover.finish(done(transfer(number), "no space left"))
            desk.exchange.take_in()
        desk.mover.finish(done(transfer(5), "input/output error"))
        desk.exchange.take_in()
    assert [record.getMessage() for record in caplog.records] == [
        "transfer 1: no space left",
        "transfer 5: input/output error",
    ]


def test_damaged_blocks_are_said_in_sums(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(1, 9):
            faults = (TierFault.CORRUPT,) * number
            end = msgspec.structs.replace(done(transfer(number), "its checksum is wrong"), faults=faults)
            desk.mover.finish(end)
            desk.exchange.take_in()
        desk.mover.finish(msgspec.structs.replace(end, error="EIO", faults=(TierFault.UNREADABLE,)))
        desk.exchange.take_in()
        desk.exchange.close()
    start = "faults of KV on disk since the last such line: "
    assert [record.getMessage() for record in caplog.records] == [
        start + "1 corrupt",
        "transfer 8: EIO",
        start + "35 corrupt, 1 unreadable",
    ]


def test_what_is_held_of_faults_is_said_by_an_idle_worker_too(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        end = msgspec.structs.replace(done(transfer(number), "wrong"), faults=(TierFault.CORRUPT,))
        desk.mover.finish(end)
        desk.exchange.take_in()
    assert len(caplog.records) == 1
    assert desk.exchange.sleep_at_most(None) == BURST
    assert desk.exchange.sleep_at_most(1.0) == 1.0
    desk.clock.advance_to(desk.clock.now() + BURST)
    assert not desk.exchange.take_in()
    assert len(caplog.records) == 2
    assert desk.exchange.sleep_at_most(None) is None
    assert desk.log.entries[2:] == []  # the core hears nothing of it


def test_stores_are_closed_only_when_nothing_uses_them(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.mover.stuck = True
    desk.exchange.close()
    assert not desk.released, "its stores are still used"
    assert "a transfer does not end" in caplog.text
    desk.mover.stuck = False
    desk.exchange.close()
    assert desk.released


# --- the loop ------------------------------------------------------------------------------

CONFIG = CoreConfig(page_size=4, max_model_len=64, max_num_seqs=4, max_batched_tokens=8)


class Watching(Executor):
    """Calls back while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self.during: Callable[[], None] = lambda: None

    def run(self, plan: Plan) -> StepResult:
        self.during()
        return super().run(plan)


class Ordering(EngineCore):
    """A core that orders a transfer with its first plan."""

    def __init__(self, tiers: FakeTierCore) -> None:
        super().__init__(CONFIG, (KVGroup("full", (0,), 1),), (40,))
        self.desk = tiers
        self.begun = 0

    def begin_step(self, now: float) -> Plan | None:
        plan = super().begin_step(now)
        if plan is not None:
            self.begun += 1
            if self.begun == 1:
                self.desk.orders.append(transfer(1))
        return plan


class TieredWorker:
    """A loop in a thread with a real core, stand-ins for its tiers, and the API process's end."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair(socket.AF_UNIX)
        self.peer.settimeout(20)
        self.tiers, self.mover, self.executor, self.log = (
            FakeTierCore(),
            FakeMover(),
            Watching(),
            io.BytesIO(),
        )
        self.core = Ordering(self.tiers)
        clock, recorder = WallClock(), Recorder(self.log)
        self.link = WorkerLink(ours)
        self.loop = WorkerLoop(
            self.core,
            self.executor,
            self.link,
            clock=clock,
            recorder=recorder,
            exchange=Exchange(Tiering(self.tiers, self.mover, lambda: None), clock, recorder),
        )
        self.thread = threading.Thread(target=self.loop.run)
        self._frames = FrameDecoder(msgspec.msgpack.Decoder(Event))
        self.steps: list[StepDone] = []

    def send(self, *commands: Command) -> None:
        self.peer.sendall(b"".join(encode_frame(command) for command in commands))

    def read(self) -> None:
        """The next frames; blocks until there are some."""
        for event in self._frames.feed(self.peer.recv(65536)):
            assert isinstance(event, StepDone)
            self.steps.append(event)

    def until_ended(self) -> None:
        while not any(isinstance(event, TurnEnded) for step in self.steps for event in step.events):
            self.read()

    def left(self) -> bool:
        self.thread.join(20)
        return not self.thread.is_alive()


@pytest.fixture
def worker() -> Iterator[TieredWorker]:
    worker = TieredWorker()
    yield worker
    worker.peer.close()
    assert worker.left()
    assert worker.mover.closed
    worker.link.close()
    worker.mover.release()


def submit(count: int) -> Submit:
    tokens = pack_tokens(array("i", [1, 2, 3]))
    return Submit(SessionId("a"), TurnId(1), tokens, Sampling(max_tokens=count))


def test_the_tiers_are_told_of_before_anything_is_asked(worker: TieredWorker) -> None:
    worker.thread.start()
    worker.read()
    assert worker.steps[0].events == []
    assert worker.steps[0].worker is not None


def test_what_a_plan_orders_is_moved_while_its_step_runs(worker: TieredWorker) -> None:
    seen: list[list[int]] = []
    worker.executor.during = lambda: seen.append([order.id for order in worker.mover.taken])
    worker.thread.start()
    worker.send(submit(3))
    worker.until_ended()
    assert seen == [[1], [1], [1]]


def test_an_end_wakes_an_idle_worker_and_its_orders_follow(worker: TieredWorker) -> None:
    told = threading.Event()
    finish = worker.tiers.finish_transfers

    def finished(ends, now) -> None:
        finish(ends, now)
        worker.tiers.orders.append(transfer(9))

    worker.tiers.finish_transfers = finished
    submitted = worker.mover.submit

    def take(order) -> None:
        submitted(order)
        told.set()

    worker.mover.submit = take
    worker.thread.start()
    worker.read()  # it is up, and sleeps without a limit
    worker.mover.finish(done(transfer(1)))
    assert told.wait(20)
    assert [order.id for order in worker.mover.taken] == [9]
    worker.read()  # and says how its tiers are now, though no step ran
    assert worker.steps[-1].events == []
    entries = list(decode_entries(worker.log.getvalue()))
    assert [entry.done[0].id for entry in entries if isinstance(entry, Transferred)] == [1]


def test_a_timer_wakes_an_idle_worker(worker: TieredWorker) -> None:
    worker.tiers.timers = [WallClock().now() + 0.02]
    due, ticked, tick = worker.tiers.timers[0], threading.Event(), worker.tiers.tick

    def noted(now: float) -> None:
        tick(now)
        ticked.set()

    worker.tiers.tick = noted
    worker.thread.start()
    assert ticked.wait(20)
    assert worker.tiers.ticks[0] >= due


def test_leaving_with_work_in_flight(worker: TieredWorker) -> None:
    worker.thread.start()
    worker.send(submit(2))
    worker.until_ended()
    assert [order.id for order in worker.mover.taken] == [1], "and it has not ended"
    worker.send(Shutdown())
    assert worker.left()
    assert worker.mover.closed


def test_the_mover_is_closed_when_the_loop_breaks(worker: TieredWorker) -> None:
    def broken(ends, now) -> None:
        raise RuntimeError("broken")

    worker.tiers.finish_transfers = broken
    worker.mover.finish(done(transfer(1)))
    with pytest.raises(RuntimeError, match="broken"):
        worker.loop.run()
    assert worker.mover.closed
    worker.thread.start()  # for the fixture: the loop meets a closed link's end


def test_what_is_said_of_orders_follows_them_and_is_in_the_logs_digest() -> None:
    desk = Desk()
    desk.log.active = True
    changes = [Change(1, Word.HURRY), Change(2, Word.CANCEL)]
    desk.core.orders, desk.core.changes = [transfer(2)], list(changes)
    desk.exchange.hand_out()
    assert desk.mover.changes == changes
    desk.core.changes = changes[1:]
    desk.exchange.hand_out()
    assert desk.log.entries == [
        Ordered(orders_digest([transfer(2)], changes)),
        Ordered(orders_digest([], changes[1:])),
    ]
    assert orders_digest([transfer(2)]) != orders_digest([transfer(2)], changes)
    desk.mover.release()
