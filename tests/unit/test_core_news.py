"""Decisions as news: told once, in order, and never many."""

from __future__ import annotations

from agentserve.core.ledger import Known
from agentserve.core.news import BURST, EVERYBODY, WINDOW, DecisionNews
from agentserve.messages import Decided, Decisions, Park
from agentserve.types import SessionId
from tests.engines import Rig, tier_parts
from tests.unit.test_core_tiers_view import Scripted
from tiering.policy.base import Choice, Decision


def decide(news: DecisionNews, known: Known, at: float, reason: str) -> None:
    assert known.decided(Decision(Choice.HOLD, at + 1.0, reason), at)
    news.add(known, known.decisions[-1])


def told(news: DecisionNews) -> list[tuple[str, int, str]]:
    batch = news.take()
    return [(key, untold, made.reason) for key, untold, made in batch.made] if batch is not None else []


def test_nothing_is_made_where_nothing_is_decided() -> None:
    assert DecisionNews().take() is None


def test_of_one_session_a_burst_is_told_and_then_what_its_window_allows() -> None:
    news, known = DecisionNews(), Known(SessionId("s"), 0.0)
    for number in range(3 * BURST):
        decide(news, known, number * 0.01, f"r{number}")
    assert told(news) == [("s", 0, f"r{number}") for number in range(BURST)]
    assert told(news) == []
    decide(news, known, WINDOW + 1.0, "later")
    assert told(news) == [("s", 2 * BURST, "later")]  # so many were left out before it
    decide(news, known, WINDOW + 2.0, "again")
    assert told(news) == [("s", 0, "again")]


def test_a_session_that_changes_its_mind_for_ever_is_told_of_rarely() -> None:
    news, known = DecisionNews(), Known(SessionId("s"), 0.0)
    count = 0
    for number in range(10_000):
        decide(news, known, number * 0.01, f"r{number}")
        count += len(told(news))
    assert count <= BURST  # a burst at the beginning: it never rests for a window


def test_all_sessions_together_are_bounded() -> None:
    news = DecisionNews()
    crowd = [Known(SessionId(f"s{number}"), 0.0) for number in range(EVERYBODY + 50)]
    for known in crowd:
        decide(news, known, 1.0, "one")
    assert len(told(news)) == EVERYBODY
    for known in crowd[-50:]:
        decide(news, known, 2.0 + WINDOW, "two")
    assert told(news) == [(known.id, 1, "two") for known in crowd[-50:]]


def test_they_leave_with_the_cores_events_once_and_repeats_are_no_news() -> None:
    hold, host = (Choice.HOLD, "soon"), (Choice.HOST, "late")
    rig = Rig(tiers=tier_parts(8, policy=Scripted(hold, hold, host, host, hold)))
    turn = rig.submit("a", [1, 2, 3, 4, 5], max_tokens=4)
    rig.drain()
    assert not any(isinstance(event, Decisions) for event in rig.events)  # while nothing waits
    rig.core.handle(Park(SessionId("a"), turn, True, ("grep",)), rig.now)
    found: list[tuple[str, str]] = []
    for second in range(5):
        batches = [event for event in rig.core.take_events() if isinstance(event, Decisions)]
        assert len(batches) <= 1
        for key, untold, made in batches[0].made if batches else ():
            assert (key, untold) == ("a", 0)
            assert isinstance(made, Decided)
            assert made.residency.device == 2
            found.append((made.choice, made.reason))
        rig.core.tick(rig.now + 2.0 * (second + 1))
    assert found == [("hold", "soon"), ("host", "late"), ("hold", "soon")]
