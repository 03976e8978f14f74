"""Tiers in the core: what is copied and comes back, who waits for it, and what goes first."""

from __future__ import annotations

from array import array

import pytest

from agentserve.core.pages import COPIED, DEVALUED
from agentserve.messages import Close, Devalue
from agentserve.sim.mover import Faults
from agentserve.types import SessionId
from tests.engines import PRICES, TierRig, cold
from tests.tier_turns import SLOW, Scripted, namespace, orders, residency, turn
from tiering.policy.base import Choice, Departure, Residency
from tiering.types import Move

# --- saving and loading -----------------------------------------------------------------------


def test_a_session_at_rest_is_copied_and_comes_back_from_the_host() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(22)))
    assert residency(rig, "a") == Residency(5, 0, 0, 0, copied=5)
    rig.core.kv.evict_all()
    assert residency(rig, "a") == Residency(0, 5, 0, 0)
    turn(rig, "a", [*context, 7])
    assert rig.ended("a", 2).usage.cached == 20
    assert rig.tiers.view().hit_tokens == {"device": 0, "host": 20, "disk": 0}


def test_from_the_disk_when_the_host_has_it_no_more() -> None:
    rig = TierRig((16,), host=6, disk=40)
    first = turn(rig, "a", list(range(22)))
    turn(rig, "b", list(range(100, 122)))
    rig.core.kv.evict_all()
    assert residency(rig, "a").disk > 0
    turn(rig, "a", [*first, 7])
    assert rig.ended("a", 2).usage.cached == 20
    assert rig.tiers.view().hit_tokens["disk"] > 0


def test_only_full_blocks_are_copied_and_none_twice() -> None:
    rig = TierRig((32,), host=32)
    context = turn(rig, "a", list(range(10)))
    assert orders(rig, Move.SAVE) == 2
    turn(rig, "b", list(range(10)))
    assert orders(rig, Move.SAVE) == 2
    turn(rig, "a", [*context, *range(50, 55)])
    assert orders(rig, Move.SAVE) == 4


def test_a_load_that_costs_more_than_computing_is_not_ordered() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(6)))
    rig.core.kv.evict_all()
    dear = PRICES.__class__(
        block_bytes=1000, save=(0.0, 0.0), load=(0.041, 0.0), write=(0.0, 0.0), fetch=(0.0, 0.0),
        prefill=(0.0, 0.01, 0.0), page_size=4,
    )  # fmt: skip
    rig.tiers._book._prices = dear  # type: ignore[attr-defined]
    turn(rig, "a", [*context, 7])
    assert orders(rig, Move.LOAD) == 0
    assert rig.ended("a", 2).usage.cached == 0


def test_a_block_that_does_not_arrive_ends_the_run_and_is_computed() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    slot = rig.orders[0].blocks[2].slot
    del rig.mover._host[slot]
    turn(rig, "a", [*context, 7])
    assert rig.ended("a", 2).usage.cached == 8
    assert rig.tiers.manager.failed[Move.LOAD] == 1


def test_nobody_waits_for_a_dead_load_longer_than_computing_takes() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    rig.mover._faults = SLOW
    began = rig.now
    rig.submit("a", [*context, 7], max_tokens=2)
    assert rig.core.next_timer() == pytest.approx(began + PRICES.recompute(0, 20))
    plan = rig.step()
    assert plan is None
    rig.now = began + 0.17
    assert rig.step() is None
    rig.now = began + 0.21
    while rig.core.has_work:
        assert rig.step() is not None, "it went on waiting"
    assert rig.output("a", 2) == cold([*context, 7], 2)
    assert rig.core.kv.pinned == 5  # the dead load's own pages: pinned until it is answered
    rig.settle()
    assert rig.core.kv.moving == 0
    assert residency(rig, "a").device == 6


def test_nobody_waits_for_the_room_of_a_dead_load() -> None:
    """The first load's pins leave no room to order the second: that must not hold up its turn for ever."""
    rig = TierRig((16,), host=16)
    first, second = turn(rig, "a", list(range(22))), turn(rig, "b", list(range(30, 52)))
    rig.core.kv.evict_all()
    rig.mover._faults = SLOW
    rig.submit("a", [*first, 7], max_tokens=1)
    rig.submit("b", [*second, 7], max_tokens=1)
    for _ in range(200):
        rig.step()
    assert not rig.core.has_work
    assert rig.mover.pending, "the load has not ended"
    assert rig.output("b", 2) == cold([*second, 7], 1)


def test_a_prefix_that_others_hold_takes_no_room() -> None:
    rig = TierRig((22,), host=16)
    prefix = list(range(40))
    context = turn(rig, "a", [*prefix, *range(50, 63)])
    rig.submit("runs", [*prefix, 99], max_tokens=40)
    for _ in range(4):
        rig.step()
    rig.core.kv.evict_all()
    rig.submit("a", [*context, 7], max_tokens=1)
    rig.step()
    assert orders(rig, Move.LOAD) == 3
    assert rig.core.scheduler.running


def test_blocks_of_a_closed_session_are_worth_something_to_the_next() -> None:
    rig = TierRig((16,), host=0, disk=0, policy=Scripted())
    context = turn(rig, "a", list(range(22)))
    rig.core.handle(Close(SessionId("a")), rig.now)
    pools = rig.core.kv.pools[0]
    path = rig.core.kv.matched(rig.core.namespaces.of(""), array("i", context), 20)[0]
    assert any(pools.marks(page) & DEVALUED for page in path)
    rig.submit("b", context, max_tokens=1)
    assert not any(pools.marks(page) & DEVALUED for page in path)


def test_others_pass_a_session_that_waits_for_a_load() -> None:
    rig = TierRig((32,), host=16)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    rig.mover._faults = SLOW
    rig.submit("a", [*context, 7], max_tokens=1)
    rig.submit("b", [5, 6, 7], max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert [chunk.session for chunk in plan.chunks] == ["b"]
    assert (SessionId("a"), "loading") in plan.reasons


def test_a_turn_aborted_while_its_load_is_under_way_leaves_nothing_pinned() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    rig.submit("a", [*context, 7], max_tokens=1)
    rig.core.handle(Close(SessionId("a")), rig.now)
    rig.settle()
    assert rig.core.kv.moving == 0
    assert rig.core.kv.pools[0].live == 0


def test_loads_and_saves_pin_a_bounded_share_of_the_pool() -> None:
    rig = TierRig((40,), host=64)
    context = turn(rig, "a", list(range(140)))
    assert max(len(order.blocks) for order in rig.orders) <= 10
    assert residency(rig, "a").copied == 35
    rig.core.kv.evict_all()
    rig.submit("a", [*context, 7], max_tokens=1)
    rig.move()
    assert rig.core.kv.moving <= 20
    rig.drain()
    assert rig.ended("a", 2).usage.cached == 140


def test_a_load_that_was_taken_back_is_not_tried_again_in_that_turn() -> None:
    rig = TierRig((16,), host=16)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    rig.mover._faults = Faults(cancelled=1.0)
    context = turn(rig, "a", [*context, 7])
    assert orders(rig, Move.LOAD) == 5
    assert rig.ended("a", 2).usage.cached == 0
    rig.core.kv.evict_all()
    rig.mover._faults = Faults()
    turn(rig, "a", [*context, 7])  # the copies are still there, and the next turn has them
    assert rig.ended("a", 3).usage.cached == 20


# --- what goes first --------------------------------------------------------------------------


def test_what_has_a_copy_goes_before_what_was_used_longer_ago() -> None:
    policy = Scripted({"b": Choice.HOST})
    rig = TierRig((16,), host=16, policy=policy)
    turn(rig, "a", list(range(14)))
    turn(rig, "b", list(range(100, 114)))
    turn(rig, "c", list(range(200, 240)))
    assert residency(rig, "a").device == 3
    assert residency(rig, "b").device < 3


def test_what_is_worth_least_goes_first() -> None:
    policy = Scripted()
    policy.worths = {"a": 5.0, "b": 1.0}
    rig = TierRig((16,), host=16, policy=policy)
    turn(rig, "a", list(range(14)))
    turn(rig, "b", list(range(100, 114)))
    turn(rig, "c", list(range(200, 248)))
    assert residency(rig, "a").device == 3
    assert residency(rig, "b").device == 0


def test_what_was_dropped_or_devalued_goes_first_unless_somebody_shares_it() -> None:
    policy = Scripted({"b": Choice.DROP})
    policy.worths = {"b": 99.0, "c": 99.0}
    rig = TierRig((64,), host=16, policy=policy)
    turn(rig, "a", list(range(14)))
    turn(rig, "b", [*range(8), 50, 51, 52, 53, 54])
    pool = rig.core.kv.pools[0]
    pages = rig.core.kv.matched(namespace(rig, "b"), array("i", [*range(8), 50, 51, 52, 53]), 12)[0]
    assert [pool.marks(page) for page in pages] == [0, 0, DEVALUED]  # the first two are a's as well
    policy.choices["a"] = Choice.DROP
    rig.core.handle(Devalue(SessionId("a"), Departure.ABANDONED), rig.now)
    rig.core.check()
    assert [pool.marks(page) for page in pages] == [DEVALUED] * 3
    policy.choices["a"] = Choice.HOLD
    rig.submit("a", [*range(14), 9], max_tokens=1)
    assert [pool.marks(page) for page in pages] == [0, 0, DEVALUED]


def test_a_closed_sessions_copies_go_before_those_of_others() -> None:
    rig = TierRig((64,), host=6)
    turn(rig, "a", list(range(14)))
    turn(rig, "b", list(range(100, 114)))
    rig.core.handle(Close(SessionId("b")), rig.now)
    turn(rig, "c", list(range(200, 214)))
    assert residency(rig, "a").copied == 3


def test_a_copy_that_is_gone_marks_its_page_no_longer() -> None:
    rig = TierRig((64,), host=3)
    turn(rig, "a", list(range(14)))
    pool = rig.core.kv.pools[0]
    assert pool.spare == 3
    pages = rig.core.kv.matched(namespace(rig, "a"), array("i", range(12)), 12)[0]
    assert [pool.marks(page) for page in pages] == [COPIED] * 3
    turn(rig, "b", list(range(100, 114)))
    assert [pool.marks(page) for page in pages] == [0] * 3
    assert residency(rig, "b").copied == 3
