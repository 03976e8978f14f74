"""One step of the kernel benchmark: what is inside the backend's calls, what outside, and failures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentserve.bench.kernels.attention import layer_calls
from agentserve.bench.kernels.clocked import ClockedStep, KernelClock, clocked
from agentserve.bench.kernels.scene import Part, Scene
from agentserve.bench.kernels.steps import Steps, step
from agentserve.bench.kernels.subject import Subject, Variant, variant
from agentserve.bench.kernels.timing import Effort, Rates, Stopwatch
from agentserve.executor.pool import KVPool
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import random_weights
from kernels import ops_for
from kernels.ops import Hidden, Logits, StepDecoder
from kernels.reference import ReferenceOps
from tests.parity.harness import config_json

CPU = torch.device("cpu")


class Flat:
    """A gauge of a machine that is always the same."""

    def rates(self) -> Rates:
        return Rates(1e9, 1e9, 1e9)


@pytest.fixture(params=["llama", "qwen2-windows"])
def scene(request: pytest.FixtureRequest) -> Scene:
    config = hf_config(config_json(request.param), request.param)
    groups = len(config.layer_groups())
    pool = KVPool(config, [40] * groups, 16, torch.float32)
    for storage in pool.storages:
        storage.zero_()
    return Scene(config, pool)


@pytest.fixture
def running(scene: Scene) -> Variant:
    weights = random_weights(scene.config, 2, std=0.25)
    return variant(Subject("tiny", scene.config, weights, "float", ops_for(CPU)), scene.pool, 512)


def test_a_step_is_what_is_inside_and_outside_the_backend(scene: Scene, running: Variant) -> None:
    total, outside = step(running, scene.plan(scene.decode(2, 40)))
    assert 0 < outside < total
    assert running.clock.seconds == pytest.approx(total - outside)
    before = running.clock.seconds
    total, outside = step(running, scene.plan(scene.decode(2, 40), sample=False))
    assert running.clock.seconds - before == pytest.approx(total - outside), "only its own calls count"


def test_a_plan_that_fails_is_an_error(scene: Scene, running: Variant) -> None:
    far = scene.tables(1, 600)[0]
    with pytest.raises(ValueError, match="tiny: positions 599"):
        step(running, scene.plan([Part(599, 1, far)]))


def test_everything_but_decoders_is_the_backends_own() -> None:
    reference = ReferenceOps(CPU)
    ops = clocked(reference, KernelClock())
    assert ops.name == "reference"
    assert ops.kv_dtypes(torch.float32) == reference.kv_dtypes(torch.float32)


def test_a_backend_without_whole_steps_leaves_the_clock_alone(scene: Scene) -> None:
    weights = random_weights(scene.config, 2, std=0.25)
    composed = variant(Subject("tiny", scene.config, weights, "float", ReferenceOps(CPU)), scene.pool, 512)
    total, outside = step(composed, scene.plan(scene.decode(1, 20)))
    assert composed.clock.seconds == 0.0
    assert outside == total


def test_a_clocked_decoder_gives_what_its_own_gives() -> None:
    class Known:
        def forward(self, tokens: Tensor, positions: Tensor, groups: object) -> Hidden:
            return Hidden(tokens + positions, tokens > 0)

        def logits(self, hidden: Tensor) -> Logits:
            return Logits.of(hidden[None] * 2)

    clock = KernelClock()
    own: StepDecoder = ClockedStep(Known(), clock)
    rows = torch.arange(3)
    hidden = own.forward(rows, rows, ())
    assert (hidden.rows.tolist(), hidden.finite.tolist()) == ([0, 2, 4], [False, True, True])
    once = clock.seconds
    assert once > 0
    logits = own.logits(rows)
    assert (logits.values.tolist(), logits.best.tolist()) == ([[0, 2, 4]], [2])
    assert clock.seconds > once


def test_sharing_is_compared_round_by_round(scene: Scene, running: Variant) -> None:
    watch = Stopwatch(Flat(), Effort(runs=3, most=3, seconds=0.0))
    rows = Steps(scene, [running], watch).sharing(3, 32, 16)
    assert [row.name.rpartition(": ")[2] for row in rows] == [
        "pages of their own",
        "pages shared",
        "gain",
    ] * 2
    for apart, together, gain in (rows[:3], rows[3:]):
        ratios = [slow / fast for slow, fast in zip(apart.runs, together.runs, strict=True)]
        assert gain.runs == pytest.approx(ratios)
        assert gain.value == pytest.approx(sorted(ratios)[1])
        assert apart.limit is not None
        assert together.limit is not None
        assert together.limit <= apart.limit


def test_attention_covers_every_layer_once(scene: Scene, running: Variant) -> None:
    calls = layer_calls(running.decoder, scene, scene.decode(2, 40))
    assert len(calls) == scene.config.layers
    for call in calls:
        assert isinstance(out := call(), Tensor)
        assert out.shape == (2, scene.config.q_size)
