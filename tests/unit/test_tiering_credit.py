"""Credit: earned by foreseeing ends that the learned curve did not, lost faster than it is earned."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.credit import Credit, CreditSettings, believed
from tiering.survival import TOOL_PRIOR, mixture


def told(credit: Credit, session: str, said: float, waited: float, at: float = 0.0) -> None:
    credit.ended(session, credit.said(said, at, TOOL_PRIOR), waited)


def trust(credit: Credit, session: str = "s") -> float:
    return sum(credit.weights(session))


def test_before_anybody_has_said_anything_a_word_is_half_believed() -> None:
    assert trust(Credit()) == pytest.approx(0.5)
    assert len(set(Credit().weights("s"))) == 1


def test_who_foresees_is_believed_and_who_is_only_plausible_is_not() -> None:
    """Waits of a tool, told as they are, and told as those of another call: right on the whole, and empty."""
    rng = random.Random(1)
    waits = [TOOL_PRIOR.quantile(rng.random()) for _ in range(60)]
    honest, empty = Credit(), Credit()
    for wait, other in pairwise(waits):
        told(honest, "s", wait, wait)
        told(empty, "s", other, wait)
    assert trust(honest) > 0.95
    assert honest.weights("s")[1] > honest.weights("s")[0]  # at its word rather than roughly
    assert trust(empty) < 0.01
    assert trust(honest, "new") > 0.7
    assert trust(empty, "new") < 0.1


def test_rough_hints_are_believed_roughly() -> None:
    rng, credit = random.Random(2), Credit()
    for _ in range(40):
        wait = 40.0 * rng.lognormvariate(0.0, 0.5)  # longer than the tool's waits are as a rule
        told(credit, "s", 40.0, wait)
    precise = credit.weights("s")[1]
    assert trust(credit) > 0.8
    assert precise < credit.weights("s")[0]


def test_an_honest_session_among_liars_earns_its_own() -> None:
    credit = Credit()
    for number in range(50):
        told(credit, f"liar {number}", 1e6, 1.0)
    assert trust(credit, "honest") < 0.05
    for _ in range(8):
        told(credit, "honest", 20.0, 20.0)
    assert trust(credit, "honest") > 0.5
    assert trust(credit, "liar 3") < 0.05


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1e3), st.booleans()), max_size=60))
def test_three_lies_in_a_row_are_one_too_many_whatever_was_earned_before(
    before: list[tuple[float, bool]],
) -> None:
    """However honest a client was, what it says is no longer believed after three words that could not be
    further from what came; and at no time is it believed without a doubt."""
    credit = Credit()
    for wait, honest in before:
        told(credit, "s", wait if honest else 1e6, wait)
        assert trust(credit) < 1.0
    for _ in range(3):
        told(credit, "s", 1e6, 1.1)
    assert trust(credit) < 0.1


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1e9), st.floats(0.0, 1e7), st.floats(0.0, 1e7)), max_size=30))
def test_whatever_is_said_and_comes_weights_are_chances(said: list[tuple[float, float, float]]) -> None:
    credit = Credit(CreditSettings(most_sessions=4))
    for number, (expected, waited, at) in enumerate(said):
        told(credit, f"s{number % 6}", expected, waited, at)
        weights = credit.weights(f"s{number % 6}")
        assert all(weight >= 0 for weight in weights)
        assert sum(weights) < 1
        wait = mixture(believed(credit.said(expected, at, TOOL_PRIOR), weights))
        assert 0 <= wait.survival(10.0) <= 1


def test_what_a_finished_session_has_earned_goes_with_it() -> None:
    credit = Credit()
    for _ in range(5):
        told(credit, "s", 1e6, 1.0)
    before = trust(credit)
    credit.forget("s")
    assert before < trust(credit) == trust(credit, "another")
