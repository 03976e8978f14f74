"""Admission by memory: the published examples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.reservation import orca_selection, peak_tokens


def test_nobody_passes_who_does_not_fit() -> None:
    assert orca_selection(0, 100, 16, [60, 50, 10]) == 1
    assert orca_selection(0, 100, 16, [50, 10]) == 2, "when the first has ended"


def test_seats_bound_as_memory_does() -> None:
    assert orca_selection(0, 100, 2, [10, 10, 10]) == 2


def test_the_peak_of_the_example() -> None:
    assert peak_tokens([(100, 50), (200, 10), (300, 30)]) == 630
    assert peak_tokens([]) == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=8))
def test_the_peak_is_what_running_them_shows(turns: list[tuple[int, int]]) -> None:
    """Each writes a slot per step and frees all it holds when it has written its last."""
    most = 0
    for step in range(max((left for _, left in turns), default=-1) + 1):
        most = max(most, sum(used + step for used, left in turns if step <= left))
    assert peak_tokens(turns) == most
