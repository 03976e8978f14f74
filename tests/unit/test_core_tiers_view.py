"""What the core's view says of predictions, for operators."""

from __future__ import annotations

from agentserve.core.ledger import MOST_DECISIONS
from agentserve.messages import Describe, Description, Park
from agentserve.types import SessionId
from tests.engines import Rig, tier_parts
from tiering.policy.base import Choice, Decision, Market, Residency
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


class Scripted(LruPolicy):
    """Says what it is told, one answer after the other."""

    def __init__(self, *answers: tuple[Choice, str]) -> None:
        super().__init__()
        self.answers = list(answers)

    def decide(self, session: str, residency: Residency, market: Market) -> Decision:
        choice, reason = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Decision(choice, market.now + 1.0, reason, 0.5)


def test_what_was_decided_is_kept_as_long_as_it_is_news() -> None:
    hold, host = (Choice.HOLD, "soon"), (Choice.HOST, "late")
    rig = Rig(tiers=tier_parts(8, policy=Scripted(hold, hold, host, (Choice.HOST, "later"), hold)))
    turn = rig.submit("a", [1, 2, 3, 4, 5], max_tokens=4)
    rig.drain()
    rig.core.handle(Park(SessionId("a"), turn, True, ("grep",)), rig.now)
    times = [rig.now]
    for _ in range(4):
        times.append(rig.now + len(times) * 1.0)
        rig.core.tick(times[-1])
    rig.core.handle(Describe(1, SessionId("a")), times[-1])
    (answer,) = [event for event in rig.core.take_events() if isinstance(event, Description)]
    assert answer.session is not None
    made = answer.session.decisions
    assert [(each.choice, each.reason) for each in made] == [
        ("hold", "soon"), ("host", "late"), ("host", "later"), ("hold", "soon"),
    ]  # fmt: skip
    assert [each.at for each in made] == [times[0], *times[2:]]
    assert made[0].residency == answer.session.residency
    assert made[0].price == 0.5


def test_the_log_of_decisions_is_bounded() -> None:
    answers = [(Choice.HOLD, f"reason {number}") for number in range(3 * MOST_DECISIONS)]
    rig = Rig(tiers=tier_parts(8, policy=Scripted(*answers)))
    turn = rig.submit("a", [1, 2, 3], max_tokens=1)
    rig.drain()
    rig.core.handle(Park(SessionId("a"), turn, waiting_tool=False), rig.now)
    for second in range(len(answers)):
        rig.core.tick(rig.now + 2.0 * second)
    assert rig.core.tiers is not None
    kept = rig.core.tiers.ledger.known[SessionId("a")].decisions
    assert (len(kept), kept[-1].reason) == (MOST_DECISIONS, answers[-1][1])


def test_a_policy_that_predicts_nothing_says_nothing() -> None:
    tiers = Rig(tiers=tier_parts(8, policy=LruPolicy())).core.view().tiers
    assert tiers is not None
    assert tiers.waits == {}
