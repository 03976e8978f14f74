"""Retention by range in the core: which of a session's own blocks are lost first."""

from __future__ import annotations

from agentserve.messages import Describe, Description, Hint
from agentserve.messages import Park as ParkCommand
from agentserve.types import SessionId, TurnId
from tests.engines import TierRig
from tiering.policy.base import Choice, Decision, Hints, Market, Residency, Span
from tiering.policy.lru import LruPolicy
from tiering.types import Tier

A, B = list(range(34)), list(range(100, 134))  # 8 full blocks each, and what makes the turn's last one whole


class Worths(LruPolicy):
    """Holds everything (or copies it, as told); a session is worth what the table says."""

    eager = False

    def __init__(self, choice: Choice = Choice.HOLD, **worths: float) -> None:
        super().__init__()
        self.choice = choice
        self.worths = worths

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        return Decision(self.choice, market.now + 1e6, "told so")

    def worth(self, session: str, tier: Tier, residency: Residency, market: Market) -> float:
        return self.worths.get(session, 1.0)


def turn(rig: TierRig, name: str, tokens: list[int], hints: Hints | None = None) -> TurnId:
    number = rig.submit(name, tokens, max_tokens=1)
    rig.drain()
    rig.core.handle(ParkCommand(SessionId(name), number, True, ("t",), hints or Hints()), rig.now)
    rig.settle()
    return number


def where(rig: TierRig, name: str) -> Residency:
    rig.core.handle(Describe(1, SessionId(name)), rig.now)
    [event] = [event for event in rig.core.take_events() if isinstance(event, Description)]
    assert event.session is not None
    assert event.session.residency is not None
    return event.session.residency


def test_what_its_client_can_do_without_goes_first_and_the_rest_has_its_fair_place() -> None:
    rig = TierRig((24,), host=4, policy=Worths(a=2.0, b=1.0))
    turn(rig, "a", A, Hints(retain=0.5))
    turn(rig, "b", B)
    turn(rig, "c", list(range(200, 242)))  # 11 blocks
    assert (where(rig, "a").device, where(rig, "b").device) == (4, 8)
    turn(rig, "d", list(range(300, 332)))  # 9 more: now b's go, for they are worth less than what a keeps
    assert where(rig, "a").device == 4
    assert where(rig, "b").device < 8


def test_without_ranges_the_less_worth_goes_first() -> None:
    rig = TierRig((24,), host=4, policy=Worths(a=2.0, b=1.0))
    turn(rig, "a", A)
    turn(rig, "b", B)
    turn(rig, "c", list(range(200, 242)))
    assert (where(rig, "a").device, where(rig, "b").device) == (8, 4)


def test_ranges_hold_from_a_hint_on_and_for_the_turns_to_come() -> None:
    rig = TierRig((24,), host=4, policy=Worths(a=2.0, b=1.0))
    turn(rig, "a", A)
    spans = (Span(0, 16, 90), Span(16, None, 1))
    rig.core.handle(Hint(SessionId("a"), Hints(retain=spans)), rig.now)
    turn(rig, "b", B)
    turn(rig, "c", list(range(200, 242)))
    assert (where(rig, "a").device, where(rig, "b").device) == (4, 8)
    turn(rig, "a", [*A, *rig.output("a"), 7, 8, 9, 10, 11], Hints(retain=spans))
    known = rig.tiers.ledger.known[SessionId("a")]
    assert known.runs == ((4, 1.0), (10, 1 / 90))
    rig.core.handle(ParkCommand(SessionId("a"), TurnId(2), True), rig.now)
    assert known.runs == ()  # taken back: a park says all that holds


def test_below_the_device_ranges_order_copies_alike() -> None:
    rig = TierRig((64,), host=12, policy=Worths(Choice.HOST, a=2.0, b=1.0, c=1.5))
    turn(rig, "a", A, Hints(retain=((Span(0, 16, 100), Span(16, None, 10)))))
    turn(rig, "b", B[:18])
    assert (where(rig, "a").copied, where(rig, "b").copied) == (8, 4)
    turn(rig, "c", list(range(200, 218)))  # 4 blocks: the half of a that weighs 0.2 makes room
    assert (where(rig, "a").copied, where(rig, "b").copied, where(rig, "c").copied) == (4, 4, 4)


def test_what_weighs_less_pushes_nobody_out_that_is_worth_more() -> None:
    rig = TierRig((64,), host=8, policy=Worths(Choice.HOST, a=2.0, b=1.0))
    turn(rig, "b", B)
    turn(rig, "a", A, Hints(retain=0.5))
    assert (where(rig, "a").copied, where(rig, "b").copied) == (4, 4)
