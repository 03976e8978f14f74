"""What the core makes of being told that nobody is expected back, under each policy that stands alone."""

from __future__ import annotations

import pytest

from agentserve.messages import Abort, Devalue, Hint, Park
from agentserve.types import SessionId, TurnId
from tests.engines import TierRig, cold
from tiering.policy.base import Departure, Hints, Policy
from tiering.policy.lru import LruPolicy
from tiering.policy.priced import PricedPolicy

A = SessionId("a")
PROMPT = list(range(34))  # eight full blocks

POLICIES = [LruPolicy, PricedPolicy]


def rig(policy: type[Policy]) -> TierRig:
    made = TierRig((32,), host=8, policy=policy())
    number = made.submit("a", PROMPT, max_tokens=1)
    made.drain()
    made.core.handle(Park(A, number, True, ("t",)), made.now)
    made.settle()
    return made


def devalued(made: TierRig) -> bool:
    return made.tiers.ledger.known[A].devalued


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
