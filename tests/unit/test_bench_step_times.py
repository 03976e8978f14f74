"""The benchmark of predictions: of a machine that keeps to a model it finds that model, by its recording."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from agentserve.bench.steps.episodes import drive
from agentserve.bench.steps.run import SEEDS, Findings, measure
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.core.timing.saved import decode_saved, encode_saved
from agentserve.core.timing.tally import Attention, load_of
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.sim.executor import SimExecutor
from agentserve.types import KVGroup
from tests.hello import made_up_hello
from tests.unit.test_timing_saved import HERE

PAGES, PAGE = 400, 4
GROUPS = (KVGroup("full", (0,), 1024),)
ATTENTION = Attention(GROUPS, PAGE)
TRUE = StepCost(
    fixed=0.004, per_decode=1e-4, per_read=8e-7, per_pair=2e-7, per_sample=2e-4, per_drawn=5e-4,
    knots=(0, 8, 32), slopes=(1e-5, 2e-4, 3e-4),
)  # fmt: skip


class Noisy(SimExecutor):
    """Takes what the planted model says, sharing counted, a little more or less."""

    def __init__(self, noise: float) -> None:
        super().__init__((PAGES,), PAGE, TRUE, 300)
        self.noise = noise
        self.draw = random.Random(4)
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        seconds = TRUE.predict(load_of(plan.chunks, plan.copies, ATTENTION))
        return msgspec.structs.replace(
            super().run(plan), seconds=seconds * (1 + self.draw.uniform(-self.noise, self.noise))
        )


def built_of(executor: Noisy) -> BuiltEngine:
    config = CoreConfig(page_size=PAGE, max_batched_tokens=64, max_model_len=300, max_num_seqs=16)
    core = EngineCore(config, GROUPS, (PAGES,))
    said = made_up_hello(max_model_len=300, page_size=PAGE, pages=PAGES, vocab_size=300)
    return BuiltEngine(
        core, executor, said, config, GROUPS, (PAGES,), StepCost(), fingerprint=HERE, attention=ATTENTION
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    folder = tmp_path_factory.mktemp("steps")
    return measure(built_of(Noisy(0.05)), 800, folder, 0, lambda stage: None)


def test_the_planted_model_is_found_and_the_bound_holds(found: Findings) -> None:
    values = {row.name: row.value for row in found.rows}
    assert values["held-out load, as fitted: MAPE"] < 5
    assert values["held-out load, refreshed: MAPE"] < 6
    assert values["held-out load, as fitted: P99 bound exceeded"] <= 2
    assert {row.asked for row in found.rows} == {"", "at most 10 %", "at most 2 %"}
    assert found.saved.fingerprint == HERE
    assert decode_saved(encode_saved(found.saved)) == found.saved


def test_the_load_is_mixed_and_another_by_its_seed() -> None:
    shapes = []
    for seed in (SEEDS[0], SEEDS[1], SEEDS[0]):
        executor = Noisy(0.0)
        drive(built_of(executor), 250, seed, lambda *_: None)
        loads = [load_of(plan.chunks, plan.copies, ATTENTION) for plan in executor.plans]
        assert len(loads) == 250
        assert any(load.chunks and load.decodes for load in loads)
        assert any(load.decodes > 1 and not load.chunks for load in loads)
        assert any(load.read < load.context for load in loads)
        assert any(load.drawn for load in loads)
        shapes.append(loads)
    assert shapes[0] == shapes[2] != shapes[1]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="fitted") as caught:
        measure(built_of(Noisy(0.0)), 200, tmp_path / "file", 0, lambda stage: None)
    assert "\n" not in str(caught.value)
