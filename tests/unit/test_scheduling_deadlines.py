"""When tokens are due, and what that leaves for a step."""

from __future__ import annotations

import math
from array import array

import pytest

from agentserve.core.scheduling.deadlines import STRETCH, UNPROMISED, first_due, least_slack, read_by
from agentserve.core.session import Turn
from agentserve.types import NO_SLO, Sampling, Slo, TurnId


def token_due(slo: Slo, arrived: float, *came: float) -> float:
    """When the next token of a turn is due whose tokens came then."""
    turn = Turn(TurnId(1), 1, Sampling(), 99, (0, 1), arrived, array("i"), slo=slo)
    for index, at in enumerate(came):
        turn.wrote(index, at)
    return turn.next_due(len(came))


def test_without_promises_nothing_is_due() -> None:
    assert first_due(NO_SLO, 5.0) == math.inf
    assert token_due(NO_SLO, 5.0, 6.0) == math.inf


def test_time_that_a_turn_is_early_is_kept() -> None:
    slo = Slo(ttft=2.0, tbt=0.1)
    assert first_due(slo, 10.0) == 12.0
    assert token_due(slo, 10.0, 10.5) == pytest.approx(12.1)
    assert token_due(slo, 10.0, 13.0, 13.02, 13.05) == pytest.approx(13.3), (
        "a late first token moves those after it"
    )


def test_a_gap_is_from_the_last_token_however_early_that_was() -> None:
    assert token_due(Slo(ttft=2.0, gap=0.1), 10.0, 10.5) == pytest.approx(10.6)
    assert token_due(Slo(ttft=2.0, tbt=0.1, gap=0.3), 10.0, 10.5, 10.7, 10.8) == pytest.approx(11.1)
    assert token_due(Slo(tbt=0.1, gap=0.3), 10.0, 10.5, 10.52) == pytest.approx(10.7)


def test_the_stricter_promise_counts() -> None:
    assert Slo(tbt=0.2, tpot=0.05).pace == 0.05
    assert token_due(Slo(tbt=0.2, total=1.0), 0.0, 0.9) == 1.0
    assert first_due(Slo(total=3.0), 1.0) == 4.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_promise_is_seconds_above_zero(wrong: float) -> None:
    with pytest.raises(ValueError, match="tbt"):
        Slo(tbt=wrong)


def test_what_cannot_be_saved_is_set_aside() -> None:
    assert least_slack([10.2, 10.05, 9.0], 10.0, 0.1) == (pytest.approx(0.2), 2)
    assert least_slack([], 10.0, 0.1) == (math.inf, 0)


def test_prompts_are_read_in_the_order_in_which_they_are_due() -> None:
    near, far = Slo(ttft=1.0), Slo(ttft=30.0)
    assert read_by(near, 10.0, 0.5, 10.0) < read_by(far, 0.0, 0.1, 10.0)
    assert read_by(far, 0.0, 9.0, 1.0) == read_by(far, 0.0, 1.0, 9.0), "it stays as the prompt is read"
    assert read_by(NO_SLO, 10.0, 0.5, 12.0) == 10.0 + STRETCH * 0.5


def test_a_prompt_that_is_late_anyway_lets_pass_who_is_not_but_not_forever() -> None:
    slo = Slo(ttft=1.0)
    late = read_by(slo, 0.0, 0.5, 0.6)
    assert late > read_by(slo, 0.6, 0.5, 0.6) > read_by(slo, 0.0, 0.5, 0.5)
    assert late <= read_by(slo, UNPROMISED + STRETCH, 0.5, UNPROMISED + STRETCH)
    assert read_by(slo, 0.0, 0.5, 100.0) == late
