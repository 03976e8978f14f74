"""Policies by name: each answers every question about every session, whatever it has been told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policy_rig import PRICES, in_host, market, on_device, park
from tiering.policy.base import Choice, Departure, Hints, Policy, Rest, Signal
from tiering.policy.pin import PinParameters
from tiering.policy.registry import DEFAULTS, policy_named, policy_names
from tiering.types import Tier


def made(name: str) -> Policy:
    return policy_named(name, PRICES, waits=lambda session, turn: 3.0 * turn)


NAMES = (*policy_names(), "oracle")


def test_the_names_are_the_known_ones() -> None:
    assert policy_names() == ("priced", "lru", "pin", "infercept", "continuum", "thunderagent", "mori")
    assert [made(name).name for name in NAMES] == list(NAMES)


def test_what_is_not_there_is_told_in_one_line() -> None:
    with pytest.raises(ValueError, match="unknown tier policy 'best'; there are: priced, lru, pin") as caught:
        policy_named("best", PRICES)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="true waits"):
        policy_named("oracle", PRICES)
    with pytest.raises(ValueError, match="takes MoriParameters, not PinParameters"):
        policy_named("mori", PRICES, parameters=PinParameters())
    assert policy_named("pin", PRICES, parameters=PinParameters(idle=True)).name == "pin"
    assert set(DEFAULTS) == set(policy_names())


SESSION = st.sampled_from("abcd")
TIME = st.floats(0.0, 100.0)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("park"), SESSION, TIME, st.sampled_from(list(Rest))),
        st.tuples(st.just("resume"), SESSION, TIME, st.floats(0, 1e4)),
        st.tuples(st.just("gone"), SESSION, TIME, st.sampled_from(list(Departure))),
        st.tuples(st.just("signal"), SESSION, TIME, st.sampled_from(list(Signal))),
        st.tuples(st.just("decide"), SESSION, TIME, st.integers(0, 100)),
    ),
    max_size=30,
)
MARKETS = st.builds(
    lambda free, demand, host, disk, queue: {
        "device_free": free,
        "demand": demand,
        "host": host,
        "disk": disk,
        "queue": queue,
    },
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.sampled_from([0, 100, 10_000]),
    st.sampled_from([0, 10_000]),
    st.floats(0, 100),
)
HINTS = st.builds(
    Hints,
    expected_wait=st.one_of(st.none(), st.floats(0, 1e9)),
    priority=st.integers(-100, 100),
    final=st.booleans(),
)


def tell(policy: Policy, event: str, session: str, now: float, what: object, hints: Hints, turn: int) -> None:
    if isinstance(what, Rest):
        tools = ("t",) if what is Rest.TOOL else ()
        policy.parked(park(session, now, rest=what, hints=hints, turn=turn, tools=tools, service=now))
    elif isinstance(what, Departure):
        policy.gone(session, now, what)
    elif isinstance(what, Signal):
        policy.signalled(session, what, now, hints)
    elif event == "resume":
        policy.resumed(session, now, float(what))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(events=EVENTS, at=MARKETS, hints=HINTS)
def test_every_policy_answers_everything_and_repeatably(
    name: str, events: list[tuple[str, str, float, object]], at: dict[str, float], hints: Hints
) -> None:
    answers = []
    for policy in (made(name), made(name)):
        now, given_answers = 0.0, []
        for turn, (event, session, step, what) in enumerate(events, 1):
            now += step
            tell(policy, event, session, now, what, hints, turn)
            here = market(now, **at)  # type: ignore[arg-type]
            copies = (on_device(100, 100), in_host()) if here.host else ()
            for residency in (on_device(), *copies):
                decision = policy.decide(session, residency, here)
                assert decision.until > now
                assert decision.choice is not Choice.RESTORE or residency.host > 0
                assert decision.choice is not Choice.HOST or here.host > 0
                assert decision.choice is not Choice.DISK or here.disk > 0
                assert math.isfinite(decision.price)
                worths = [policy.worth(session, tier, residency, here) for tier in Tier]
                assert not any(math.isnan(worth) for worth in worths)
                rank = policy.rank(session, now, here)
                assert all(math.isfinite(part) for part in rank)
                given_answers.append((decision, worths, rank))
        answers.append(given_answers)
    assert answers[0] == answers[1]
