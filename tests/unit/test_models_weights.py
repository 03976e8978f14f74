"""The fused layout: every part is a view of it, and random weights repeat."""

from __future__ import annotations

import pytest
import torch

from agentserve.models.config import DecoderConfig
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import empty_weights, named_parts, random_weights
from tests.parity.harness import ARCHITECTURES, config_json


def config_of(name: str) -> DecoderConfig:
    return hf_config(config_json(name), name)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_parts_cover_the_weights_exactly_once(name: str) -> None:
    config = config_of(name)
    weights = empty_weights(config, torch.float32, torch.device("cpu"))
    parts = dict(named_parts(config, weights))
    assert sum(part.numel() for part in parts.values()) == weights.parameters
    for part in parts.values():
        part.fill_(1.0)
    for layer in weights.layers:
        assert bool((layer.qkv == 1).all())
        assert bool((layer.gate_up == 1).all())


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_bytes_that_a_step_reads(name: str) -> None:
    config = config_of(name)
    weights = empty_weights(config, torch.bfloat16, torch.device("cpu"))
    assert weights.nbytes == 2 * weights.parameters
    looked_up = 0 if config.tie_embeddings else 2 * config.vocab_size * config.hidden_size
    assert weights.step_bytes == weights.nbytes - looked_up
    assert weights.formats == ()
    assert not weights.layers_in_blocks


def test_random_weights_repeat_and_round() -> None:
    config = config_of("qwen3")
    first, again = random_weights(config, 5), random_weights(config, 5)
    half, other = random_weights(config, 5, dtype=torch.bfloat16), random_weights(config, 6)
    assert torch.equal(first.layers[2].qkv, again.layers[2].qkv)
    assert torch.equal(first.layers[2].qkv.bfloat16(), half.layers[2].qkv)
    assert not torch.equal(first.layers[2].qkv, other.layers[2].qkv)
    assert half.dtype == torch.bfloat16
    assert abs(float(first.norm.mean()) - 1) < 0.1
