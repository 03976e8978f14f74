"""The priced policy: its formulas by hand, its gates, its bounds, and the LRU that takes over."""

from __future__ import annotations

import math
from collections import deque

import msgspec
import pytest

from tests.unit.policy_rig import NO_HINTS, PRICES, in_host, market, on_device, park
from tiering.policy.base import Choice, Departure, Hints, Market, Residency, Rest, Signal
from tiering.policy.priced import PricedPolicy
from tiering.policy.valuation import (
    Case,
    PricedParameters,
    chance_wanted,
    density,
    device_price,
    hold_for,
    loss,
    places,
    reload_of,
    restore_in,
    return_rate,
)
from tiering.survival import EDGES, Curve, PointWait, Wait, around
from tiering.types import Tier

P = PricedParameters(queue_weight=0.5, background=0.0, hidden=0.0)


TEN = PointWait(10.0)


def case(wait: Wait = TEN, *, residency: Residency | None = None, price: float = 0.01, blocks: int = 100,
         elapsed: float = 0.0, resume: float = 1.0, at: Market | None = None) -> Case:  # fmt: skip
    return Case(
        wait, elapsed, resume, 1.0, blocks, blocks, residency or on_device(blocks), at or market(), price
    )


# --- formulas by hand ----------------------------------------------------------------------------


def test_the_price_of_a_block_rises_as_the_free_ones_go() -> None:
    assert device_price(market(device_free=500), 50.0, 0.25) == 0.0
    assert device_price(market(device_free=125), 50.0, 0.25) == pytest.approx(0.5 / 50)
    assert device_price(market(device_free=100, demand=100), 50.0, 0.25) == pytest.approx(1 / 50)
    assert device_price(market(device_free=0, demand=900), 50.0, 0.25) == pytest.approx(1 / 50)


def test_places_by_hand() -> None:
    """100 blocks: recompute 0.01 + 1.6 = 1.61 s, load 0.051 s, save 0.051 s; queue 0.5 x 2 s."""
    found = {place.choice: place for place in places(case(at=market(queue=2.0)), P)}
    assert set(found) == {Choice.HOST, Choice.DROP}
    assert found[Choice.DROP].cost == pytest.approx(1.61 + 1.0)
    assert found[Choice.HOST].cost == pytest.approx(0.051 + 1.0)
    assert found[Choice.HOST].round_trip == pytest.approx(0.102)
    with_disk = places(case(at=market(disk=1000)), P)
    assert [place.choice for place in with_disk] == [Choice.HOST, Choice.DISK, Choice.DROP]
    assert with_disk[1].cost == pytest.approx(0.105)


def test_a_place_that_does_not_fit_or_is_slower_than_computing_is_none() -> None:
    assert [place.choice for place in places(case(at=market(host=99)), P)] == [Choice.DROP]
    slow = type(PRICES)(1, (0.0, 0.0), (2.0, 0.0), (0.0, 0.0), (2.0, 0.0), PRICES.prefill, 16)
    assert [place.choice for place in places(case(at=market(disk=1000, prices=slow)), P)] == [Choice.DROP]


def test_holding_ends_at_break_even_within_the_robust_factor() -> None:
    """Holding costs 1 s per second, leaving 0.051 s: the end lies in [0.0255, 0.102] whatever W is."""
    for wait in (PointWait(0.01), PointWait(1e6), around(0.05), around(1e5)):
        here = case(wait, price=0.01)
        below = places(here, P)[0]
        assert 0.051 * 0.5 - 1e-9 <= hold_for(here, below, 0.0, P) <= 0.051 / 0.5 + 1e-9
        assert hold_for(here, below, 0.102, P) == 0.0
    assert hold_for(case(PointWait(0.05)), below, 0.0, P) == pytest.approx(0.05, rel=1e-6)
    assert hold_for(case(PointWait(0.06)), below, 0.0, P) == pytest.approx(0.0255)
    assert hold_for(case(price=0.0), below, 0.0, P) == math.inf


def test_hold_while_hazard_times_benefit_is_worth_the_price() -> None:
    """Exponential waits: hazard 0.5 per second, benefit 0.051: holding pays below a rate of 0.0255."""
    wait = Curve([math.exp(-0.5 * t) for t in EDGES])
    below = places(case(wait), P)[0]
    assert hold_for(case(wait, price=0.0002), below, 0.0, P) == pytest.approx(0.102 / 0.02)  # to the bound
    assert hold_for(case(wait, price=0.0003), below, 0.0, P) == pytest.approx(0.0255 / 0.03)  # the least


def test_a_late_mode_is_seen_past_a_low_hazard() -> None:
    """A sleep of 5 s: no hazard now, all of it then; holding for 5 s costs less than leaving."""
    here = case(PointWait(5.0), price=0.0001)
    assert hold_for(here, places(here, P)[0], 0.0, P) == pytest.approx(5.0, rel=1e-6)


def test_what_a_tier_is_worth() -> None:
    assert loss(case(), Tier.DEVICE, P) == (pytest.approx(1.61), 100)
    assert loss(case(residency=on_device(copied=100)), Tier.DEVICE, P) == (pytest.approx(0.051), 100)
    assert loss(case(residency=in_host()), Tier.HOST, P) == (pytest.approx(1.61 - 0.051), 100)
    assert loss(case(residency=Residency(0, 0, 100, 0)), Tier.DISK, P) == (pytest.approx(1.61 - 0.105), 100)
    assert density(case(), Tier.DEVICE, P) == pytest.approx(1.61 / (100 * 10.0))
    late = Curve([0.9 * math.exp(-t) + 0.1 * math.exp(-t / 1000) for t in EDGES])
    assert return_rate(late, 0.0) > 40 / late.expected_hold(0.0, 1e6)  # most come back at once
    assert density(case(resume=0.0), Tier.DEVICE, P) == 0.0
    above = density(case(residency=in_host()), Tier.DISK, P)
    below = density(case(residency=Residency(0, 0, 100, 0)), Tier.DISK, P)
    assert above == pytest.approx(0.2 * below)  # what is above as well is worth the chance that that goes...
    full = market(host_free=0)
    assert density(case(residency=in_host(), at=full), Tier.DISK, P) == pytest.approx(below)  # ...first
    assert density(case(residency=on_device(copied=100), at=full), Tier.DISK, P) == pytest.approx(below)
    assert density(case(), Tier.DISK, P) == 0.0


def test_restore_when_early_is_cheaper_than_late() -> None:
    """Chance wanted = c_early / (c_early + c_late) = 100 x 0.01 / (1 + 1)."""
    here = case(residency=in_host(), price=0.01)
    reload = reload_of(here)
    assert (reload.blocks, reload.seconds) == (100, pytest.approx(0.051))
    assert reload.pays
    assert chance_wanted(here, reload, P) == pytest.approx(0.5)
    assert chance_wanted(case(residency=in_host(), price=0.0), reload, P) == P.early
    assert restore_in(PointWait(10.0), 0.0, 0.051, 0.5) == pytest.approx(10.0 - 0.051, rel=1e-6)
    assert restore_in(PointWait(10.0), 9.96, 0.051, 0.5) == 0.0
    assert 15.0 < restore_in(around(30.0, 12.0), 0.0, 3.0, 0.2) < 30.0
    assert restore_in(Curve([1.0 / (1.0 + t) for t in EDGES]), 1.0, 0.01, 0.5) == math.inf


def test_a_load_that_is_no_faster_than_computing_is_no_reload() -> None:
    slow = type(PRICES)(1, (0.0, 0.0), (2.0, 0.0), (0.0, 0.0), (2.0, 0.0), PRICES.prefill, 16)
    assert not reload_of(case(residency=in_host(), at=market(prices=slow))).pays


# --- decisions -----------------------------------------------------------------------------------


def test_nobody_needs_the_room_a_cheap_copy_is_made_and_no_expensive_one() -> None:
    policy = PricedPolicy()
    policy.parked(park())
    assert policy.decide("s", on_device(), market(device_free=900)).choice is Choice.HOST
    assert policy.decide("s", on_device(copied=100), market(device_free=900)).choice is Choice.HOLD
    assert policy.decide("s", on_device(), market(device_free=900, host=0)).choice is Choice.HOLD


def test_under_pressure_short_waits_are_held_and_long_ones_leave() -> None:
    policy = PricedPolicy()
    scarce = market(device_free=240)  # 4 % of the full price: a reload is worth 1.3 s of holding
    for i in range(60):
        for tool, seconds in (("fast", 0.2), ("slow", 90.0)):
            policy.parked(park(tool, float(i), tools=(tool,)))
            policy.resumed(tool, i + seconds, seconds)
    policy.parked(park("fast", tools=("fast",)))
    policy.parked(park("slow", tools=("slow",)))
    for session, choice in (("fast", Choice.HOLD), ("slow", Choice.HOST)):
        first = policy.decide(session, on_device(), scarce)
        assert (first.choice, first.reason) == (Choice.HOST, "a copy is cheap")
        now, then = first.until, []
        for _ in range(3):
            then.append(policy.decide(session, on_device(copied=100), market(now, device_free=240)))
            now = then[-1].until
        assert then[0 if session == "fast" else -1].choice is choice
    fast, slow_worth = (policy.worth(s, Tier.DEVICE, on_device(), scarce) for s in ("fast", "slow"))
    assert fast > 2 * slow_worth > 0


def test_sessions_that_nobody_comes_back_to_are_dropped_and_worth_nothing() -> None:
    for why in (Departure.SUPERSEDED, Departure.COMPACTED, Departure.FINISHED):
        policy = PricedPolicy()
        policy.parked(park())
        policy.gone("s", 1.0, why)
        policy.gone("s", 1.0, why)
        assert policy.decide("s", on_device(), market(2.0)).choice is Choice.DROP
        assert policy.worth("s", Tier.DEVICE, on_device(), market(2.0)) == 0.0
    final = PricedPolicy()
    final.parked(park(hints=Hints(final=True)))
    assert final.decide("s", on_device(), market()).choice is Choice.DROP
    assert PricedPolicy().decide("never seen", on_device(), market()).choice is Choice.DROP


def test_an_abandoned_session_is_worth_less_and_whole_again_when_it_comes_back() -> None:
    policy = PricedPolicy()
    policy.parked(park())
    before = policy.worth("s", Tier.DEVICE, on_device(), market(1.0))
    policy.gone("s", 1.0, Departure.ABANDONED)
    assert 0 < policy.worth("s", Tier.DEVICE, on_device(), market(1.0)) < 0.2 * before
    policy.resumed("s", 2.0, 2.0)
    policy.parked(park(at=3.0))
    assert policy.worth("s", Tier.DEVICE, on_device(), market(4.0)) > 0.5 * before


def test_worth_falls_as_a_wait_goes_on_beyond_all_experience() -> None:
    policy = PricedPolicy()
    policy.parked(park())
    worths = [policy.worth("s", Tier.DEVICE, on_device(), market(t)) for t in (1.0, 30.0, 300.0, 30_000.0)]
    assert worths == sorted(worths, reverse=True)
    assert worths[-1] < 1e-3 * worths[0]


def test_a_result_that_is_arriving_brings_the_session_back() -> None:
    policy = PricedPolicy()
    for _ in range(50):
        policy.parked(park("x", tools=("ci",)))
        policy.resumed("x", 600.0, 600.0)
    policy.parked(park(tools=("ci",)))
    room = market(20.0, device_free=200)
    waiting = policy.decide("s", in_host(), room)
    assert waiting.choice is Choice.HOST
    assert waiting.until > 20.0
    policy.signalled("s", Signal.STREAMING, 20.0, Hints())
    soon = policy.decide("s", in_host(), room)
    assert soon.until < 21.0 < waiting.until
    assert policy.decide("s", in_host(), market(soon.until, device_free=200)).choice is Choice.RESTORE


def test_no_restore_without_room_and_no_more_than_bounded_ones() -> None:
    policy = PricedPolicy()
    policy.parked(park(hints=Hints(expected_wait=5.0)))
    assert policy.decide("s", in_host(), market(5.0, device_free=99)).choice is not Choice.RESTORE
    choices = [policy.decide("s", in_host(), market(5.0, device_free=200)).choice for _ in range(10)]
    assert choices.count(Choice.RESTORE) <= PricedParameters().restores


def test_a_preempted_session_keeps_a_copy_if_that_is_cheaper_than_computing() -> None:
    policy = PricedPolicy()
    policy.parked(park(rest=Rest.PRESSURE))
    scarce = market(device_free=0, demand=50, waiting=1, queue=1.0)
    assert policy.decide("s", on_device(), scarce).choice is Choice.HOST
    policy.resumed("s", 1.0, 1.0)
    curves = policy.outlook.learned.heard("").curves
    assert curves.waiting == 0
    assert list(curves.names()) == []  # the scheduler's own waiting is not a tool's


def test_copies_go_on_to_disk_the_sooner_the_shorter_the_slab() -> None:
    """100 blocks: computing takes 1.505 s longer than reading, writing is felt as 0.25 x 0.205 s."""
    dear = msgspec.structs.replace(PRICES, write=(0.005, 0.02))  # felt as 0.5 s
    for prices, host_free, choice in (
        (PRICES, 800, Choice.DISK),
        (dear, 800, Choice.HOST),
        (dear, 10, Choice.DISK),
    ):
        policy = PricedPolicy()
        policy.parked(park(tools=(), rest=Rest.IDLE))
        at = market(9.0, demand=10, host=1000, host_free=host_free, disk=10_000, prices=prices)
        assert policy.decide("s", in_host(), at).choice is choice
    assert policy.decide("s", in_host(), market(9.0, demand=10, host_free=10)).choice is Choice.HOST


def test_older_programs_go_first_within_a_bound_and_priorities_move_seconds() -> None:
    policy = PricedPolicy(PricedParameters(seniority=50.0))
    policy.parked(park("old", program=0.0))
    policy.parked(park("older", program=-1000.0))
    policy.parked(park("young", program=90.0))
    policy.parked(park("urgent", program=90.0, hints=Hints(priority=10**9)))
    loud = 2.0 / 32  # the mean of what the last 32 said, one of them as much as one can
    ranks = {s: policy.rank(s, 100.0, market()) for s in ("old", "older", "young", "urgent", "unknown")}
    assert ranks == {
        "old": (50.0 + loud,),
        "older": (50.0 + loud,),
        "young": (90.0 + loud,),
        "urgent": (88.0,),
        "unknown": (100.0,),
    }


def test_what_everybody_says_is_nothing_special() -> None:
    """All shout: none is moved in the line by more than a tenth, nor does anybody's second count for more."""
    policy = PricedPolicy()
    for number in range(200):
        policy.parked(park(f"s{number}", hints=Hints(priority=2)))
    assert policy.rank("s199", 100.0, market()) == (pytest.approx(100.0, abs=0.1),)
    quiet = PricedPolicy()
    quiet.parked(park("s199"))
    worth = [each.worth("s199", Tier.DEVICE, on_device(), market()) for each in (policy, quiet)]
    assert worth[0] == pytest.approx(worth[1], rel=0.1)


def test_the_oracle_restores_just_in_time() -> None:
    policy = PricedPolicy(foresight=lambda session, turn: 50.0 if turn == 1 else math.inf, name="oracle")
    policy.parked(park())
    now = 0.0
    while True:
        decision = policy.decide("s", in_host(), market(now, device_free=240))
        if decision.choice is Choice.RESTORE:
            break
        now = decision.until
    assert now == pytest.approx(50.0 - 0.051, rel=1e-3)
    policy.parked(park(turn=2))
    assert policy.decide("s", on_device(), market()).choice is Choice.DROP


# --- the LRU beside it ---------------------------------------------------------------------------


def test_the_shadow_lru_leads_while_it_is_cheaper_and_not_longer() -> None:
    """Clients that say "never" of sessions that come back at once: their KV is dropped, LRU keeps it."""
    policy, now, resting = PricedPolicy(), 0.0, deque[str]()

    def turn(session: str, hints: Hints) -> None:
        nonlocal now
        if len(resting) == 11:  # of 12 sessions of 100 blocks, for which the device is too small
            policy.resumed(resting.popleft(), now, 11.0)
        policy.parked(park(session, now, hints=hints))
        policy.decide(session, on_device(), market(now, device_free=900))
        resting.append(session)
        now += 1.0

    for i in range(40):
        turn(f"s{i % 12}", Hints(final=True))
    assert policy.leader == "lru"
    assert policy.takeovers == 1
    ours, theirs = policy.shadow_costs
    assert ours > theirs > 0
    session = f"s{40 % 12}"
    turn(session, NO_HINTS)
    decision = policy.decide(session, on_device(), market(now, device_free=900))
    assert (decision.choice, decision.reason) == (Choice.HOST, "LRU leads")
    assert policy.worth(session, Tier.DEVICE, on_device(), market(now)) == now - 1.0
    for i in range(41, 240):
        turn(f"s{i % 12}", NO_HINTS)
    assert policy.leader == "priced"
    assert policy.takeovers == 1


def test_without_hints_or_pressure_lru_never_leads() -> None:
    policy = PricedPolicy()
    for i in range(300):
        policy.parked(park(f"s{i % 5}", float(i)))
        policy.decide(f"s{i % 5}", on_device(), market(float(i), device_free=500))
        policy.resumed(f"s{i % 5}", i + 1.0, 1.0)
    assert policy.takeovers == 0


def test_parameters_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="robustness"):
        PricedPolicy(PricedParameters(robustness=0.0))
