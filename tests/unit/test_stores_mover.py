"""The mover on real stores: order, cancellation, ends. Threads are held and let go by events."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentserve.clock import WallClock
from tests.kv_pages import KV_DTYPES
from tests.mover_rig import PAGES, PATIENCE, Rig, replace_block
from tiering.stores.faults import DISK_COMMIT, DISK_PAYLOAD, DISK_READ, HOST_COPY
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.types import Move, TierFault, Transfer, TransferDone


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "kv")
    yield rig
    rig.close()


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[Rig]:
    """Two blocks a step."""
    rig = Rig(tmp_path / "kv", step_blocks=2)
    yield rig
    rig.close()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_around_all_tiers_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    rig = Rig(tmp_path / "kv", dtype)
    assert rig.move(Move.SAVE).ok == (True,) * PAGES
    rig.wipe()
    assert rig.move(Move.LOAD).ok == (True,) * PAGES
    assert rig.holds(range(PAGES))
    assert rig.move(Move.WRITE).ok == (True,) * PAGES
    rig.wipe()
    assert rig.move(Move.FETCH).ok == (True,) * PAGES
    assert rig.holds(range(PAGES))
    assert rig.move(Move.DROP).ok == (True,) * PAGES
    assert rig.disk.entries() == []
    done = rig.move(Move.FETCH)
    assert (done.ok, done.error, done.cancelled) == ((False,) * PAGES, "missing on disk", False)
    rig.close()


def test_blocks_go_to_other_pages_and_slots_than_they_came_from(rig: Rig) -> None:
    there = [replace_block(block, slot=PAGES - 1 - block.slot) for block in rig.blocks]
    back = [
        replace_block(block, pages=((number * 7) % PAGES, (number * 5) % PAGES))
        for number, block in enumerate(there)
    ]
    rig.move(Move.SAVE, there)
    rig.wipe()
    assert all(rig.move(Move.LOAD, back).ok)
    for number in range(PAGES):
        for group, page in enumerate(back[number].pages):
            assert torch.equal(rig.raw(group)[page], rig.before[group][number])


def test_seconds_and_pending(rig: Rig) -> None:
    assert (rig.mover.pending, rig.mover.poll()) == (0, [])
    assert select.select([rig.mover.fileno()], [], [], 0)[0] == []
    number = rig.submit(Move.SAVE)
    assert rig.mover.pending == 1
    with pytest.raises(ValueError, match="under way"):
        rig.mover.submit(Transfer(number, Move.SAVE, ()))
    (done,) = rig.wait()
    assert done.id == number
    assert done.seconds > 0
    assert rig.mover.pending == 0
    assert select.select([rig.mover.fileno()], [], [], 0)[0] == []


def test_a_transfer_of_nothing_ends(rig: Rig) -> None:
    for move in Move:
        done = rig.move(move, [])
        assert (done.ok, done.error, done.cancelled) == ((), "", False)


# --- order -----------------------------------------------------------------------------------


def test_urgent_ones_go_first_others_in_order(rig: Rig) -> None:
    rig.gate.hold(HOST_COPY)
    first = rig.submit(Move.SAVE, rig.blocks[:1])
    rig.gate.await_arrival(HOST_COPY)
    plain = [rig.submit(Move.SAVE, rig.blocks[at : at + 1]) for at in (1, 2)]
    urgent = [rig.submit(Move.SAVE, rig.blocks[at : at + 1], urgent=True) for at in (3, 4)]
    rig.gate.release()
    assert [done.id for done in rig.wait(5)] == [first, *urgent, *plain]


def test_an_urgent_fetch_does_not_wait_for_the_end_of_a_long_write(paced: Rig) -> None:
    paced.move(Move.SAVE)
    paced.move(Move.WRITE, paced.blocks[:2])
    paced.gate.hold(DISK_COMMIT)
    write = paced.submit(Move.WRITE, paced.blocks[2:])
    paced.gate.await_arrival(DISK_COMMIT)  # in its first step
    fetch = paced.submit(Move.FETCH, paced.blocks[:2], urgent=True)
    paced.gate.let_pass(DISK_COMMIT)
    assert [done.id for done in paced.wait()] == [fetch]
    paced.gate.release()
    (done,) = paced.wait()
    assert (done.id, all(done.ok)) == (write, True)


def test_a_slow_disk_delays_no_host_copy(rig: Rig) -> None:
    rig.move(Move.SAVE)
    rig.move(Move.WRITE)
    rig.gate.hold(DISK_READ)
    slow = rig.submit(Move.FETCH, urgent=True)
    rig.gate.await_arrival(DISK_READ)
    for _ in range(20):
        assert all(rig.move(Move.SAVE).ok)
        assert all(rig.move(Move.LOAD).ok)
    assert rig.mover.pending == 1
    rig.gate.release()
    (done,) = rig.wait()
    assert (done.id, all(done.ok)) == (slow, True)


# --- taken back --------------------------------------------------------------------------------


def test_what_waits_is_taken_back_whole_and_at_once(rig: Rig) -> None:
    rig.gate.hold(HOST_COPY)
    first = rig.submit(Move.SAVE, rig.blocks[:1])
    rig.gate.await_arrival(HOST_COPY)
    second = rig.submit(Move.SAVE, rig.blocks[1:])
    rig.cancel(second)
    (done,) = rig.wait()
    assert (done.id, done.ok, done.cancelled) == (second, (False,) * (PAGES - 1), True)
    rig.cancel(second)  # once more: nothing
    rig.cancel(999)
    rig.gate.release()
    (done,) = rig.wait()
    assert (done.id, done.ok, done.cancelled) == (first, (True,), False)
    rig.cancel(first)
    assert rig.mover.poll() == []


@pytest.mark.parametrize("move", [Move.LOAD, Move.FETCH])
def test_a_load_is_taken_back_between_two_blocks(rig: Rig, move: Move) -> None:
    """It counts as never begun: the blocks are still below."""
    point = HOST_COPY if move is Move.LOAD else DISK_READ
    rig.move(Move.SAVE)
    rig.move(Move.WRITE)
    rig.wipe()
    rig.gate.hold(point)
    number = rig.submit(move)
    for _ in range(3):
        rig.gate.await_arrival(point)
        rig.gate.let_pass(point)
    rig.gate.await_arrival(point)  # before the fourth
    rig.cancel(number)
    rig.gate.release()
    (done,) = rig.wait()
    assert (done.ok, done.cancelled, done.error) == ((False,) * PAGES, True, "")
    assert rig.holds(range(4))
    assert not rig.holds(range(4, 5))
    assert all(rig.move(move).ok)


@pytest.mark.parametrize("move", [Move.SAVE, Move.WRITE])
def test_what_was_copied_before_it_was_taken_back_is_told(paced: Rig, move: Move) -> None:
    point, at_a_time = (HOST_COPY, 1) if move is Move.SAVE else (DISK_COMMIT, 2)
    paced.gate.hold(point)
    number = paced.submit(move)
    for _ in range(4 // at_a_time):
        paced.gate.await_arrival(point)
        paced.gate.let_pass(point)
    paced.gate.await_arrival(point)
    paced.cancel(number)
    paced.gate.release()
    (done,) = paced.wait()
    moved = 4 + at_a_time  # the one at the gate, too
    assert done.ok == (True,) * moved + (False,) * (PAGES - moved)
    assert not done.cancelled
    assert done.error == f"cancelled after {moved} of {PAGES} blocks"


# --- failures -----------------------------------------------------------------------------------


def test_a_corrupt_block_is_a_miss_and_the_others_are_loaded(rig: Rig) -> None:
    rig.move(Move.SAVE)
    rig.gate.spoil = lambda data: data.__setitem__(data.nbytes - 1, data[-1] ^ 1)
    rig.move(Move.WRITE, rig.blocks[5:6])
    rig.gate.spoil = None
    rig.move(Move.WRITE, rig.blocks[:5] + rig.blocks[6:])
    rig.wipe()
    done = rig.move(Move.FETCH)
    assert done.ok == (True,) * 5 + (False,) + (True,) * (PAGES - 6)
    assert done.error == "its checksum is wrong"
    assert done.faults == (TierFault.CORRUPT,)
    assert rig.holds(range(5))
    assert rig.holds(range(6, PAGES))
    assert rig.blocks[5].key not in {entry.key for entry in rig.disk.entries()}


def test_tokens_that_disagree_are_a_miss(rig: Rig) -> None:
    rig.move(Move.SAVE)
    rig.move(Move.WRITE)
    liar = replace_block(rig.blocks[3], tokens=rig.blocks[4].tokens)
    assert rig.move(Move.FETCH, [liar]).ok == (False,)


@pytest.mark.parametrize("move", [Move.SAVE, Move.LOAD, Move.WRITE, Move.FETCH, Move.DROP])
def test_whatever_raises_ends_the_transfer_and_nothing_else(rig: Rig, move: Move) -> None:
    rig.move(Move.SAVE)
    rig.move(Move.WRITE)
    points = (HOST_COPY, DISK_READ, DISK_PAYLOAD, DISK_COMMIT)
    rig.gate.error = {point: RuntimeError(f"no luck\nat {point}") for point in points}
    done = rig.move(move)
    assert done.ok == (False,) * PAGES
    assert done.error.startswith("no luck at ")
    rig.gate.error = {}
    assert all(rig.move(move).ok)


def test_orders_that_make_no_sense_fail_alone(rig: Rig) -> None:
    block = rig.blocks[0]
    for move, wrong in [
        (Move.SAVE, replace_block(block, slot=PAGES)),
        (Move.SAVE, replace_block(block, pages=())),
        (Move.LOAD, replace_block(block, pages=(0, PAGES))),
        (Move.LOAD, replace_block(block, slot=-1)),
        (Move.WRITE, replace_block(block, slot=-1)),
        (Move.WRITE, replace_block(block, parent=b"short")),
    ]:
        done = rig.move(move, [wrong])
        assert done.ok == (False,)
        assert done.error
    assert all(rig.move(Move.SAVE).ok)


def test_without_a_tier_its_transfers_fail_with_a_reason(rig: Rig) -> None:
    bare = Mover(rig.pages, None, None, WallClock())
    for number, move in enumerate(Move, 1):
        bare.submit(Transfer(number, move, tuple(rig.blocks[:1])))
    bare.close(PATIENCE)
    moves = dict(enumerate(Move, 1))
    errors = {moves[done.id]: (done.ok, done.error, done.cancelled) for done in bare.poll()}
    assert len(errors) == len(Move)
    assert not any(any(ok) for ok, _, _ in errors.values())
    del errors[Move.PROBE]  # that nobody has it is an answer
    assert all(error or cancelled for _, error, cancelled in errors.values())


def test_slots_of_another_size_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="host slots of"):
        Mover(rig.pages, HostStore(2, 64), None, WallClock())


# --- ends ----------------------------------------------------------------------------------------


def test_close_with_work_queued_answers_everything_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.move(Move.SAVE)
    rig.gate.hold(HOST_COPY)
    rig.gate.hold(DISK_COMMIT)
    running = [rig.submit(Move.LOAD), rig.submit(Move.WRITE)]
    rig.gate.await_arrival(HOST_COPY)
    rig.gate.await_arrival(DISK_COMMIT)
    queued = [rig.submit(move) for move in (Move.SAVE, Move.FETCH, Move.DROP, Move.WRITE)]
    closing = threading.Thread(target=rig.mover.close, args=(PATIENCE,))
    closing.start()
    done = rig.wait(len(queued))
    assert [end.cancelled for end in done] == [True] * len(queued)
    rig.gate.release()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    late = rig.submit(Move.SAVE)
    done += rig.mover.poll()
    assert sorted(end.id for end in done) == [*running, *queued, late]
    by_id = {end.id: end for end in done}
    assert by_id[late].error == "the mover is closed"
    assert rig.mover.pending == 0
    assert rig.mover.close()
    rig.disk.close()


def test_close_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.move(Move.SAVE)
    rig.gate.hold(DISK_COMMIT)
    hanging, behind = rig.submit(Move.WRITE), rig.submit(Move.DROP)
    rig.gate.await_arrival(DISK_COMMIT)
    assert rig.mover.close(timeout=0.01) is False
    done = {end.id: end for end in rig.mover.poll()}
    assert sorted(done) == [hanging, behind]
    assert done[hanging].error == "the mover was closed while it ran"
    assert not done[hanging].cancelled
    rig.gate.release()
    for thread in threading.enumerate():
        if thread.name == "kv-disk":
            thread.join(PATIENCE)
    assert rig.mover.poll() == []  # no second answer
    rig.disk.close()


def test_threads_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.move(Move.SAVE)
    rig.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_ordered_and_taken_back_every_transfer_ends_once(tmp_path: Path, seed: int) -> None:
    """Threads run freely; the model knows which blocks must be in a slot or on disk."""
    rig, choose = Rig(tmp_path / "kv", step_blocks=2), random.Random(seed)
    rig.move(Move.SAVE)
    on_disk: set[int] = set()
    under_way: dict[int, tuple[Move, list[int]]] = {}
    ended: list[int] = []

    def learn(done: list[TransferDone]) -> None:
        for end in done:
            move, numbers = under_way.pop(end.id)
            ended.append(end.id)
            assert len(end.ok) == len(numbers)
            assert not (end.cancelled and any(end.ok))
            assert end.faults == ()
            moved = {number for number, ok in zip(numbers, end.ok, strict=True) if ok}
            if move is Move.WRITE:
                on_disk.update(moved)
            elif move is Move.DROP:
                on_disk.difference_update(moved)
            elif move is Move.FETCH and not end.cancelled:
                assert moved == set(numbers), end.error
            else:
                assert end.cancelled or moved == set(numbers) or "cancelled after" in end.error

    for _ in range(150):
        busy = {number for _, numbers in under_way.values() for number in numbers}
        free = [number for number in range(PAGES) if number not in busy]
        move = choose.choice([Move.SAVE, Move.LOAD, Move.WRITE, Move.FETCH, Move.DROP])
        if move in (Move.FETCH, Move.DROP):
            free = [number for number in free if number in on_disk]
        numbers = choose.sample(free, min(len(free), choose.randrange(1, 8)))
        number = rig.submit(move, [rig.blocks[at] for at in numbers], urgent=choose.random() < 0.3)
        under_way[number] = (move, numbers)
        if choose.random() < 0.3:
            rig.cancel(choose.choice(list(under_way)))
        learn(rig.mover.poll())
        assert rig.mover.pending == len(under_way)
    while under_way:
        learn(rig.wait())
    assert sorted(ended) == list(range(2, rig.ids + 1))
    assert {entry.key for entry in rig.disk.entries()} == {rig.blocks[number].key for number in on_disk}
    assert rig.holds(range(PAGES))
    rig.wipe()
    assert all(rig.move(Move.FETCH, [rig.blocks[number] for number in sorted(on_disk)]).ok)
    assert all(rig.holds(range(number, number + 1)) for number in on_disk)
    rig.close()


def test_one_that_is_hurried_passes_what_can_wait(rig: Rig) -> None:
    rig.gate.hold(HOST_COPY)
    first = rig.submit(Move.SAVE, rig.blocks[:1])
    rig.gate.await_arrival(HOST_COPY)
    plain = [rig.submit(Move.SAVE, rig.blocks[at : at + 1]) for at in (1, 2)]
    urgent = rig.submit(Move.SAVE, rig.blocks[3:4], urgent=True)
    for number in (plain[1], plain[1], urgent, first, 999):
        rig.hurry(number)
    rig.gate.release()
    assert [done.id for done in rig.wait(4)] == [first, urgent, plain[1], plain[0]]
    rig.hurry(first)
    assert rig.mover.poll() == []


def test_one_that_is_hurried_under_way_ends_once(paced: Rig) -> None:
    paced.move(Move.SAVE)
    paced.gate.hold(DISK_COMMIT)
    write = paced.submit(Move.WRITE)
    paced.gate.await_arrival(DISK_COMMIT)
    paced.hurry(write)
    paced.gate.release()
    (done,) = paced.wait()
    assert (done.id, all(done.ok)) == (write, True)
    assert paced.mover.pending == 0
