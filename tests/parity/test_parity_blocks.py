"""Weights in blocks give the bits of the same weights expanded, where the backend multiplies alike."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
import torch

from agentserve.models.decoder import Decoder
from agentserve.models.load import LoadedModel, load_model
from agentserve.models.source import ModelSource, resolve
from kernels.blocks import FORMATS
from kernels.reference import ReferenceOps
from tests.parity.harness import CPU, Engine
from tests.unit.test_models_gguf import model
from tests.unit.test_models_gguf_blocks import uniform, write

TOKENS = random.Random(4).choices(range(40), k=37)


def logits(loaded: LoadedModel, tokens: list[int], ops: ReferenceOps) -> torch.Tensor:
    """Logits after each of some chunks, on the reference backend."""
    engine = Engine(loaded.config, loaded.weights, ops=ops)
    assert engine.decoder.parameters == loaded.weights.parameters
    found = engine.logits(tokens, [20, 1])
    assert all(bool(row.isfinite().all()) for row in found.values())
    return torch.stack([found[at] for at in sorted(found)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_equal_expanded_weights(name: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    _, _, stored = model(tied)
    write(tmp_path / "m.gguf", stored, uniform(gguf.GGMLQuantizationType[name]))
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    ops = ReferenceOps(CPU)
    expected = logits(load_model(source, dtype, CPU), TOKENS, ops)
    assert torch.equal(logits(load_model(source, dtype, CPU, "stored"), TOKENS, ops), expected)
    assert float(expected.std()) > 1e-3


def test_8_bit_activations_differ_and_need_blocks(tmp_path: Path) -> None:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(gguf.GGMLQuantizationType.Q4_1))
    source = ModelSource("gguf", tmp_path / "m.gguf", "m")
    loaded = load_model(source, torch.float32, CPU, "stored")
    ops = ReferenceOps(CPU)
    engine = Engine(loaded.config, loaded.weights, ops=ops)
    exact = engine.logits(TOKENS, [len(TOKENS)])[len(TOKENS) - 1]
    engine = Engine(loaded.config, loaded.weights, ops=ops, activations="int8")
    rounded = engine.logits(TOKENS, [len(TOKENS)])[len(TOKENS) - 1]
    error = float((rounded - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.05
    again = Engine(loaded.config, loaded.weights, ops=ops, activations="int8")
    assert torch.equal(again.logits(TOKENS, [7, 3])[len(TOKENS) - 1], rounded), "rows keep their bits"
    expanded = load_model(source, torch.float32, CPU).weights
    with pytest.raises(ValueError, match="for weights in blocks; this model has none"):
        Decoder(loaded.config, expanded, ops, activations="int8")


@pytest.mark.model
def test_smollm2_stored_and_expanded() -> None:
    """Layers in Q4_1, embedding and head in Q8_0: the same float32 values, so the same bits."""
    source, ops = resolve("smollm2-135m"), ReferenceOps(CPU)
    loaded = load_model(source, torch.float32, CPU, "stored")
    weights = loaded.weights
    assert weights.formats == ("Q4_1", "Q8_0")
    assert weights.parameters == 134_515_008
    assert weights.step_bytes == weights.nbytes < 97e6
    tokens = random.Random(5).choices(range(weights.embedding.shape[0]), k=22)
    expected = logits(load_model(source, torch.float32, CPU), tokens, ops)
    assert torch.equal(logits(loaded, tokens, ops), expected)
