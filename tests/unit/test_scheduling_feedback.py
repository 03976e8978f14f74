"""Skip-join feedback queues: FastServe's numbers, aging, and the order to swap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.feedback import FeedbackQueues, FeedbackSettings


def queues(**changes: float) -> FeedbackQueues:
    return FeedbackQueues(FeedbackSettings(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("milliseconds", "level"), [(5, 0), (10, 0), (10.001, 1), (20, 1), (80, 3), (81, 4), (1000, 7)]
)
def test_a_turn_joins_where_its_first_step_fits(milliseconds: float, level: int) -> None:
    assert FeedbackSettings().joins_at(milliseconds / 1000) == level


@pytest.mark.parametrize(("running", "expected"), [(2, 0.025), (1, 0.050)])
def test_the_next_schedule_time_of_the_example(running: int, expected: float) -> None:
    turns = queues()
    turns.join("high", 0.010, 0.0)
    turns.join("middle", 0.020, 0.0)
    turns.join("low", 0.040, 0.0)
    assert turns.level("low") == 2
    assert turns.next_in("low", running, 0.0) == pytest.approx(expected)


def test_who_is_about_to_be_promoted_is_not_swapped_out() -> None:
    turns = queues()
    turns.join("low", 0.040, 0.0)
    turns.join("high", 0.010, 0.290)
    turns.join("middle", 0.020, 0.290)
    assert turns.next_in("low", 2, 0.290) == pytest.approx(0.010)
    late = "late"
    turns.join(late, 0.040, 0.290)
    assert turns.swap_order(["low", late], 2, 0.290) == [late, "low"]


def test_a_used_up_quantum_moves_down_and_ends_the_line() -> None:
    turns = queues()
    for name in "ab":
        turns.join(name, 0.005, 0.0)
    turns.ran("a", 0.004, 0.1)
    assert turns.level("a") == 0
    turns.ran("a", 0.006, 0.1)
    assert turns.level("a") == 1
    turns.ran("b", 0.010, 0.1)
    assert sorted("ab", key=turns.rank) == ["a", "b"], "order within a batch is kept"


def test_aging_is_in_time_and_starts_the_quantum_anew() -> None:
    turns = queues()
    for name, seconds in (("first", 0.040), ("second", 0.080)):
        turns.join(name, seconds, 0.0)
    turns.ran("first", 0.030, 0.0)
    turns.age(0.299)
    assert turns.level("first") == 2
    turns.age(0.300)
    assert [turns.level(name) for name in ("first", "second")] == [0, 0]
    assert turns.rank("first") < turns.rank("second")
    turns.ran("first", 0.009, 0.300)
    assert turns.level("first") == 0, "what it had used before does not count"


def test_levels_are_bounded() -> None:
    turns = queues(levels=3)
    turns.join("long", 1e9, 0.0)
    turns.ran("long", 1e9, 0.0)
    assert turns.level("long") == 2


@pytest.mark.parametrize("wrong", [{"quantum": 0.0}, {"patience": -1.0}, {"levels": 0}])
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        queues(**wrong)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0001, 2.0)), max_size=80))
def test_nobody_waits_for_ever(history: list[tuple[int, float]]) -> None:
    """One of them runs at a time, the first by rank, while others arrive: each runs within the time that
    all others together spend at the top, plus its patience."""
    turns, now, ran = queues(), 0.0, {}
    for name, seconds in history:
        if name not in ran:
            turns.join(name, seconds, now)
            ran[name] = now
        turns.age(now)
        first = min(ran, key=turns.rank)
        took = min(seconds, 0.05)
        now += took
        turns.ran(first, took, now)
        ran[first] = now
        longest = max(now - at for at in ran.values())
        assert longest <= 0.3 + len(ran) * (0.010 + 0.05) + 0.05 * 2
    assert len(turns) == len(ran)
