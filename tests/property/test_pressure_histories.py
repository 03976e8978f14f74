"""Random loads that do not fit, with a neighbour that may take turns over, transfers that fail, come late or
are taken back, and questions that are asked too late or never: every turn says what it would have said alone,
each token once; all three ways occur; nothing stays held; nobody is preempted for ever; and a log decides the
same again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.scheduling.registry import policy_names
from agentserve.core.victims import MOST_CHOSEN
from agentserve.messages import Withdrawn
from agentserve.sim.mover import Faults
from tests.pressure_rig import Load, Pair, load_of
from tests.property.test_tier_histories import finish
from tiering.types import Move


def life(load: Load, seed: int) -> Pair:
    pair = Pair(load, seed)
    pair.run()
    pair.check()
    for rig in (pair.full, pair.other):
        rig.settle()
        finish(rig)
    if pair.full.core.scheduler.policy.form.victims_by_price:
        bounded(pair)
    return pair


def bounded(pair: Pair) -> None:
    """A turn is chosen a few times; after that it goes only as the last of all, once for a page that one of
    the others still has to get."""
    blocks = [-(-(len(prompt) + count) // 4) for prompt, count, _, _ in pair.load.turns]
    for number in range(len(blocks)):
        usage = pair.ended[f"s{number}"].usage
        assert usage.preemptions <= MOST_CHOSEN + sum(blocks) - blocks[number]


@given(st.integers(0, 10**9))
@settings(max_examples=12, deadline=None)
def test_random_loads(seed: int) -> None:
    life(load_of(seed), seed)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy(policy: str) -> None:
    for seed in (3, 11):
        life(replace(load_of(seed), policy=policy), seed)


def test_all_three_ways_occur_and_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    most = 0
    for seed in range(10):
        load = load_of(seed)
        if seed % 2:
            load = replace(load, disk=60, host=8, faults=Faults(), neighbour=True, earlier=True)
        pair = life(load, seed)
        counts = pair.full.core.view().preempted
        for ways in counts.made.values():
            seen.update(ways)
        seen.update(swapped=counts.swapped, returned=counts.returned, migrated=counts.migrated)
        read = [len(order.blocks) for order in pair.other.orders if order.move is Move.BORROW]
        seen.update(borrowed=sum(read))
        gone = [event for event in pair.full.events if isinstance(event, Withdrawn) and event.usage]
        assert len(gone) == counts.migrated
        most = max(most, *(ended.usage.preemptions for ended in pair.ended.values()))
    for what in ("recompute", "swap", "migrated", "swapped", "returned", "borrowed"):
        assert seen[what], f"nothing was {what}: {seen}"
    assert 1 < most <= 2 * MOST_CHOSEN


def test_the_same_log_decides_the_same() -> None:
    for seed in (1, 5, 7):
        first, again = (life(load_of(seed), seed) for _ in range(2))
        assert [str(plan) for plan in first.full.plans] == [str(plan) for plan in again.full.plans]
        assert first.full.events == again.full.events
        assert first.full.orders == again.full.orders
        assert first.other.orders == again.other.orders


def test_turns_that_all_want_the_same_pages_all_end() -> None:
    """As many turns as may run, each of which would fill the pool alone: they end one after the other."""
    turns = [([100 + number] * 60, 30, "xy"[number % 2], number % 3 - 1) for number in range(6)]
    for host in (0, 64):
        load = Load(turns, 25, host, 0, load_of(0).faults, 64, neighbour=False, earlier=False)
        pair = life(load, 0)
        plans = len(pair.full.plans)
        assert plans <= 6 * 30 + 6 * 30, f"{plans} steps for {6 * 30} tokens: turns push each other out"
