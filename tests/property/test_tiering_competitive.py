"""Whatever clients say, a wait costs at most a constant factor of the better of holding and dropping.

Competitive ratio of ski rental with advice (Purohit, Svitkina and Kumar, 2018), with our moves: holding
ends between x and 1/x times break-even (x = 1/2), so leaving early costs at most (x + 1) / x times the
best, leaving late 1/x + 1. A priority counts a client's seconds up to twice or half, a session may be
restored twice per wait, and a copy is felt in addition: 13 with hints, 8 without. Where there is a tier
below, a copy made in advance and one reload from it come on top, whatever the best is: the price of
never having to compute again.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policy_rig import PRICES, Game, Heard, market, park
from tiering.policy.base import Hints, Market, Signal
from tiering.policy.priced import PricedPolicy
from tiering.policy.valuation import PricedParameters

WITH_HINTS, WITHOUT = 13.0, 8.0
BLOCKS = 100
WAITS = st.one_of(st.floats(1e-3, 5.0), st.floats(1e-3, 1e4))
# `final` is not advice but an order: the client asks to forget the session (and is slower if it was wrong).
HINTS = st.builds(
    Hints,
    expected_wait=st.one_of(st.none(), st.floats(0.0, 1e6)),
    deadline=st.one_of(st.none(), st.floats(-1e6, 1e6)),
    priority=st.integers(-10, 10),
    retain=st.one_of(st.none(), st.floats(0, 1)),
)
HEARD = st.lists(st.builds(Heard, st.floats(0.0, 100.0), st.sampled_from(list(Signal)), HINTS), max_size=6)
MARKETS = st.builds(
    lambda free, demand, queue, host, disk: market(
        device_free=free, demand=demand, queue=queue, host=host, disk=disk
    ),
    st.integers(0, 249),
    st.sampled_from([0, 0, 10, 1000]),
    st.floats(0, 3),
    st.sampled_from([0, 50, 10_000]),
    st.sampled_from([0, 10_000]),
)


def play(
    policy: PricedPolicy, at: Market, wait: float, hints: Hints, heard: list[Heard]
) -> tuple[float, float]:
    """What the wait cost, and what the better of holding on and dropping at once would have."""
    pressure = min(max(1.0 - (at.device_free - at.demand) / 250, 0.0), 1.0)  # one session: mean = its blocks
    queue = PricedParameters().queue_weight * at.queue
    game = Game(policy, at, pressure, PricedParameters().background, queue)
    cost = game.play(wait, hints, heard)
    assert game.moves <= PricedParameters().restores
    return cost, min(pressure * wait, PRICES.recompute(0, BLOCKS * 16) + queue)


def copy_and_back(at: Market) -> float:
    """Nothing where there is no host slab that the session fits into."""
    if at.host < BLOCKS:
        return 0.0
    felt = PRICES.seconds(PRICES.save, BLOCKS) + (PRICES.seconds(PRICES.write, BLOCKS) if at.disk else 0.0)
    back = PRICES.seconds(PRICES.fetch if at.disk else PRICES.load, BLOCKS)
    return PricedParameters().background * felt + back


SLACK = 0.01  # seconds: decisions are looked at again after a millisecond at the earliest


@settings(deadline=None)
@given(MARKETS, WAITS, HINTS, HEARD)
def test_hostile_hints_cost_a_constant_factor(
    at: Market, wait: float, hints: Hints, heard: list[Heard]
) -> None:
    cost, best = play(PricedPolicy(), at, wait, hints, heard)
    assert cost <= WITH_HINTS * best + copy_and_back(at) + SLACK


@settings(deadline=None)
@given(MARKETS, WAITS, st.lists(st.floats(1e-3, 1e3), max_size=12))
def test_without_hints_the_factor_is_smaller_whatever_was_learned(
    at: Market, wait: float, past: list[float]
) -> None:
    policy = PricedPolicy()
    for seconds in past * 5:
        policy.parked(park(at=-seconds))
        policy.resumed("s", 0.0, seconds)
    cost, best = play(policy, at, wait, Hints(), [])
    assert cost <= WITHOUT * best + copy_and_back(at) + SLACK


def test_good_hints_are_better_than_none_and_bad_ones_are_soon_ignored() -> None:
    """A tool of 0.05 s or 20 s: who says which saves; who lies is believed less with every lie."""
    at = market(device_free=0, demand=500, waiting=3, host=0)
    totals = []
    for says in (lambda true: None, lambda true: true, lambda true: 20.05 - true):
        policy = PricedPolicy()
        total = 0.0
        for i in range(120):
            true = 20.0 if i % 3 == 0 else 0.05
            cost, _ = play(policy, at, true, Hints(expected_wait=says(true)), [])
            total += cost
        totals.append(total)
    none, honest, lying = totals
    assert honest < none
    assert lying < 1.25 * none
    assert policy.outlook.trust("s") < 0.1


@pytest.mark.parametrize("free", [0, 100])
def test_a_known_wait_costs_what_the_best_costs(free: int) -> None:
    at = market(device_free=free, demand=10, host=0)
    for wait in (0.1, 1.0, 1.6, 2.0, 50.0):
        policy = PricedPolicy(PricedParameters(robustness=1e-6), foresight=lambda session, turn, w=wait: w)
        cost, best = play(policy, at, wait, Hints(), [])
        assert cost <= best * 1.01 + SLACK


@settings(deadline=None, max_examples=30)
@given(MARKETS, st.floats(1e-3, 60.0), st.floats(0.1, 1.0))
def test_a_prediction_that_always_says_soon_is_believed_for_a_bounded_time(
    at: Market, wait: float, soon: float
) -> None:
    """The worst advice for holding: whenever it is asked, the wait is about to end."""
    policy = PricedPolicy(foresight=lambda session, turn: game.now + soon)
    pressure = min(max(1.0 - (at.device_free - at.demand) / 250, 0.0), 1.0)
    game = Game(policy, at, pressure, PricedParameters().background, 0.0)
    cost = game.play(wait, Hints())
    best = min(pressure * wait, PRICES.recompute(0, BLOCKS * 16))
    assert cost <= WITHOUT * best + copy_and_back(at) + SLACK
