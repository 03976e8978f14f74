"""What the core makes of being told that nobody is expected back, under each policy that stands alone."""

from __future__ import annotations

import math

import pytest

from agentserve.messages import Abort, Close, Devalue, Hint, Park, ResetPrefixCache
from agentserve.types import SessionId, TurnId
from tests.engines import TierRig, cold
from tests.tier_turns import Scripted
from tiering.policy.base import Departure, Hints, Policy
from tiering.policy.lru import LruPolicy
from tiering.policy.priced import PricedPolicy
from tiering.types import Tier

A = SessionId("a")
PROMPT = list(range(34))  # eight full blocks

POLICIES = [LruPolicy, PricedPolicy]


def rig(policy: type[Policy], disk: int = 0) -> TierRig:
    made = TierRig((32,), host=8, disk=disk, policy=policy())
    number = made.submit("a", PROMPT, max_tokens=1)
    made.drain()
    made.core.handle(Park(A, number, True, ("t",)), made.now)
    made.settle()
    return made


def devalued(made: TierRig) -> bool:
    return made.tiers.ledger.known[A].devalued


def worth(made: TierRig, tier: Tier) -> float:
    return made.tiers.ledger.standing(made.tiers.ledger.known[A], tier)[0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", list(Departure))
def test_the_blocks_of_who_was_left_go_first_and_serve_until_then(
    policy: type[Policy], why: Departure
) -> None:
    made = rig(policy)
    assert not devalued(made)
    made.core.handle(Devalue(A, why), made.now)
    made.core.check()
    if why is not Departure.ABANDONED or policy is LruPolicy:  # who was abandoned may come back, by chance
        assert devalued(made)
    context = PROMPT + made.output("a")
    number = made.submit("a", [*context, 7], max_tokens=1)  # it comes back after all
    made.drain()
    assert made.output("a", number) == cold([*context, 7], 1)
    assert made.ended("a", number).usage.cached >= 32  # and finds what is there
    made.core.handle(Park(A, number, True, ("t",)), made.now)
    made.settle()
    assert not devalued(made)  # and is as others are


@pytest.mark.parametrize("policy", POLICIES)
def test_a_client_that_left_in_mid_turn_is_told_after_the_abort(policy: type[Policy]) -> None:
    made = rig(policy)
    context = PROMPT + made.output("a")
    number = made.submit("a", [*context, 7], max_tokens=8)
    made.step()
    for command in (Abort(A, number), Park(A, number, True, ("t",)), Devalue(A, Departure.SUPERSEDED)):
        made.core.handle(command, made.now)
    made.settle(10.0)
    assert devalued(made)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", list(Departure))
def test_who_is_left_in_mid_turn_runs_on_and_its_copies_go_first(
    policy: type[Policy], why: Departure
) -> None:
    made = rig(policy, disk=16)
    assert made.tiers.manager.host_used == 8
    prompt = [*PROMPT, *made.output("a"), 7]
    number = made.submit("a", prompt, max_tokens=9)
    made.step()
    made.core.handle(Devalue(A, why), made.now)
    made.core.check()
    held = made.core.kv.blocks_of(A)
    other = made.submit("b", list(range(100, 134)), max_tokens=1)
    made.step()
    made.core.handle(Park(SessionId("b"), other, True, ("t",)), made.now)
    for _ in range(5):
        made.step()
    known = made.tiers.ledger.known[SessionId("b")]
    manager = made.tiers.manager
    assert all(manager.copied(key) for key in known.keys), "it has taken all slots of who was left"
    assert made.core.kv.blocks_of(A) >= held
    made.drain()
    assert made.output("a", number) == cold(prompt, 9)
    made.core.handle(Park(A, number, True, ("t",)), made.now)
    made.settle()
    assert not devalued(made), "what its end means counts"
    for name in "ab":
        made.core.handle(Close(SessionId(name)), made.now)
    made.settle()
    made.core.handle(ResetPrefixCache(1), made.now)
    made.core.check()
    assert (made.core.kv.pools[0].free, manager.host_free) == (32, 8)


def test_copies_of_who_is_left_in_mid_turn_are_worth_nothing_whatever_its_policy_says() -> None:
    made = rig(Scripted, disk=16)
    made.submit("a", [*PROMPT, *made.output("a"), 7], max_tokens=9)
    made.step()
    assert worth(made, Tier.DISK) == 1.0
    made.core.handle(Devalue(A, Departure.SUPERSEDED), made.now)
    assert [worth(made, tier) for tier in (Tier.HOST, Tier.DISK)] == [0.0, 0.0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", list(Departure))
def test_a_turn_that_waits_still_wants_what_is_below(policy: type[Policy], why: Departure) -> None:
    made = rig(policy)
    made.core.kv.evict_all()
    prompt = [*PROMPT, *made.output("a"), 7]
    number = made.submit("a", prompt, max_tokens=2)
    made.core.handle(Devalue(A, why), made.now)
    made.core.check()
    assert made.tiers.manager.moving == 8, "its load is not taken back"
    assert [worth(made, tier) for tier in (Tier.HOST, Tier.DISK)] == [math.inf, math.inf]
    made.drain()
    assert made.output("a", number) == cold(prompt, 2)
    assert made.ended("a", number).usage.cached == 32


def test_what_is_told_before_the_meaning_of_a_turns_end_is_not_lost() -> None:
    made = rig(LruPolicy)
    number = made.submit("a", [*PROMPT, *made.output("a"), 7], max_tokens=1)
    made.drain()
    made.core.handle(Devalue(A, Departure.ABANDONED), made.now)
    made.settle(10.0)  # the core takes it for idle by itself
    assert devalued(made)
    made.core.handle(Park(A, number, True, ("t",)), made.now)
    assert not devalued(made)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_finished_session_that_is_parked_again_is_worth_something_again(policy: type[Policy]) -> None:
    made = rig(policy)
    made.core.handle(Hint(A, Hints(final=True)), made.now)
    made.core.handle(Devalue(A, Departure.FINISHED), made.now)
    assert devalued(made)
    made.core.handle(Park(A, TurnId(1), True, ("t",), Hints(priority=1)), made.now)
    made.settle()
    assert not devalued(made)
    assert made.tiers.ledger.known[A].hints == Hints(priority=1)


def test_what_a_park_does_not_repeat_does_not_hold() -> None:
    made = rig(PricedPolicy)
    made.core.handle(Park(A, TurnId(1), True, ("t",), Hints(expected_wait=5.0, retain=0.5)), made.now)
    made.core.handle(Park(A, TurnId(1), True, ("t",)), made.now)
    assert made.tiers.ledger.known[A].hints == Hints()
    assert made.tiers.ledger.known[A].runs == ()


def test_who_the_worker_does_not_know_is_nobody() -> None:
    made = rig(LruPolicy)
    made.core.handle(Devalue(SessionId("b"), Departure.ABANDONED), made.now)
    made.core.check()
    assert SessionId("b") not in made.tiers.ledger.known
