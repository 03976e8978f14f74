"""Whole models over KV of other dtypes: the CPU backend against its own operations and the reference."""

from __future__ import annotations

import random

import pytest
import torch

from agentserve.core.plan import PageCopy
from agentserve.models.decoder import ComposedDecoder, Decoder
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import random_weights
from kernels.cpu import BuildError, cpu_ops
from kernels.cpu.isa import AVX2, Isa, available
from kernels.cpu.ops import CpuOps
from kernels.memory import empty_pages
from kernels.ops import DecoderParts, Ops, StepDecoder, kv_width
from kernels.reference import ReferenceOps
from tests.kv_pages import poison
from tests.parity.harness import CPU, VOCAB, Engine, config_json

CHECKED = [isa for number, isa in enumerate(available()) if number == 0 or isa == AVX2]
TOKENS = random.Random(5).choices(range(VOCAB), k=150)
REFERENCE = ReferenceOps(CPU)


@pytest.fixture(scope="module", params=CHECKED, ids=lambda isa: isa.name)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    isa: Isa = request.param
    try:
        return cpu_ops([isa])
    except BuildError as error:
        pytest.skip(str(error))


class Composed(CpuOps):
    """The backend without its whole step."""

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        return None


def engine(ops: Ops, name: str, step: torch.dtype, kv: torch.dtype, page_size: int = 16) -> Engine:
    """A tiny random model; its weights are the same numbers in every step dtype (bfloat16 ones)."""
    config = hf_config(config_json(name), name)
    weights = random_weights(config, 3, std=0.25, dtype=step)
    if step == torch.float32:
        rough = random_weights(config, 3, std=0.25, dtype=torch.bfloat16)
        weights.embedding.copy_(rough.embedding)
        weights.lm_head.copy_(rough.lm_head)
        for mine, theirs in zip(weights.layers, rough.layers, strict=True):
            for part in ("qkv", "o", "gate_up", "down"):
                getattr(mine, part).copy_(getattr(theirs, part))
    made = Engine(config, weights, pages=99, page_size=page_size, ops=ops)
    made.pool.storages = tuple(
        empty_pages((*storage.shape[:-1], kv_width(config.head_dim, kv)), kv, CPU)
        for storage in made.pool.storages
    )
    for storage in made.pool.storages:
        poison(storage)
    return made


def errors(found: dict[int, torch.Tensor], truth: dict[int, torch.Tensor]) -> tuple[float, float]:
    """Mean and largest absolute difference of logits, whose own spread is about 10."""
    difference = torch.stack([(found[at] - truth[at]).abs() for at in truth])
    return float(difference.mean()), float(difference.max())


@pytest.mark.parametrize("kv", [torch.int8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 7])
def test_the_whole_step_is_the_sum_of_its_operations(ops: CpuOps, kv: torch.dtype, page_size: int) -> None:
    """In float32 nothing is rounded before KV is written, so that the bits agree."""
    whole = engine(ops, "qwen3", torch.float32, kv, page_size)
    composed = engine(Composed(ops._library), "qwen3", torch.float32, kv, page_size)
    assert isinstance(composed.decoder._step, ComposedDecoder)
    assert not isinstance(whole.decoder._step, ComposedDecoder)
    found, expected = whole.logits(TOKENS, [33, 1, 20]), composed.logits(TOKENS, [33, 1, 20])
    for at, row in found.items():
        assert torch.equal(row, expected[at]), at
