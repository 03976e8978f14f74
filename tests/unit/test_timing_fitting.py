"""The fit: it finds what was planted, through noise and stalls, and its bound holds on other steps."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.core.timing.features import StepLoad
from agentserve.core.timing.fitting import (
    LEAST_STEPS,
    STRETCH,
    TERMS,
    Timed,
    bounded,
    coefficients,
    features,
    fit,
    nonnegative,
    quality,
)
from agentserve.core.timing.tally import EVERYTHING, Tally
from agentserve.types import Sampling

GREEDY, DRAWN, MASKED = Sampling(temperature=0.0), Sampling(), Sampling(temperature=0.0, grammar="g")
TRUE = StepCost(
    fixed=0.003, per_decode=1e-4, per_chunk=5e-4, per_read=8e-7, per_seen=1e-7, per_pair=2e-7,
    per_sample=2e-4, per_drawn=5e-4, knots=(0, 8, 32, 128), slopes=(1e-5, 2e-4, 3e-4, 3.3e-4),
)  # fmt: skip


def mixed_loads(count: int, seed: int = 1) -> list[StepLoad]:
    """Decodes that share prefixes or do not, alone or beside chunks."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        tally = Tally(EVERYTHING)
        for _ in range(draw.choice((0, 1, 2, 4, 8, 16, 32))):
            tally.decode(draw.randrange(3000), draw.choice((GREEDY, GREEDY, DRAWN)))
        for _ in range(draw.choice((0, 0, 1, 2)) if tally.decodes else 1):
            tally.chunk(draw.randrange(3000), draw.randrange(2, 400), draw.choice((None, GREEDY)))
        found.append(tally.load(shared=tally.context * draw.choice((0.0, 0.0, 0.3, 0.6))))
    return found


def timed(loads: list[StepLoad], noise: float = 0.0, stalled: float = 0.0, seed: int = 3) -> list[Timed]:
    """As the planted model has it, times noise; a share of steps takes up to ten times as long."""
    draw, found = random.Random(seed), []
    for load in loads:
        seconds = TRUE.predict(load) * (1 + draw.gauss(0, noise))
        if draw.random() < stalled:
            seconds *= draw.uniform(2, 10)
        found.append(Timed(load, seconds))
    return found


def test_what_was_planted_is_found() -> None:
    found = fit(timed(mixed_loads(600)))
    assert found.held_out.mape < 1e-6
    assert found.held_out.exceeded == 0
    for name in ("fixed", "per_pair", "per_read", "per_seen", "per_drawn"):
        assert getattr(found.cost, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert found.unseen == ("per_masked", "per_copy", "per_copied_byte")


def test_stalled_steps_do_not_bend_it() -> None:
    """One in ten steps takes 2 to 10 times as long: least squares would be off by half."""
    found = fit(timed(mixed_loads(1500), noise=0.03, stalled=0.1))
    clean = mixed_loads(300, seed=9)
    assert quality(found.cost, timed(clean)).mape < 0.03


def test_the_bound_holds_on_steps_that_it_never_saw() -> None:
    found = fit(timed(mixed_loads(2000), noise=0.1))
    other = timed(mixed_loads(3000, seed=11), noise=0.1, seed=12)
    judged = quality(found.cost, other)
    assert judged.mape < 0.1
    assert 0 < judged.exceeded < 0.02
    assert judged.width < 1.4


def test_a_looser_bound_is_narrower() -> None:
    steps = timed(mixed_loads(1000), noise=0.1)
    widths = [fit(steps, quantile).held_out.width for quantile in (0.9, 0.95, 0.99)]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_short_steps_stray_by_a_constant() -> None:
    """Jitter that adds up to 2 ms to any step makes a bound with a constant, and not one of a large ratio."""
    draw = random.Random(5)
    loads = mixed_loads(2000)
    steps = [Timed(load, TRUE.predict(load) + draw.uniform(0, 0.002)) for load in loads]
    cost = bounded(TRUE, steps)
    assert cost.extra > 0.001
    assert cost.ratio < 1.05
    assert quality(cost, steps).exceeded <= 0.02


def test_what_is_held_out_is_not_fitted_to() -> None:
    """Steps of the held-out stretches take ten times as long, and the fit does not know."""
    steps = timed(mixed_loads(600))
    broken = [
        Timed(step.load, step.seconds * (10 if number // STRETCH % 5 == 3 else 1))
        for number, step in enumerate(steps)
    ]
    found = fit(broken)
    assert found.inside.mape < 1e-6
    assert found.held_out.mape == pytest.approx(0.9)
    assert found.held_out.exceeded == 1


def test_too_few_steps_are_refused() -> None:
    steps = timed(mixed_loads(LEAST_STEPS))
    bad = [Timed(steps[0].load, value) for value in (0.0, -1.0, float("nan"), float("inf"))]
    assert fit(steps + bad).steps == LEAST_STEPS
    with pytest.raises(ValueError, match=f"{LEAST_STEPS - 1} steps are too few"):
        fit(steps[:-1] + bad)


@pytest.mark.parametrize("shape", ["decodes", "prefill", "one"])
def test_a_log_of_one_kind_of_step_is_fitted(shape: str) -> None:
    draw, steps = random.Random(2), []
    for _ in range(LEAST_STEPS):
        tally = Tally(EVERYTHING)
        if shape == "prefill":
            tally.chunk(0, draw.randrange(2, 500), GREEDY)
        else:
            tally.decode(100 if shape == "one" else draw.randrange(4000), GREEDY)
        steps.append(Timed(tally.load(), TRUE.predict(tally.load())))
    assert fit(steps).held_out.mape < 1e-6


def test_features_are_what_the_model_multiplies() -> None:
    knots = (0, 8, 32, 128)
    for load in mixed_loads(50):
        by_hand = [getattr(TRUE, name) for name, _ in TERMS] + list(TRUE.slopes)
        assert float(np.dot(features(load, knots), by_hand)) == pytest.approx(TRUE.predict(load))


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 5))
def test_nonnegative_least_squares_are_the_least(seed: int, rows: int, columns: int) -> None:
    """Against every choice of columns that may be above 0."""
    draw = np.random.default_rng(seed)
    inputs, wanted = draw.normal(size=(rows + columns, columns)), draw.normal(size=rows + columns)
    found = nonnegative(inputs, wanted)
    assert (found >= 0).all()
    least = float(np.sum(wanted**2))
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            solved = np.linalg.lstsq(inputs[:, chosen], wanted, rcond=None)[0]
            if (solved >= 0).all():
                least = min(least, float(np.sum((inputs[:, chosen] @ solved - wanted) ** 2)))
    assert float(np.sum((inputs @ found - wanted) ** 2)) == pytest.approx(least, rel=1e-6, abs=1e-9)


def test_columns_that_say_the_same_are_no_trouble() -> None:
    draw = np.random.default_rng(1)
    column = draw.uniform(1, 2, size=40)
    inputs = np.stack([column, 2 * column, np.zeros(40), column + 1e-13], axis=1)
    found = nonnegative(inputs, 3 * column)
    assert (found >= 0).all()
    assert inputs @ found == pytest.approx(3 * column, rel=1e-6)
    assert coefficients(timed(mixed_loads(20))).known
