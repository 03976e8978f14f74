"""The measured cost model: what it is fitted from, and that the fit finds it again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agentserve.core.cost import StepCost
from agentserve.core.plan import ChunkResult, Plan, Sampled, StepResult
from agentserve.executor.calibrate import CAUTION, INCAUTION, Bounds, Timed, fit, measure_cost, plan_shapes
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import random_weights
from tests.parity.harness import VOCAB, Engine, config_json

COST = StepCost(fixed=0.004, per_row=0.0007, per_token=0.0003, per_context=2e-8)
BOUNDS = Bounds(groups=2, pages=100, page_size=16, positions=8192, rows=64, tokens=2048, vocab_size=1000)
FIELDS = ("fixed", "per_row", "per_token", "per_context")


class Clockwork:
    """Runs plans in the time that `cost` says, the first of each shape in ten times that."""

    def __init__(self, cost: StepCost, bounds: Bounds, noise: float = 0.0, error: str = "") -> None:
        self.cost, self.bounds, self.error = cost, bounds, error
        self.written = -1
        self.seen: set[tuple[tuple[int, int], ...]] = set()
        self.rng = random.Random(1)
        self.noise = noise

    def run(self, plan: Plan) -> StepResult:
        shape = tuple((chunk.start, len(chunk.tokens)) for chunk in plan.chunks)
        self._check(plan)
        seconds = self.cost.step(shape) * (1 + self.noise * self.rng.uniform(-1, 1))
        if shape not in self.seen:
            self.seen.add(shape)
            seconds *= 10
        results = tuple(
            ChunkResult(chunk.session, chunk.turn, 0, len(chunk.tokens), Sampled(1), self.error)
            for chunk in plan.chunks
        )
        return StepResult(plan.step, results, seconds)

    def _check(self, plan: Plan) -> None:
        bounds = self.bounds
        assert 1 <= len(plan.chunks) <= bounds.rows
        assert plan.tokens <= bounds.tokens
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.tokens)
            assert end <= bounds.positions
            assert all(0 <= token < bounds.vocab_size for token in chunk.tokens)
            assert len(chunk.tables) == bounds.groups
            for table in chunk.tables:
                assert len(table) * bounds.page_size >= end
                if self.written < 0:
                    assert chunk.start == 0, "reads what nobody wrote"
                    self.written = end // bounds.page_size - 1 if end >= bounds.page_size else 0
                assert 0 <= max(table) <= min(self.written, bounds.pages - 1)
                own = list(table)[chunk.start // bounds.page_size :]
                assert len(own) == len(set(own)), "a chunk writes a page twice"

    def define_grammar(self, grammar_id: str, compiled: str) -> None: ...

    def drop_grammar(self, grammar_id: str) -> None: ...


def test_a_machine_that_keeps_to_the_model_is_measured_exactly() -> None:
    found = measure_cost(Clockwork(COST, BOUNDS), BOUNDS)
    for name in FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-6), name


@pytest.mark.parametrize("zero", FIELDS)
def test_what_costs_nothing_is_never_negative(zero: str) -> None:
    cost = StepCost(**{name: 0.0 if name == zero else getattr(COST, name) for name in FIELDS})
    found = measure_cost(Clockwork(cost, BOUNDS, noise=0.1), BOUNDS)
    for shape in plan_shapes(BOUNDS):
        assert found.step(shape) == pytest.approx(cost.step(shape), rel=0.3)


@pytest.mark.parametrize(
    "narrow",
    [
        {"pages": 2},
        {"pages": 1, "page_size": 1},
        {"positions": 2},
        {"positions": 17, "pages": 2},
        {"rows": 1},
        {"tokens": 16},
        {"tokens": 1, "page_size": 1},
        {"tokens": 100, "pages": 24, "positions": 4096},
        {"page_size": 128, "pages": 3},
        {"vocab_size": 3},
    ],
)
def test_plans_keep_to_narrow_bounds(narrow: dict[str, int]) -> None:
    bounds = replace(BOUNDS, **narrow)
    cost = measure_cost(Clockwork(COST, bounds), bounds)
    assert cost.step([(0, 1)]) > 0


def test_a_plan_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="cannot be measured: broken"):
        measure_cost(Clockwork(COST, BOUNDS, error="broken"), BOUNDS)


def test_one_time_alone_is_fitted() -> None:
    assert fit([Timed(((0, 8),), 0.5)]).step([(0, 8)]) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["llama", "qwen2-windows"])
def test_the_real_executor_runs_the_plans(name: str) -> None:
    config = hf_config(config_json(name), name)
    engine = Engine(config, random_weights(config, 2, std=0.25), pages=24)
    bounds = Bounds(
        groups=len(config.layer_groups()),
        pages=24,
        page_size=engine.pool.page_size,
        positions=engine.decoder.positions,
        rows=4,
        tokens=100,
        vocab_size=VOCAB,
    )
    assert measure_cost(engine.executor, bounds).step([(0, 1)]) > 0


def test_the_bound_is_cautious_and_not_led_by_a_stall() -> None:
    assert measure_cost(Clockwork(COST, BOUNDS), BOUNDS).ratio == CAUTION
    assert CAUTION < measure_cost(Clockwork(COST, BOUNDS, noise=0.3), BOUNDS).ratio <= INCAUTION
