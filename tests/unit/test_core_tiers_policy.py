"""What the policy is told and asked of sessions, what operators see of that, and a core that has no tiers."""

from __future__ import annotations

import pytest

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.tiers import SETTLE
from agentserve.messages import Close, Devalue, Fork, Hint, Park, ToolSignal
from agentserve.types import SessionId, TurnId
from tests.engines import Rig, TierRig, cold, groups_of, tier_parts
from tests.tier_turns import Scripted, orders, residency, turn, view
from tiering.policy.base import Choice, Departure, Hints, Residency, Rest, Signal
from tiering.policy.lru import LruPolicy
from tiering.types import Move

# --- what the policy is told ------------------------------------------------------------------


def test_the_end_of_a_turn_is_told_once_its_meaning_is_known() -> None:
    policy = Scripted()
    rig = TierRig(policy=policy)
    number = rig.submit("a", list(range(10)), max_tokens=1)
    rig.drain()
    assert policy.parks == []
    hints = Hints(expected_wait=3.0)
    rig.core.handle(Park(SessionId("a"), number, True, ("search", "read"), hints), rig.now)
    (park,) = policy.parks
    assert (park.rest, park.tools, park.hints, park.turn) == (Rest.TOOL, ("search", "read"), hints, 1)
    assert (park.tokens, park.blocks, park.private) == (10, 2, 2)
    rig.settle()
    assert len(policy.parks) == 1
    rig.now += 2.0
    rig.submit("a", list(range(12)), max_tokens=1)
    assert policy.told[-1] == ("resumed", "a", pytest.approx(3.0, abs=0.1))


def test_a_turn_of_which_nothing_is_heard_rests_idle_after_a_moment() -> None:
    policy = Scripted()
    rig = TierRig(policy=policy)
    rig.submit("a", list(range(10)), max_tokens=1)
    while rig.core.has_work:
        rig.step()
    assert rig.core.next_timer() == pytest.approx(rig.now + SETTLE)
    rig.settle(SETTLE)
    assert [park.rest for park in policy.parks] == [Rest.IDLE]
    assert rig.core.next_timer() is None


def test_a_decision_is_looked_at_again_when_it_says() -> None:
    policy = Scripted(until=10.0)
    rig = TierRig(policy=policy)
    rig.submit("a", list(range(10)), max_tokens=1)
    rig.drain()
    rig.settle(SETTLE)
    asked = len(policy.asked)
    timer = rig.core.next_timer()
    assert timer is not None
    assert timer == pytest.approx(rig.now + 10.0)
    rig.core.tick(timer - 0.1)
    assert len(policy.asked) == asked
    rig.core.tick(timer)
    assert len(policy.asked) == asked + 1


def test_a_decision_that_is_over_at_once_does_not_spin() -> None:
    policy = Scripted(until=-5.0)
    rig = TierRig(policy=policy)
    turn(rig, "a", list(range(10)))
    timer = rig.core.next_timer()
    assert timer is not None
    assert timer > rig.now


def test_a_session_brought_back_early_is_there_when_it_resumes() -> None:
    policy = Scripted({"a": Choice.HOST})
    rig = TierRig((16,), host=16, policy=policy)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    policy.choices["a"] = Choice.RESTORE
    rig.core.handle(ToolSignal(SessionId("a"), TurnId(1), Signal.STREAMING), rig.now)
    rig.settle()
    assert residency(rig, "a") == Residency(5, 0, 0, 0, copied=5)
    assert orders(rig, Move.LOAD) == 5
    rig.submit("a", [*context, 7], max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert plan.chunks[0].start >= 20
    assert orders(rig, Move.LOAD) == 5


def test_a_turn_that_comes_while_its_kv_is_being_brought_back_joins() -> None:
    policy = Scripted({"a": Choice.HOST})
    rig = TierRig((16,), host=16, policy=policy)
    context = turn(rig, "a", list(range(22)))
    rig.core.kv.evict_all()
    policy.choices["a"] = Choice.RESTORE
    rig.core.handle(ToolSignal(SessionId("a"), TurnId(1), Signal.CONNECTED), rig.now)
    turn(rig, "a", [*context, 7])
    assert orders(rig, Move.LOAD) == 5
    assert rig.ended("a", 2).usage.cached == 20


def test_hints_and_signals_reach_the_policy_and_stale_ones_do_not() -> None:
    policy = Scripted()
    rig = TierRig(policy=policy)
    turn(rig, "a", list(range(10)))
    asked = len(policy.asked)
    rig.core.handle(Hint(SessionId("a"), Hints(expected_wait=2.0)), rig.now)
    rig.core.handle(ToolSignal(SessionId("a"), TurnId(1), Signal.CONNECTED), rig.now)
    rig.core.handle(ToolSignal(SessionId("a"), TurnId(7), Signal.STREAMING), rig.now)
    rig.core.handle(ToolSignal(SessionId("nobody"), TurnId(1), Signal.STREAMING), rig.now)
    assert policy.told == [
        ("signalled", "a", Signal.EXPECTED, 2.0),
        ("signalled", "a", Signal.CONNECTED, 2.0),
    ]
    assert len(policy.asked) == asked + 2
    rig.core.handle(Close(SessionId("a")), rig.now)
    assert policy.told[-1] == ("gone", "a", Departure.FINISHED)


def test_a_preempted_session_rests_by_pressure_and_resumes_without_a_wait_of_its_own() -> None:
    policy = Scripted()
    rig = TierRig((12,), host=32, policy=policy, max_num_seqs=4)
    for name in "abc":
        rig.submit(name, [ord(name)] * 12, max_tokens=16)
    rig.drain()
    for name in "abc":
        assert rig.output(name) == cold([ord(name)] * 12, 16)
    pressed = [park.session for park in policy.parks if park.rest is Rest.PRESSURE]
    assert pressed
    resumed = [entry[1] for entry in policy.told if entry[0] == "resumed"]
    assert resumed == pressed or sorted(resumed) == sorted(pressed)
    assert all(entry[2] == 0.0 for entry in policy.told if entry[0] == "resumed")


def test_a_fork_shares_its_parents_blocks() -> None:
    policy = Scripted()
    rig = TierRig(policy=policy)
    context = turn(rig, "a", list(range(14)))
    rig.core.handle(Fork(SessionId("a"), SessionId("f"), len(context)), rig.now)
    rig.settle()
    assert [(park.session, park.blocks, park.private) for park in policy.parks] == [("a", 3, 3), ("f", 3, 0)]
    turn(rig, "f", [*context, 5])
    assert ("resumed", "f", pytest.approx(1.0, abs=0.1)) in policy.told


def test_waiting_turns_are_admitted_in_the_policys_order_within_a_priority() -> None:
    policy = Scripted()
    policy.place = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.0}.__getitem__
    rig = TierRig((64,), policy=policy, max_num_seqs=1)
    rig.submit("d", [1], max_tokens=1, priority=-1)
    for name in "abc":
        rig.submit(name, [2], max_tokens=1)
    rig.drain()
    assert [plan.chunks[0].session for plan in rig.plans] == ["c", "b", "a", "d"]


# --- views, and having no tiers ---------------------------------------------------------------


def test_operators_see_where_a_session_is_and_what_was_decided() -> None:
    policy = Scripted({"a": Choice.HOST}, until=50.0)
    rig = TierRig(policy=policy)
    number = rig.submit("a", list(range(10)), max_tokens=1)
    rig.drain()
    rested = rig.now
    rig.core.handle(Park(SessionId("a"), number, True, ("search",)), rig.now)
    rig.settle()
    seen = view(rig, "a")
    assert (seen.decision, seen.reason, seen.price, seen.tools) == ("host", "by the table", 0.5, ("search",))
    assert seen.rested == pytest.approx(rested)
    assert seen.until == pytest.approx(rested + 50.0)
    assert seen.residency == Residency(2, 0, 0, 0, copied=2)
    tiers = rig.core.view().tiers
    assert tiers is not None
    assert (tiers.policy, tiers.host, tiers.host_slots, tiers.moving) == ("scripted", 2, 64, 0)
    assert tiers.decisions["host"] == 1
    assert tiers.moved["save"][0] == 2


def test_pages_that_move_are_neither_live_nor_cached() -> None:
    rig = TierRig((16,), host=16)
    rig.submit("a", list(range(14)), max_tokens=1)
    rig.drain()
    rig.now += SETTLE
    rig.core.tick(rig.now)
    seen = rig.core.view()
    assert seen.tiers is not None
    assert (seen.pages_live, seen.tiers.pinned, seen.tiers.moving) == (0, 3, 3)
    assert seen.pages_free + seen.pages_cached + seen.tiers.pinned == 16


def test_without_tiers_there_is_nothing_to_do() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    rig.core.handle(Hint(SessionId("a"), Hints()), 0.0)
    rig.core.handle(Devalue(SessionId("a"), Departure.ABANDONED), 0.0)
    rig.drain()
    rig.core.tick(1.0)
    assert (rig.core.take_transfers(), rig.core.next_timer(), rig.core.view().tiers) == ([], None, None)


def test_tiers_need_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="prefix cache"):
        EngineCore(CoreConfig(prefix_cache=False), groups_of(1), (8,), None, tier_parts(4))


def test_the_plain_policy_is_what_tiers_are_tested_with() -> None:
    policy = LruPolicy()
    rig = TierRig(policy=policy)
    turn(rig, "a", list(range(10)))
    assert view(rig, "a").decision == "host"
    rig.core.handle(Devalue(SessionId("a"), Departure.SUPERSEDED), rig.now)
    assert view(rig, "a").decision == "drop"
