"""Whom the price chooses, and which way: sums done by hand."""

from __future__ import annotations

import math

import pytest

from agentserve.core.lengths import FIRST, REMEMBERED, TENANTS, Lengths
from agentserve.core.victims import (
    MOST_CHOSEN,
    Candidate,
    Offer,
    Shortage,
    Way,
    cheapest,
    choose,
    loss,
    shortage,
)
from agentserve.types import SessionId


def candidate(
    name: str = "a", *, freed: int = 8, lacking: int = 8, before: int = 0, seconds: float = 2.0
) -> Candidate:
    return Candidate(SessionId(name), freed, lacking, before, (Offer(Way.RECOMPUTE, seconds),))


@pytest.mark.parametrize(
    ("turns", "first", "steps", "pages"),
    [
        (0, 1.0, 1.0, 1),
        (1, 10.0, 10.0, 1),  # 10 tokens fit into a page of 16
        (3, 40.0, 40.0, 8),  # three that write 40 each: 120 tokens, 7.5 pages
        (2, 0.2, 1.0, 1),
    ],
)
def test_pages_lack_until_the_first_of_those_who_stay_ends(
    turns: int, first: float, steps: float, pages: int
) -> None:
    assert shortage(turns, first, 16) == Shortage(steps, pages)


def test_the_cost_is_seconds_for_what_lacks() -> None:
    assert loss(candidate()) == 2.0
    assert loss(candidate(freed=100)) == 2.0  # more pages than lack gain nothing
    assert loss(candidate(freed=4)) == 4.0  # half of them: as much is lost again for the rest
    assert loss(candidate(lacking=32)) == 8.0
    assert loss(candidate(before=2)) == 8.0  # each time that it was preempted before it counts double
    assert loss(candidate(freed=0)) == math.inf


def test_the_cheapest_way_counts_and_of_equals_the_first() -> None:
    offers = (Offer(Way.RECOMPUTE, 3.0), Offer(Way.SWAP, 1.0), Offer(Way.MIGRATE, 1.0))
    assert cheapest(offers).way is Way.SWAP
    assert loss(Candidate(SessionId("a"), 8, 8, 0, offers)) == 1.0


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([candidate("a"), candidate("b")], "b"),  # of equals who stands last
        ([candidate("a", seconds=1.0), candidate("b")], "a"),  # cheaper to have again
        ([candidate("a", seconds=1.0, lacking=32), candidate("b")], "b"),  # it is nearly done
        ([candidate("a", seconds=1.0, freed=1), candidate("b")], "b"),  # others share its pages
        ([candidate("a", seconds=1.0, before=1), candidate("b")], "b"),  # it was taken before
        ([candidate("a", seconds=0.9, before=1), candidate("b")], "a"),
        ([candidate("a"), candidate("b", freed=0)], "a"),  # nothing would become free
        ([candidate("a", freed=0), candidate("b", freed=0)], "b"),
        ([candidate("a", seconds=9.0), candidate("b", before=MOST_CHOSEN)], "a"),  # protected
        ([candidate("a", before=MOST_CHOSEN, seconds=0.1), candidate("b", before=MOST_CHOSEN)], "b"),
    ],
)
def test_whom_the_price_chooses(candidates: list[Candidate], chosen: str) -> None:
    assert choose(candidates).session == chosen


# --- how long a turn will go on -------------------------------------------------------------


def test_lengths_are_what_turns_as_long_wrote_further() -> None:
    lengths = Lengths()
    assert lengths.left("t", 0, 500) == FIRST
    assert lengths.left("t", 100, 500) == 100.0  # as much again as so far
    assert lengths.left("t", 100, 30) == 30.0
    for written in (50, 100, 150, 200, 250):
        lengths.ended("t", written)
    assert lengths.left("t", 0, 500) == 150.0
    assert lengths.left("t", 60, 500) == 115.0  # of 100, 150, 200, 250
    assert lengths.left("t", 120, 500) == 120.0  # three say too little
    assert lengths.left("t", 60, 0) == 1.0
    assert lengths.left("another", 60, 500) == 60.0


def test_lengths_of_long_ago_and_of_too_many_tenants_are_forgotten() -> None:
    lengths = Lengths()
    for _ in range(REMEMBERED):
        lengths.ended("t", 10)
    for _ in range(REMEMBERED):
        lengths.ended("t", 90)
    assert lengths.left("t", 0, 500) == 90.0
    for number in range(TENANTS):
        lengths.ended(f"t{number}", 5)
    assert lengths.left("t", 0, 500) == FIRST
