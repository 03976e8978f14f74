"""What the core's view says of predictions, for operators."""

from __future__ import annotations

from agentserve.messages import Park
from agentserve.types import SessionId
from tests.engines import Rig, tier_parts
from tiering.policy.lru import LruPolicy
from tiering.policy.priced import PricedPolicy


def test_predictions_of_waits_are_in_the_view() -> None:
    rig = Rig(tiers=tier_parts(8, policy=PricedPolicy()))
    turn = rig.submit("a", [1, 2, 3], max_tokens=2)
    rig.drain()
    rig.core.handle(Park(SessionId("a"), turn, True, ("grep",)), rig.now)
    rig.now += 0.5
    rig.submit("a", [1, 2, 3, *rig.output("a"), 7], max_tokens=2)
    rig.drain()
    tiers = rig.core.view().tiers
    assert tiers is not None
    assert tiers.waits == {"grep": (1, 1, 1)}


def test_a_policy_that_predicts_nothing_says_nothing() -> None:
    tiers = Rig(tiers=tier_parts(8, policy=LruPolicy())).core.view().tiers
    assert tiers is not None
    assert tiers.waits == {}
