"""Writes to a disk that fails for a while, and to one that has no host tier before it."""

from __future__ import annotations

from agentserve.messages import Devalue
from agentserve.sim.mover import Faults
from agentserve.types import SessionId
from tests.engines import TierRig
from tests.tier_turns import Scripted, orders, residency, signal, turn
from tiering.manager import DISK_PAUSE
from tiering.policy.base import Choice, Departure
from tiering.types import Move

# --- a disk that fails for a while ---------------------------------------------------------------


def test_what_a_failing_disk_did_not_take_is_written_when_it_is_back() -> None:
    policy = Scripted({"a": Choice.HOST})
    rig = TierRig((32,), host=32, disk=64, policy=policy)
    turn(rig, "a", list(range(22)))
    policy.choices["a"] = Choice.DISK
    rig.mover._faults = Faults(bad=1.0)
    signal(rig, "a")
    rig.move()
    rig.wait()
    assert (orders(rig, Move.WRITE), rig.tiers.manager.disk_blocks) == (5, 0)
    rig.mover._faults = Faults()
    back = rig.core.next_timer()
    assert back == rig.now + DISK_PAUSE
    rig.settle(DISK_PAUSE - 0.5)
    assert orders(rig, Move.WRITE) == 5
    rig.settle(1.0)
    assert (orders(rig, Move.WRITE), rig.tiers.manager.disk_blocks) == (10, 5)
    assert rig.core.next_timer() is None


def test_a_spill_that_begins_while_the_disk_is_left_alone_is_not_forgotten() -> None:
    policy = Scripted({"a": Choice.HOST, "b": Choice.HOST})
    rig = TierRig((32,), host=32, disk=64, policy=policy)
    turn(rig, "a", list(range(22)))
    turn(rig, "b", list(range(50, 72)))
    rig.mover._faults = Faults(bad=1.0)
    for name in "ab":
        policy.choices[name] = Choice.DISK
        signal(rig, name)
        rig.move()
        if rig.mover.pending:
            rig.wait()
    assert orders(rig, Move.WRITE) == 5, "the second was not tried"
    rig.mover._faults = Faults()
    rig.settle(DISK_PAUSE)
    assert rig.tiers.manager.disk_blocks == 10


def test_a_disk_that_stays_broken_is_tried_now_and_then_and_no_longer_than_somebody_wants() -> None:
    policy = Scripted({"a": Choice.DISK})
    rig = TierRig((32,), host=32, disk=64, policy=policy)
    rig.submit("a", list(range(22)), max_tokens=1)
    rig.drain()
    rig.settle(0.5)
    rig.tiers.reset()
    rig.settle()
    rig.orders.clear()
    rig.mover._faults = Faults()
    policy.choices["a"] = Choice.HOST
    signal(rig, "a")
    rig.settle()
    rig.mover._faults = Faults(bad=1.0)
    policy.choices["a"] = Choice.DISK
    signal(rig, "a")
    for _ in range(5):
        rig.settle(DISK_PAUSE)
    assert 20 <= orders(rig, Move.WRITE) <= 30
    rig.core.handle(Devalue(SessionId("a"), Departure.ABANDONED), rig.now)
    written = orders(rig, Move.WRITE)
    policy.choices["a"] = Choice.DROP
    signal(rig, "a")
    rig.settle(3 * DISK_PAUSE)
    assert orders(rig, Move.WRITE) == written


# --- many at once -------------------------------------------------------------------------------


def test_a_spill_ends_with_its_own_writes_whatever_others_write_and_costs_a_tick_nothing() -> None:
    policy = Scripted(dict.fromkeys("abcd", Choice.HOST))
    rig = TierRig((64,), host=64, disk=64, policy=policy)
    for number, name in enumerate("abcd"):
        turn(rig, name, [number] * 2 + list(range(20)))
    spills = rig.tiers.spills
    go_on, looks = spills.go_on, []

    def counted(now: float) -> None:
        looks.append(now)
        go_on(now)

    spills.go_on = counted  # type: ignore[method-assign]

    def write(name: str) -> None:
        policy.choices[name] = Choice.DISK
        signal(rig, name)
        rig.core.tick(rig.now)
        rig._hand_over()

    write("a")
    for count, name in enumerate("bcd"):
        write(name)
        assert len(looks) == count, "nothing has ended meanwhile"
        rig.wait()
        assert list(spills._spills) == [name], "those before it are done, whatever is in flight"
    rig.settle()
    assert (rig.tiers.manager.disk_blocks, spills._spills) == (20, {})


# --- a disk with no host tier before it --------------------------------------------------------------


def test_blocks_pass_through_a_staging_area_to_the_disk_whatever_their_number() -> None:
    rig = TierRig((64,), host=4, disk=100, staging=True)
    contexts = {name: turn(rig, name, [ord(name), *range(60)]) for name in "abc"}
    assert rig.tiers.manager.disk_blocks == 45
    assert rig.tiers.manager.host_used == 0, "nothing stays in it"
    assert (rig.tiers.view().host, rig.tiers.view().host_slots) == (0, 0)
    rig.core.kv.evict_all()
    assert residency(rig, "a").disk == 15
    turn(rig, "a", [*contexts["a"], 7])
    assert rig.ended("a", 2).usage.cached == 60
    assert orders(rig, Move.LOAD) == 0


def test_a_staging_area_waits_for_a_disk_that_fails() -> None:
    policy = Scripted({"a": Choice.HOST, "b": Choice.DISK})
    rig = TierRig((64,), host=4, disk=100, policy=policy, staging=True)
    rig.mover._faults = Faults(seed=1, bad=1.0)
    for name, first in (("a", 0), ("b", 100)):
        rig.submit(name, list(range(first, first + 42)), max_tokens=1)
        rig.drain()
    rig.settle(0.2)
    rig.mover._faults = Faults()
    rig.settle(3 * DISK_PAUSE)
    signal(rig, "a")
    signal(rig, "b")
    rig.settle(DISK_PAUSE)
    assert rig.tiers.manager.disk_blocks == 20
    assert rig.tiers.manager.host_used == 0


def test_what_was_left_in_the_staging_area_makes_room() -> None:
    """A spill that stops between save and write leaves copies there: the next one takes their slots."""
    policy = Scripted({"a": Choice.DISK, "b": Choice.DISK})
    rig = TierRig((64,), host=4, disk=100, policy=policy, staging=True)
    rig.submit("a", list(range(22)), max_tokens=1)
    rig.drain()
    rig.now += 0.06
    rig.core.tick(rig.now)
    rig._hand_over()
    assert orders(rig, Move.SAVE) == 4
    policy.choices["a"] = Choice.HOLD
    signal(rig, "a")
    rig.settle()
    assert rig.tiers.manager.host_used == 4
    turn(rig, "b", list(range(100, 142)))
    assert residency(rig, "b").copied == 10
