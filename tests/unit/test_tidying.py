"""When a process that serves collects cycles and gives memory back: by a collector that counts, and a clock
of CPU time that moves when a test says so."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from agentserve import heap
from agentserve.heap import FEW, GROWN, MANY, ROUNDS, FullCollections
from agentserve.server.tidying import WORKED, Memory, Tidying
from tests.api_rig import settled


class Counted:
    def __init__(self) -> None:
        self.young = ROUNDS
        self.held = 1000
        self.garbage = 0
        self.collections = 0

    def rounds(self) -> int:
        return self.young

    def blocks(self) -> int:
        return self.held

    def collect(self) -> None:
        self.collections += 1
        self.held -= self.garbage
        self.garbage = self.young = 0


@pytest.fixture
def thresholds() -> object:
    before = gc.get_threshold()
    yield before
    assert gc.get_threshold() == before


def test_python_no_longer_collects_by_itself_until_it_is_told_to(thresholds: object) -> None:
    full = FullCollections(Counted())
    full.start()
    assert gc.get_threshold()[2] > 10**9
    full.stop()


def test_small_heaps_are_collected_at_once_and_large_ones_when_it_is_quiet(thresholds: object) -> None:
    counted = Counted()
    full = FullCollections(counted)
    full.start()
    for held, quiet, collected in (
        (FEW, False, True), (FEW + 1, False, False), (FEW + 1, True, True), (MANY - 1, False, False),
        (MANY + 2 * FEW + 2, False, True),
    ):  # fmt: skip
        counted.young, counted.held = ROUNDS, 1000 + held
        assert full.look(quiet) is collected, held
        if not collected:
            assert full.look(False) is False
    counted.young, counted.held = ROUNDS - 1, 10 * MANY  # nothing can have grown old
    assert full.look(True) is False
    full.stop()


def test_garbage_is_bounded_however_busy_it_is(thresholds: object) -> None:
    """What lives grows to three times MANY, and for each object that lives one is left behind."""
    counted = Counted()
    full = FullCollections(counted)
    full.start()
    for lives in range(0, 3 * MANY, 10_000):
        counted.young = ROUNDS
        counted.held += 20_000
        counted.garbage += 10_000
        full.look(False)
        assert counted.garbage <= lives + MANY
    assert counted.collections < 20  # FEW, and then each time twice as much
    full.stop()


def test_the_real_one_finds_what_grew_old(thresholds: object) -> None:
    class Node:
        pass

    collector = heap.PythonsCollector()
    full = FullCollections(collector)
    full.start()
    try:
        node = Node()
        node.self = node  # type: ignore[attr-defined]
        for _ in range(ROUNDS + 1):
            gc.collect(1)
        assert collector.rounds() >= ROUNDS
        del node
        assert any(type(found) is Node for found in gc.get_objects())
        assert full.look(True)
        assert not any(type(found) is Node for found in gc.get_objects())
    finally:
        full.stop()


class Machine:
    def __init__(self) -> None:
        self.resident = 100 << 20
        self.pieces = 0
        self.computed = 0.0  # CPU seconds each time that it is asked for them
        self.spent = 0.0
        self.looks = 0
        self.given_back = 0

    def seconds(self) -> float:
        self.looks += 1
        self.spent += self.computed
        return self.spent

    def give_back(self) -> None:
        self.given_back += 1
        self.resident -= self.pieces
        self.pieces = 0


async def test_memory_is_given_back_when_it_is_quiet(thresholds: object) -> None:
    machine, counted = Machine(), Counted()
    memory = Memory(lambda: machine.resident, machine.give_back)
    tidying = Tidying(FullCollections(counted), memory, machine.seconds, interval=0.001)

    async def looked() -> None:
        before = machine.looks
        await settled(lambda: machine.looks > before + 8)

    tidying.start()
    await looked()
    machine.pieces = GROWN + 1
    machine.resident += machine.pieces
    await looked()
    assert machine.given_back == 0  # nothing was computed that could have left pieces
    machine.computed = WORKED
    counted.young, counted.held = ROUNDS, 1000 + FEW + 1
    done = counted.collections
    await looked()
    assert (machine.given_back, counted.collections) == (0, done)  # others would wait
    machine.computed = 0.0
    await settled(lambda: machine.given_back == 1)
    await looked()
    assert (machine.given_back, counted.collections) == (1, done + 1)
    machine.resident += 4 * GROWN  # which was in use, and then is in pieces
    for times in (2, 3):
        machine.computed = WORKED
        await looked()
        machine.computed = 0.0
        await settled(lambda times=times: machine.given_back == times)
        machine.pieces = 4 * GROWN
    await looked()
    assert machine.given_back == 3
    assert machine.resident < 100 + GROWN << 20
    await tidying.stop()
    await tidying.stop()


def test_what_the_system_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    heap.bound_pieces()
    heap.give_back()


@pytest.mark.skipif(not heap.resident(), reason="the system does not say")
def test_large_blocks_go_back_at_once() -> None:
    """In a process of its own: what is set is set for good."""
    script = (
        "from agentserve.heap import bound_pieces, resident\n"
        "bound_pieces()\n"
        "def crowd(): return [b'x' * (3 << 20) for _ in range(40)], [b'x' * 200 for _ in range(10)]\n"
        "import threading\n"
        "for _ in range(3): thread = threading.Thread(target=crowd); thread.start(); thread.join()\n"
        "before = resident(); held, small = crowd(); most = resident(); del held\n"
        "print(most - before > 100 << 20, resident() - before < 8 << 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], done
