"""FP8, AWQ and GPTQ folders give the bits of the same weights expanded, on both CPU backends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentserve.models.decoder import Decoder
from agentserve.models.load import LoadedModel, load_model
from agentserve.models.source import ModelSource
from kernels.cpu.ops import CpuOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.cpu_builds import CHECKED, builds
from tests.parity.harness import CPU, Engine
from tests.quantized_folders import AWQ, KINDS, awq, folder

TOKENS = random.Random(4).choices(range(40), k=37)

ops = builds(CHECKED)


def logits(loaded: LoadedModel, ops: Ops) -> Tensor:
    """Logits after each of some chunks."""
    found = Engine(loaded.config, loaded.weights, ops=ops).logits(TOKENS, [20, 1])
    return torch.stack([found[at] for at in sorted(found)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8-blocks", "awq", "gptq-act-order"])
def test_codes_give_what_expanded_weights_give(
    ops: CpuOps, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    quantization, matrix, _ = KINDS[name]
    folder(quantization, matrix, head=True).write(tmp_path)
    source = ModelSource("folder", tmp_path, "m")
    backends: tuple[Ops, ...] = (ops, ReferenceOps(CPU))
    for backend in backends:
        expected = logits(load_model(source, dtype, CPU), backend)
        assert bool(expected.isfinite().all())
        assert float(expected.std()) > 1e-3
        stored = load_model(source, dtype, CPU, "stored")
        assert stored.weights.formats
        assert torch.equal(logits(stored, backend), expected)


def test_8_bit_activations_are_refused(tmp_path: Path) -> None:
    folder(AWQ, awq(32)).write(tmp_path)
    loaded = load_model(ModelSource("folder", tmp_path, "m"), torch.float32, CPU, "stored")
    with pytest.raises(ValueError, match="int8 activations are for weights in blocks"):
        Decoder(loaded.config, loaded.weights, ReferenceOps(CPU), activations="int8")
