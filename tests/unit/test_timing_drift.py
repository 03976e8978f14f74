"""Refreshing the model: by little, within bounds, and the same from the same steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.core.timing.drift import Drift, DriftSettings
from agentserve.core.timing.features import StepLoad

FITTED = StepCost(
    fixed=0.003, per_decode=1e-4, per_seen=1e-7, knots=(0, 64), slopes=(1e-4, 3e-4), ratio=1.1, extra=5e-4
)
SETTINGS = DriftSettings()
STEPS = st.lists(st.tuples(st.integers(0, 64), st.floats(0.0, 1e4)), max_size=60)


def load(decodes: int) -> StepLoad:
    return StepLoad(decodes=decodes, context=100 * decodes, read=100 * decodes, samples=decodes)


def after(
    drift: Drift, slower: float, steps: int, noise: float = 0.0, seed: int = 1
) -> tuple[int, list[float]]:
    """Steps on a machine that is `slower`: how many exceeded the bound, and predicted / true time of each."""
    draw, exceeded, ratios = random.Random(seed), 0, []
    for _ in range(steps):
        step = load(draw.randint(1, 64))
        true = FITTED.predict(step) * slower
        seconds = true * (1 + draw.uniform(-noise, noise)) * (1.5 if draw.random() < noise / 5 else 1)
        ratios.append(drift.cost.predict(step) / true)
        exceeded += seconds > drift.cost.bound(step)
        drift.ran(step, seconds)
    return exceeded, ratios


def test_a_machine_as_it_was_changes_nothing() -> None:
    drift = Drift(FITTED)
    after(drift, 1.0, 200)
    assert drift.cost == FITTED


@pytest.mark.parametrize("slower", [0.4, 0.9, 1.3, 3.0])
def test_a_machine_that_is_slower_is_followed(slower: float) -> None:
    drift = Drift(FITTED)
    _, ratios = after(drift, slower, 400)
    assert ratios[-1] == pytest.approx(1.0, rel=0.02)
    assert all(abs(b / a - 1) <= SETTINGS.most * 1.0001 for a, b in pairwise(ratios))


def test_one_stalled_step_moves_it_by_a_little() -> None:
    drift = Drift(FITTED)
    drift.ran(load(8), 100.0)
    assert drift.cost.pace == pytest.approx(1 + SETTINGS.most)
    assert drift.cost.ratio == pytest.approx(FITTED.ratio * (1 + SETTINGS.gain), rel=0.01)


def test_the_bound_is_exceeded_as_often_as_it_may_be() -> None:
    """Noise that the fit knew nothing of, with a tail: first often, then about once in a hundred steps."""
    drift = Drift(FITTED)
    after(drift, 1.0, 2000, noise=0.5)
    exceeded, _ = after(drift, 1.0, 5000, noise=0.5, seed=2)
    assert 0.004 < exceeded / 5000 < 0.02
    after(drift, 1.0, 5000)
    assert drift.cost.ratio == pytest.approx(FITTED.ratio), "quiet again"


def test_a_model_without_a_bound_gets_none() -> None:
    bare = StepCost(fixed=0.01)
    drift = Drift(bare)
    drift.ran(load(1), 0.05)
    assert drift.cost.pace > 1
    assert drift.cost.ratio == 1


def test_what_knows_nothing_learns_nothing() -> None:
    drift = Drift(StepCost())
    drift.ran(load(1), 0.05)
    assert drift.cost == StepCost()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be_a_measurement_changes_nothing(seconds: float) -> None:
    drift = Drift(FITTED)
    drift.ran(load(3), seconds)
    assert drift.cost == FITTED


@given(STEPS)
def test_it_is_a_fold_within_bounds(steps: list[tuple[int, float]]) -> None:
    one, other = Drift(FITTED), Drift(FITTED)
    for decodes, seconds in steps:
        one.ran(load(decodes), seconds)
    for decodes, seconds in steps:
        other.ran(load(decodes), seconds)
    assert one.cost == other.cost
    assert 1 / SETTINGS.furthest <= one.cost.pace <= SETTINGS.furthest
    assert FITTED.ratio <= one.cost.ratio <= FITTED.ratio * SETTINGS.widest
    for name in ("fixed", "per_decode", "per_seen", "knots", "slopes", "extra"):
        assert getattr(one.cost, name) == getattr(FITTED, name)


@given(STEPS, STEPS)
def test_a_fold_goes_on_where_it_stands(
    first: list[tuple[int, float]], then: list[tuple[int, float]]
) -> None:
    whole, parts = Drift(FITTED), Drift(FITTED)
    for decodes, seconds in first + then:
        whole.ran(load(decodes), seconds)
    for part in (first, then):
        for decodes, seconds in part:
            parts.ran(load(decodes), seconds)
    assert whole.cost == parts.cost
