"""Rotary tables equal those that transformers computes from the same config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentserve.models.config import RopeConfig, RopeKind
from agentserve.models.hf_config import hf_config
from agentserve.models.rope import inverse_frequencies, rope_table
from tests.parity.harness import config_json

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 10000.0},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "yarn mscale": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24,
            "beta_slow": 2,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        }
    },
    "yarn attention factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.25,
        }
    },
}


@pytest.mark.parametrize("name", list(CASES))
def test_tables_equal_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = config_json("llama") | {"head_dim": 64}
    values.pop("rope_theta", None)
    values |= CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    rope = hf_config(values, "test").rope
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    assert torch.equal(inverse_frequencies(rope, 64), theirs.inv_freq)
    positions = torch.arange(20_000)
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = rope_table(rope, 64, 20_000)
    # Their cosine is float32's, ours is rounded from float64's; the attention factor scales both.
    assert torch.allclose(ours[0], cos[0, :, :32], rtol=0, atol=3e-7)
    assert torch.allclose(ours[1], sin[0, :, :32], rtol=0, atol=3e-7)


def test_factors_divide_frequencies() -> None:
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    plain = inverse_frequencies(RopeConfig(10000.0), 8)
    assert torch.equal(inverse_frequencies(RopeConfig(10000.0), 8, factors), plain / factors)


def test_a_position_has_one_row_whatever_the_table_length() -> None:
    config = RopeConfig(10000.0, RopeKind.LINEAR, factor=3.0)
    long, short = rope_table(config, 16, 17_000), rope_table(config, 16, 777)
    assert torch.equal(long[0][:777], short[0])
    assert torch.equal(long[1][:777], short[1])
