"""Tuning by the same budget: candidates drawn alike for every parameter struct."""

from __future__ import annotations

import math

import msgspec

from agentserve.sim.shootout.sweep import FACTORS, best, candidates


class Knobs(msgspec.Struct, frozen=True):
    seconds: float = 2.0
    count: int = 5
    eager: bool = False
    never: float = math.inf
    zero: int = 0
    label: str = "x"


class Switch(msgspec.Struct, frozen=True):
    on: bool = False


def test_the_published_defaults_come_first_and_no_set_comes_twice() -> None:
    found = candidates(Knobs(), 12, seed=3)
    assert found[0] == Knobs()
    assert len(found) == 12 == len({msgspec.json.encode(one) for one in found})
    assert found == candidates(Knobs(), 12, seed=3) != candidates(Knobs(), 12, seed=4)


def test_numbers_move_by_factors_and_all_else_stays() -> None:
    for one in candidates(Knobs(), 40, seed=1):
        assert one.seconds / 2.0 in FACTORS
        assert one.count >= 1
        assert (one.never, one.zero, one.label) == (math.inf, 0, "x")
    assert {one.eager for one in candidates(Knobs(), 40, seed=1)} == {True, False}


def test_a_small_grid_is_not_filled_up_with_repeats() -> None:
    assert candidates(Switch(), 10, seed=1) == [Switch(False), Switch(True)]


def test_what_a_policy_refuses_is_no_candidate() -> None:
    found = candidates(Knobs(), 10, seed=1, accepts=lambda one: one.seconds <= 2.0)
    assert all(one.seconds <= 2.0 for one in found)
    assert len(found) == 10


def test_the_best_is_the_highest_and_of_equals_the_first() -> None:
    found = [Knobs(count=1), Knobs(count=2), Knobs(count=3)]
    assert best(found, lambda one: -abs(one.count - 2)) == (Knobs(count=2), 0)
    assert best(found, lambda one: 1.0) == (Knobs(count=1), 1.0)
