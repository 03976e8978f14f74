"""Configs from `config.json` in its old and new forms, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentserve.models.config import RopeConfig, RopeKind
from agentserve.models.errors import ModelError
from agentserve.models.hf_config import hf_config, read_hf_config
from tests.parity.harness import ARCHITECTURES, config_json


def changed(name: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config with keys changed; `...` leaves a key out."""
    values = config_json(name) | changes
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_file_written_by_transformers_reads_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(changed(name, pad_token_id=0)))
    first = read_hf_config(tmp_path / "config.json")
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_hf_config(tmp_path / "config.json") == first


def test_what_each_family_fixes() -> None:
    found = {name: hf_config(config_json(name), name) for name in ARCHITECTURES}
    assert [name for name, config in found.items() if config.qk_norm] == ["qwen3", "qwen3-yarn"]
    assert [name for name, config in found.items() if config.qkv_bias] == [
        "llama-biased",
        "qwen2",
        "qwen2-windows",
    ]
    assert [name for name, config in found.items() if config.o_bias or config.mlp_bias] == ["llama-biased"]
    assert found["smollm3"].rotary == (True, False, True, False, True)
    assert found["mistral-window"].windows == (24, 24, 24)
    assert found["qwen2-windows"].windows == (None, 20, 20)
    assert found["llama"].eos_token_ids == (2,)


def test_layer_groups_put_full_attention_first() -> None:
    groups = hf_config(config_json("qwen2-windows"), "x").layer_groups()
    assert [(group.name, group.layers, group.window) for group in groups] == [
        ("full", (0,), None),
        ("window-20", (1, 2), 20),
    ]


def test_defaults_where_keys_are_absent() -> None:
    config = hf_config(
        changed(num_key_value_heads=..., head_dim=..., rope_theta=..., tie_word_embeddings=...), "x"
    )
    assert (config.kv_heads, config.head_dim, config.rope, config.tie_embeddings) == (
        6,
        8,
        RopeConfig(10000.0),
        False,
    )
    assert (
        hf_config(changed("smollm3", rope_theta=..., tie_word_embeddings=...), "x").rope.theta == 2_000_000.0
    )
    assert hf_config(changed("mistral", sliding_window=...), "x").windows == (4096,) * 3
    assert hf_config(changed(eos_token_id=[5, 7, 5]), "x").eos_token_ids == (5, 7)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {"factor": 2.0, "original_max_position_embeddings": 64}
    old = hf_config(changed(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling}), "x").rope
    new = {"rope_type": "yarn", "rope_theta": 5e5, **scaling}
    assert hf_config(changed(rope_theta=..., rope_parameters=new), "x").rope == old
    assert (old.kind, old.theta, old.original_max_position) == (RopeKind.YARN, 5e5, 64)
    assert old.attention_factor == pytest.approx(1.0693147)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        ({"architectures": ...}, "architectures must be a list of one name"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 4}, "6 heads are no multiple of 4 KV heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": -1.0}, "rope_theta must be above 0"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope_scaling: rope_type 'longrope' is not supported",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 96}, "an EOS id lies outside the vocabulary of 96"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers must be at most 1024"),
        ({"max_position_embeddings": 20_000_000}, "max_position_embeddings must be at most 16777216"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 4194304"),
        ({"hidden_size": 2**31}, "hidden_size must be at most 1048576"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number, is 1000"),
        ({"hidden_size": "4" * 10_000}, "4444..."),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rotary theta above 1"),
    ],
)
def test_refusals_name_the_place_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as raised:
        hf_config(changed(**changes), "m/config.json")
    assert message in str(raised.value)
    assert str(raised.value).startswith("m/config.json: ")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_layer_lists_are_checked() -> None:
    with pytest.raises(ModelError, match="layer_types must be a list of at least 3"):
        hf_config(changed("qwen3", layer_types=["full_attention"]), "x")
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match="'chunked_attention' is not supported"):
        hf_config(changed("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=4), "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a readable JSON file"),
        ("[]", "must be a JSON object"),
        ("[" * 200_000, "not a readable JSON"),
    ],
    ids=["cut", "list", "deep"],
)
def test_unreadable_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match="no such file"):
        read_hf_config(path)
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        read_hf_config(path)
