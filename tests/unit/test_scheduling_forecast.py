"""When a waiting turn would have its first token, by hand-made numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.forecast import NOTHING, Pace, Room, Work, ahead_of, first_token

EMPTY = Room(seats=8, blocks=100, running=0, held=0, lasting=0.0)


def test_prompts_are_read_in_the_steps_that_decodes_leave_room_in() -> None:
    pace = Pace(overhead=0.5, tokens=100)
    assert pace.reading(Work(100, 1.0)) == 1.5
    assert pace.reading(Work(101, 1.0)) == 2.0, "a second step"
    assert pace.reading(NOTHING) == 0.0
    assert pace.reading(Work(10, 0.1)) == 0.6
    assert pace.reading(Work(10, 0.1), busy=True) == 1.5, "others fill the step"
    cut = Pace(overhead=0.5, tokens=100, seconds=0.1)  # a step may have a tenth of a second of prompts
    assert cut.reading(Work(100, 1.0)) == pytest.approx(1.0 + 10 * 0.5)


def test_a_share_of_the_machine_is_waited_for_not_all_of_it() -> None:
    own = Work(100, 1.0, 1, 10)
    assert ahead_of(own, [(1.0, Work(500, 5.0, 5, 50))]).seconds == 1.0, "as much as goes to it meanwhile"
    assert ahead_of(own, [(2.0, Work(500, 5.0, 5, 50))]).seconds == 2.0, "twice the weight"
    assert ahead_of(own, [(1.0, Work(50, 0.5, 1, 5))]).seconds == 0.5, "all that it has"
    assert ahead_of(own, [(1.0, NOTHING)]) == NOTHING


def test_seats_and_pages_come_from_turns_that_end() -> None:
    pace, own = Pace(0.0, 100), Work(10, 0.1, 1, 4)
    full = Room(seats=0, blocks=100, running=4, held=40, lasting=8.0)
    assert first_token(own, NOTHING, pace, full) == pytest.approx(2.0 + 0.1)
    assert first_token(own, Work(10, 0.1, 1, 4), pace, full) == pytest.approx(4.0 + 1.0), "a full step"
    tight = Room(seats=9, blocks=0, running=4, held=8, lasting=8.0)
    assert first_token(own, NOTHING, pace, tight) == pytest.approx(4.0 + 0.1), "two of four must end"
    unknown = Room(seats=0, blocks=0, running=4, held=8, lasting=0.0)
    assert first_token(own, NOTHING, pace, unknown) == 0.1, "who does not know is no pessimist"


@given(
    st.floats(0, 1e6),
    st.floats(0.01, 1e3),
    st.integers(1, 10_000),
    st.floats(1e-12, math.inf),
    st.floats(0, 1e3),
)
def test_more_in_front_never_makes_it_sooner(
    tokens: float, each: float, step: int, cut: float, overhead: float
) -> None:
    """Of tokens that take as long as its own, or longer: quicker ones take the place of others in a step."""
    pace, own = Pace(overhead, step, cut), Work(10, 0.1, 1, 1)
    ahead = Work(tokens, tokens * each, 1, 1)
    alone, behind, further = (
        first_token(own, before, pace, EMPTY) for before in (NOTHING, ahead, ahead + ahead)
    )
    rounded = 1 + 1e-12
    assert alone <= behind * rounded
    assert behind <= further * rounded
    assert behind < math.inf
