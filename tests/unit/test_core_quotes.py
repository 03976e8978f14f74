"""What it takes to have a victim's KV again: sums done by hand. A block of four tokens is moved in 1 ms
between device and host, in 5 ms to the disk and 2 ms from it, and as long again once per transfer; a token
is computed in 10 ms."""

from __future__ import annotations

import pytest

from agentserve.core.cost import StepCost
from agentserve.core.session import Session
from agentserve.types import SessionId
from tests.engines import Rig, TierRig
from tests.tier_turns import turn
from tiering.types import Tier

A = SessionId("a")


def prompt(name: str, length: int) -> list[int]:
    return [ord(name)] * length


def running(rig: Rig, name: str = "a", length: int = 22) -> Session:
    """One running turn with `length` tokens computed, whose first token has come."""
    rig.submit(name, prompt(name, length), max_tokens=8)
    rig.step()
    session = rig.core.sessions.get(SessionId(name))
    assert session is not None
    assert session.computed == length
    return session


def test_without_tiers_what_goes_is_computed() -> None:
    rig = Rig((40,), cost=StepCost(fixed=0.1, per_token=0.01))
    session, quotes = running(rig), rig.core.scheduler.pressure.quotes
    assert quotes.recompute(session, 3) == pytest.approx(0.1 + 0.10)
    assert quotes.recompute(session, 6) == 0.0
    assert quotes.elsewhere(session) == pytest.approx(0.1 + 0.23)
    assert quotes.swap(session, 3, 9.0) is None
    rig.drain()


def test_where_nothing_is_known_of_steps_what_they_took_is_learned() -> None:
    rig = Rig((200,), max_batched_tokens=64)  # its executor takes no time at all
    quotes = rig.core.scheduler.pressure.quotes
    session = running(rig, length=22)
    first = quotes.recompute(session, 3)
    assert first > 0
    for _ in range(200):
        quotes.stepped([(0, 64)], 64 * 0.05)
    assert quotes.recompute(session, 0) / 22 == pytest.approx(0.05, rel=0.2)
    assert quotes.recompute(session, 0) > quotes.recompute(session, 3) > first
    rig.drain()


def test_quotes_are_those_of_the_price_book() -> None:
    rig = TierRig((40,), host=8, disk=40)
    session, quotes = running(rig), rig.tiers.quotes  # five full blocks, and two tokens
    assert quotes.recompute(session, 3) == pytest.approx(0.10)  # tokens 12 to 21
    assert quotes.recompute(session, 0) == pytest.approx(0.22)
    # Out: all five; in: the two that go, and two tokens that are in no full block.
    assert quotes.swap(session, 3, 1.0) == pytest.approx((0.001 + 0.005) + (0.001 + 0.002) + 0.02)
    assert quotes.swap(session, 3, 0.028) is None, "computing is cheaper"
    assert quotes.swap(session, 5, 1.0) is None, "nothing that could be moved goes"
    assert quotes.elsewhere(session) == pytest.approx(0.23)  # tokens 0 to 22, the new one as well
    rig.drain()


def test_what_lies_below_already_need_not_be_moved_out_and_is_brought_if_that_is_cheaper() -> None:
    rig = TierRig((40,), host=8)
    context = turn(rig, "a", prompt("a", 20))
    rig.submit("a", [*context, 9], max_tokens=8)
    rig.step()
    session, quotes = rig.core.sessions.get(A), rig.tiers.quotes
    assert session is not None
    assert session.computed == 22
    # Blocks 3 and 4 are in the host: 1 ms and 1 ms for each; then the two tokens after them.
    assert quotes.recompute(session, 3) == pytest.approx(0.001 + 0.002 + 0.02)
    assert quotes.swap(session, 3, 1.0) == pytest.approx(0.001 + 0.002 + 0.02)
    rig.drain()


def test_another_worker_reads_what_is_on_this_ones_disk() -> None:
    for peers in ([], [TierRig((40,), disk=8)]):
        rig = TierRig((40,), host=8, disk=40, peers=peers)
        context = turn(rig, "a", prompt("a", 20))
        assert rig.tiers.manager.disk_blocks == 5
        rig.submit("a", [*context, 9], max_tokens=8)
        rig.step()
        session = rig.core.sessions.get(A)
        assert session is not None
        read = 0.002 + 5 * 0.002 + 0.03  # five blocks, and three tokens behind them
        assert rig.tiers.quotes.elsewhere(session) == pytest.approx(read if peers else 0.23)
        rig.drain()


def test_the_queue_of_a_lane_counts() -> None:
    rig = TierRig((40,), host=30)
    for name in "xyz":
        rig.submit(name, prompt(name, 12), max_tokens=1)
    rig.step()
    session, quotes = running(rig), rig.tiers.quotes
    queue = rig.tiers.manager.flights.queue(rig.tiers.quotes._prices(), Tier.HOST)
    back = rig.tiers.manager.flights.queue(rig.tiers.quotes._prices(), Tier.HOST, urgent=True)
    assert queue >= back > 0
    assert quotes.swap(session, 3, 1.0) == pytest.approx(queue + 0.006 + back + 0.003 + 0.02)
    rig.drain()


def test_without_host_or_with_one_that_is_too_small_nothing_is_swapped() -> None:
    for host in (0, 4):
        rig = TierRig((40,), host=host, disk=40)
        assert rig.tiers.quotes.swap(running(rig), 3, 1.0) is None
        rig.drain()


def test_a_host_that_only_stages_swaps_to_the_disk() -> None:
    for disk in (0, 40):
        rig = TierRig((40,), host=4, disk=disk, staging=True)
        out = (0.001 + 0.005) + (0.005 + 5 * 0.005)
        back = 0.002 + 2 * 0.002
        expected = pytest.approx(out + back + 0.02) if disk else None
        assert rig.tiers.quotes.swap(running(rig), 3, 1.0) == expected
        rig.drain()
