"""Preemption by price in a core: who is taken, which way, and what is told of it."""

from __future__ import annotations

import pytest

from agentserve.core.cost import StepCost
from agentserve.core.engine import CoreEvent
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.messages import (
    Abort,
    Decided,
    Decisions,
    Displaced,
    Neighbour,
    StateChange,
    TurnEnded,
    Withdraw,
    Withdrawn,
    pack_tokens,
)
from agentserve.sim.mover import Faults
from agentserve.types import FinishReason, Sampling, SessionId, SessionState, TurnId
from tests.engines import Rig, TierRig, cold
from tests.tier_turns import turn
from tiering.types import Move

COST = StepCost(fixed=0.01, per_token=0.001)
A, B, C = (SessionId(name) for name in "abc")


def prompt(name: str, length: int = 48) -> list[int]:
    return [ord(name)] * length


def start(rig: Rig, names: str = "abc", count: int = 24, length: int = 48) -> None:
    for name in names:
        rig.submit(name, prompt(name, length), max_tokens=count)


def said(rig: Rig, names: str = "abc", count: int = 24, length: int = 48) -> None:
    for name in names:
        assert rig.output(name) == cold(prompt(name, length), count), name


def of(rig: Rig, kind: type[CoreEvent]) -> list[CoreEvent]:
    return [event for event in rig.events if isinstance(event, kind)]


def decided(rig: Rig) -> list[tuple[str, Decided]]:
    made = [each for event in rig.events if isinstance(event, Decisions) for each in event.made]
    return [(session, decision) for session, _, decision in made if "pressure" in decision.reason]


# --- pages that become free -----------------------------------------------------------------


def test_only_pages_that_nobody_else_holds_become_free_from_the_tail_on() -> None:
    rig = Rig((32, 40))
    rig.submit("a", list(range(20)), max_tokens=8)
    rig.step()
    rig.submit("b", [*range(12), *[7] * 9], max_tokens=8)
    rig.step()
    kv = rig.core.kv
    assert (kv.blocks_of(A), kv.blocks_of(B)) == (6, 6)
    assert kv.freed(A, 99) == (3, 3)  # three full blocks of the prompt are b's as well
    assert kv.freed(B, 99) == (3, 3)
    assert kv.freed(B, 2) == (2, 2)
    block = tuple(pages[4] for pages in kv._tables[A].pages)
    kv.pin(block)
    assert kv.freed(A, 99) == (1, 1), "what a transfer reads stays, and what is before it"
    kv.unpin(block)
    rig.drain()


# --- ways -----------------------------------------------------------------------------------


def test_swapped_out_is_parked_with_its_reason_and_comes_back_from_the_host() -> None:
    rig = TierRig((40,), host=64)
    start(rig)
    rig.drain()
    rig.settle()
    said(rig)
    ((session, decision),) = decided(rig)
    # c writes at the same pace, but its last page is not full: its tokens would be computed again.
    assert (session, decision.choice, decision.reason) == (B, "host", "pressure: cheaper to move out")
    changes = [event for event in of(rig, StateChange) if event.state is SessionState.PREEMPTED]
    assert [(change.session, change.reason) for change in changes] == [(B, "pressure")]
    usage = rig.ended("b").usage
    assert (usage.preemptions, usage.swaps, usage.migrations) == (1, 1, 0)
    assert usage.computed < 48 + 24 + 24, "most of it was not computed again"
    counts = rig.core.view().preempted
    assert counts.made == {"decode": {"swap": 1}}
    assert counts.swapped >= counts.returned > 0


def test_where_the_host_is_short_of_slots_what_is_swapped_goes_on_to_the_disk() -> None:
    rig = TierRig((46,), host=16, disk=60)
    turn(rig, "r", prompt("r", 36))
    rig.settle()
    assert rig.tiers.manager.host_free < 10
    written = len([order for order in rig.orders if order.move is Move.WRITE])
    start(rig)
    rig.drain()
    rig.settle()
    said(rig)
    assert [decision.choice for _, decision in decided(rig)] == ["disk"]
    assert len([order for order in rig.orders if order.move is Move.WRITE]) > written


def test_recomputed_where_there_is_nothing_below() -> None:
    rig = TierRig((40,), host=0)
    start(rig)
    rig.drain()
    said(rig)
    ((session, decision),) = decided(rig)
    assert (session, decision.choice, decision.reason) == (C, "hold", "pressure: cheaper to compute again")
    assert rig.core.view().preempted.made == {"decode": {"recompute": 1}}
    assert rig.ended("c").usage.swaps == 0
    assert not rig.orders


def test_nobody_waits_for_a_copy_that_is_late() -> None:
    """Every transfer is as good as dead: the steps go on."""
    rig = TierRig((40,), host=64, faults=Faults(late=1.0, slower=1e6), cost=COST)
    start(rig)
    while len(of(rig, TurnEnded)) < 2:
        assert rig.step() is not None, "a step was lost to a transfer"
    assert set(rig.core.view().preempted.made["decode"]) == {"swap"}
    assert rig.mover.pending
    rig.drain()
    said(rig)


def test_saving_leaves_a_page_for_each_that_runs() -> None:
    rig = TierRig((40,), host=64, faults=Faults(late=1.0, slower=1e6))
    start(rig)
    while not rig.core.view().preempted.made:
        rig.step()
    kv = rig.core.kv
    assert rig.tiers.spills.swapped > 0
    assert kv.available - kv.stuck >= len(rig.core.scheduler.running)
    rig.drain()


def test_moved_out_pages_go_first_and_without_loss() -> None:
    rig = TierRig((60,), host=64)
    rested = turn(rig, "r", prompt("r", 20))  # at rest, with copies in the host
    start(rig)
    rig.drain()
    rig.settle()
    said(rig)
    rig.submit("r", [*rested, 5], max_tokens=1)
    rig.drain()
    assert rig.output("r", 2) == cold([*rested, 5], 1)


# --- whom -----------------------------------------------------------------------------------


def test_the_price_chooses_among_a_tenants_turns_that_stand_behind() -> None:
    """b and c are alike but for what they share: c's prompt is also d's, so its pages would stay."""
    rig = Rig((46,), cost=COST, max_num_seqs=8)
    rig.submit("a", prompt("a"), max_tokens=40)
    rig.submit("b", prompt("b"), max_tokens=40)
    rig.submit("c", prompt("c"), max_tokens=40)
    rig.step()
    rig.submit("d", prompt("c"), max_tokens=40)
    while not rig.core.view().preempted.made:
        rig.step()
    assert [name for name in "abcd" if rig.core.sessions.get(SessionId(name)).preemptions] == ["b"]  # type: ignore[union-attr]
    rig.drain()
    for name, read in (("a", "a"), ("b", "b"), ("c", "c"), ("d", "c")):
        assert rig.output(name) == cold(prompt(read), 40)


def test_one_that_is_nearly_done_stays() -> None:
    rig = Rig((40,), cost=COST, max_num_seqs=8)
    rig.submit("a", prompt("a"), max_tokens=40)
    rig.submit("b", prompt("b"), max_tokens=40)
    rig.submit("c", prompt("c"), max_tokens=14)
    rig.drain()
    assert rig.ended("c").usage.preemptions == 0
    assert rig.ended("b").usage.preemptions > 0
    assert rig.ended("a").usage.preemptions == 0


def test_no_tenants_turn_is_taken_for_anothers_that_stands_worse() -> None:
    """By price it would be y's; but y stands better than the last of x."""
    rig = Rig((46,), cost=COST, max_num_seqs=8)
    rig.submit("a", prompt("a"), max_tokens=40, tenant="x")
    rig.submit("b", prompt("b", 8), max_tokens=40, tenant="y")
    rig.submit("c", prompt("c"), max_tokens=40, tenant="x")
    rig.submit("d", prompt("d"), max_tokens=40, tenant="x")
    rig.drain()
    assert rig.ended("b").usage.preemptions == 0
    assert sum(rig.ended(name).usage.preemptions for name in "cd") > 0


def test_a_more_urgent_turn_of_a_tenant_is_not_taken_for_a_less_urgent_one() -> None:
    rig = Rig((46,), cost=COST, max_num_seqs=8)
    rig.submit("a", prompt("a"), max_tokens=40)
    rig.submit("b", prompt("b", 8), max_tokens=40, priority=1)
    rig.submit("c", prompt("c"), max_tokens=40)
    rig.submit("d", prompt("d"), max_tokens=40)
    rig.drain()
    assert rig.ended("b").usage.preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "decode-first", "chunked", "prefix-aware"])
def test_baselines_take_the_last_and_let_the_tier_policy_decide(policy: str) -> None:
    rig = TierRig((40,), host=64, cost=COST, scheduling=SchedulingConfig(policy=policy))
    rig.submit("a", prompt("a"), max_tokens=40)
    rig.submit("b", prompt("b"), max_tokens=40)
    rig.submit("c", prompt("c"), max_tokens=14)
    rig.drain()
    assert rig.ended("c").usage.preemptions > 0
    assert not decided(rig)


# --- another worker -------------------------------------------------------------------------


def asked(rig: TierRig, pages: int = 40) -> Displaced:
    """A core that asks for another worker for one of three turns."""
    rig.core.handle(Neighbour(pages), rig.now)
    start(rig)
    while not of(rig, Displaced):
        assert rig.step() is not None
    (event,) = of(rig, Displaced)
    assert isinstance(event, Displaced)
    return event


def test_another_worker_is_asked_for_where_waiting_costs_more_than_to_begin_again() -> None:
    rig = TierRig((40,), host=64, cost=COST)
    event = asked(rig)
    assert (event.session, event.turn) == (C, TurnId(1))
    session = rig.core.sessions.get(C)
    assert session is not None
    assert event.pages == -(-(len(session.tokens) + 16) // 4)  # nothing is known: 16 tokens more
    assert session.state is SessionState.PREEMPTED, "it waits here until somebody takes it"
    rig.drain()  # nobody does
    said(rig)
    assert rig.core.view().preempted.asked == 1
    assert rig.core.view().preempted.migrated == 0


def test_nobody_is_asked_who_has_no_room_or_where_it_costs_more() -> None:
    for cost, pages in ((COST, 10), (StepCost(fixed=1e-6), 40), (COST, 0)):
        rig = TierRig((40,), host=64, cost=cost)
        rig.core.handle(Neighbour(pages), rig.now)
        start(rig)
        rig.drain()
        assert not of(rig, Displaced)


def test_one_that_waits_already_asks_when_there_is_room() -> None:
    rig = TierRig((40,), host=64, cost=COST)
    rig.core.handle(Neighbour(40), rig.now)  # nobody waits
    rig.core.handle(Neighbour(0), rig.now)
    start(rig)
    while not rig.core.view().preempted.made:
        rig.step()
    assert not of(rig, Displaced)
    rig.core.handle(Neighbour(10), rig.now)
    rig._collect()
    assert not of(rig, Displaced), "too little room"
    rig.core.handle(Neighbour(30), rig.now)
    rig._collect()
    (event,) = of(rig, Displaced)
    assert isinstance(event, Displaced)
    rig.core.handle(Withdraw(event.session, event.turn), rig.now)
    rig._collect()
    (gone,) = of(rig, Withdrawn)
    assert isinstance(gone, Withdrawn)
    assert gone.usage is not None
    counts = rig.core.view().preempted
    assert (counts.asked, counts.migrated) == (1, 1)
    rig.drain()


def test_room_elsewhere_is_counted_on_once() -> None:
    """Two turns are taken in one step, and the other worker has room for one."""
    rig = TierRig((40,), host=64, cost=COST, max_num_seqs=8)
    rig.core.handle(Neighbour(20), rig.now)
    start(rig, "abcdefgh", 24, 16)
    rig.drain()
    said(rig, "abcdefgh", 24, 16)
    taken = sum(rig.ended(name).usage.preemptions for name in "abcdefgh")
    assert taken > len(of(rig, Displaced)) >= 1


def test_a_turn_that_is_withdrawn_goes_on_elsewhere_where_it_stood() -> None:
    rig, other = TierRig((40,), host=64, cost=COST), TierRig((40,), cost=COST)
    event = asked(rig)
    rig.core.handle(Withdraw(event.session, event.turn), rig.now)
    rig._collect()
    (gone,) = of(rig, Withdrawn)
    assert isinstance(gone, Withdrawn)
    assert gone.usage is not None
    assert (gone.usage.preemptions, gone.usage.generated) == (1, len(rig.output("c")))
    before = rig.output("c")
    tokens = [*prompt("c"), *before]
    command = rig.submits["c"]
    moved = type(command)(
        command.session, command.turn, pack_tokens(type(rig.core.sessions.get(C).tokens)("i", tokens)),  # type: ignore[union-attr]
        command.sampling, generated=len(before),
    )  # fmt: skip
    other.core.handle(moved, other.now)
    other.drain()
    assert before + other.output("c") == cold(prompt("c"), 24)
    rig.drain()
    said(rig, "ab")
    assert rig.core.view().preempted.migrated == 1
    last = [event for event in of(rig, StateChange) if event.session == C][-1]
    assert last.state is SessionState.PREEMPTED, "what it is now another worker tells"


def test_a_turn_that_runs_again_stays_and_one_that_is_over_has_been_told() -> None:
    rig = TierRig((40,), host=64, cost=COST)
    event = asked(rig)
    rig.core.handle(Abort(A, TurnId(1)), rig.now)
    while rig.core.sessions.get(C).state is not SessionState.DECODING:  # type: ignore[union-attr]
        rig.step()
    rig.core.handle(Withdraw(event.session, event.turn), rig.now)
    rig.drain()
    assert of(rig, Withdrawn) == [Withdrawn(C, TurnId(1), None)]
    said(rig, "bc")
    rig.core.handle(Withdraw(event.session, event.turn), rig.now)
    rig.core.handle(Withdraw(SessionId("nobody"), TurnId(1)), rig.now)
    rig._collect()
    assert len(of(rig, Withdrawn)) == 1
    assert rig.ended("a").reason is FinishReason.ABORTED


def test_a_turn_that_another_worker_began_is_asked_for_on_its_disk() -> None:
    first = TierRig((60,), host=8, disk=60)
    context = turn(first, "a", prompt("a", 40))
    first.settle()
    for name in "xyz":  # what they leave needs the host
        turn(first, name, prompt(name, 30))
        first.settle()
    assert first.tiers.manager.disk_blocks > 8
    second = TierRig((60,), host=8, disk=60, peers=[first])
    turn(second, "a", [1, 2, 3])  # it knows the session, by another history
    command = second.submits["a"]
    tokens = type(second.core.sessions.get(A).tokens)("i", context)  # type: ignore[union-attr]
    moved = type(command)(A, TurnId(2), pack_tokens(tokens), Sampling(max_tokens=8), generated=1)
    second.core.handle(moved, second.now)
    second.drain()
    assert sum(len(order.blocks) for order in second.orders if order.move is Move.BORROW) > 0
