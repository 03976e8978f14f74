"""Tiers in the core: what the policy is told and asked, what becomes of its decisions, who waits for what."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

import pytest

from agentserve.core.config import CoreConfig
from agentserve.core.engine import EngineCore
from agentserve.core.pages import COPIED, DEVALUED
from agentserve.core.tiers import SETTLE
from agentserve.messages import (
    Close,
    Describe,
    Description,
    Devalue,
    Fork,
    Hint,
    Park,
    SessionView,
    ToolSignal,
)
from agentserve.sim.mover import Faults
from agentserve.types import SessionId, TurnId
from tests.engines import PRICES, Rig, TierRig, cold, groups_of, tier_parts
from tiering.policy.base import Choice, Decision, Departure, Hints, Market, Residency, Rest, Signal
from tiering.policy.base import Park as Parked
from tiering.policy.lru import LruPolicy
from tiering.types import Move, Tier

SLOW = Faults(late=1.0, slower=1e9)  # every transfer is as good as dead


class Scripted:
    """Decides by a table of sessions, and remembers what it was told."""

    name = "scripted"
    eager = False

    def __init__(self, choices: dict[str, Choice] | None = None, until: float = math.inf) -> None:
        self.choices = choices or {}
        self.worths: dict[str, float] = {}
        self.until = until
        self.parks: list[Parked] = []
        self.told: list[tuple[object, ...]] = []
        self.asked: list[tuple[str, Residency, Market]] = []
        self.place: Callable[[str], float] | None = None

    def parked(self, park: Parked) -> None:
        self.parks.append(park)

    def resumed(self, session: str, at: float, waited: float) -> None:
        self.told.append(("resumed", session, round(waited, 6)))

    def signalled(self, session: str, signal: Signal, at: float, hints: Hints) -> None:
        self.told.append(("signalled", session, signal, hints.expected_wait))

    def gone(self, session: str, at: float, why: Departure) -> None:
        self.told.append(("gone", session, why))

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        self.asked.append((session, residency, market))
        return Decision(self.choices.get(session, Choice.HOLD), market.now + self.until, "by the table", 0.5)

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return self.worths.get(session, 1.0)

    def rank(self, session: str, arrived: float, market: Market) -> tuple[float, ...]:
        return (self.place(session) if self.place else arrived,)


def turn(rig: TierRig, name: str, tokens: list[int], count: int = 1) -> list[int]:
    """One whole turn, then everything settles. Returns the context after it."""
    number = rig.submit(name, tokens, max_tokens=count)
    rig.drain()
    rig.settle()
    said = rig.output(name, number)
    assert said == cold(tokens, count)
    return tokens + said


def view(rig: TierRig, name: str) -> SessionView:
    rig.core.handle(Describe(1, SessionId(name)), rig.now)
    (event,) = [event for event in rig.core.take_events() if isinstance(event, Description)]
    assert event.session is not None
    return event.session


def residency(rig: TierRig, name: str) -> Residency:
    found = view(rig, name).residency
    assert found is not None
    return found


def orders(rig: TierRig, move: Move) -> int:
    return sum(len(order.blocks) for order in rig.orders if order.move is move)


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
    path = rig.core.kv.matched(rig.core._namespace(""), array("i", context), 20)[0]
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
    pages = rig.core.kv.matched(_namespace(rig, "b"), array("i", [*range(8), 50, 51, 52, 53]), 12)[0]
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
    pages = rig.core.kv.matched(_namespace(rig, "a"), array("i", range(12)), 12)[0]
    assert [pool.marks(page) for page in pages] == [COPIED] * 3
    turn(rig, "b", list(range(100, 114)))
    assert [pool.marks(page) for page in pages] == [0] * 3
    assert residency(rig, "b").copied == 3


def _namespace(rig: TierRig, name: str) -> bytes:
    session = rig.core.sessions.get(SessionId(name))
    assert session is not None
    return session.namespace


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
