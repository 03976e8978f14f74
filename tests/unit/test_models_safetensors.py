"""Hugging Face folders: one file or shards, every dtype, and what can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agentserve.models import assemble
from agentserve.models.errors import ModelError
from agentserve.models.hf_config import hf_config
from agentserve.models.load import load_model
from agentserve.models.source import ModelSource
from agentserve.models.weights import named_parts, random_weights
from tests.parity.harness import config_json

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_json("llama-biased")))
    return tmp_path


def tensors() -> dict[str, Tensor]:
    config = hf_config(config_json("llama-biased"), "x")
    return {name: part.clone() for name, part in named_parts(config, random_weights(config, 7))}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = load_model(ModelSource("folder", folder, "m"), dtype, CPU)
    return dict(named_parts(model.config, model.weights))


def failure(folder: Path) -> str:
    with pytest.raises(ModelError) as raised:
        loaded(folder)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(str(folder))
    return text.removeprefix(str(folder)).removeprefix("/")


def shards(folder: Path, found: dict[str, Tensor], count: int = 3) -> None:
    names = sorted(found)
    weight_map = {name: f"model-{place % count}.safetensors" for place, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: found[name] for name in names if weight_map[name] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_and_shards_give_the_same(folder: Path) -> None:
    found = tensors()
    save_file(found, folder / "model.safetensors")
    single = loaded(folder)
    (folder / "model.safetensors").unlink()
    shards(folder, found)
    sharded = loaded(folder)
    assert single.keys() == sharded.keys() == found.keys()
    for name, values in found.items():
        assert torch.equal(single[name], values)
        assert torch.equal(sharded[name], values)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted(folder: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    found = {name: values.to(stored) for name, values in tensors().items()}
    save_file(found, folder / "model.safetensors")
    for name, values in loaded(folder, dtype).items():
        assert torch.equal(values, found[name].to(dtype))


def test_tensors_that_are_not_needed_are_skipped(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps(config_json("llama-biased") | {"tie_word_embeddings": True})
    )
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors() | extra, folder / "model.safetensors")
    model = load_model(ModelSource("folder", folder, "m"), torch.float32, CPU)
    assert model.weights.lm_head is model.weights.embedding


def test_missing_foreign_misshapen_and_quantised(folder: Path) -> None:
    path, found = folder / "model.safetensors", tensors()
    save_file({name: values for name, values in found.items() if "1.mlp.up_proj.weight" not in name}, path)
    assert failure(folder) == ": tensor model.layers.1.mlp.up_proj.weight is missing"
    save_file(found | {"model.layers.3.mlp.up_proj.weight": torch.ones(2)}, path)
    assert failure(folder).endswith("model.layers.3.mlp.up_proj.weight is not part of a llama model")
    save_file(found | {"model.norm.weight": torch.ones(47)}, path)
    assert failure(folder).endswith("tensor model.norm.weight has shape [47], the config asks for [48]")
    save_file(found | {"model.norm.weight": torch.ones(48, dtype=torch.int8)}, path)
    assert failure(folder).endswith("tensor model.norm.weight has dtype I8, which is not supported")


def test_a_tensor_in_two_shards(folder: Path) -> None:
    found = tensors()
    shards(folder, found)
    save_file(dict(sorted(found.items())[:6]), folder / "model-1.safetensors")
    assert "is there twice" in failure(folder)


def test_files_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    assert "neither model.safetensors nor" in failure(folder)
    save_file(tensors(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert failure(folder).startswith("model.safetensors: tensor ")
    assert "truncated?" in failure(folder)
    for length in (0, 7, 8, 50):
        path.write_bytes(whole[:length])
        assert failure(folder).startswith("model.safetensors: ")
    path.write_bytes((5).to_bytes(8, "little") + b"[1,2]")
    assert "not a readable safetensors file" in failure(folder)


def test_indexes_that_lie(folder: Path) -> None:
    shards(folder, tensors())
    (folder / "model-2.safetensors").unlink()
    assert failure(folder).startswith("model-2.safetensors: no such file")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert failure(folder).endswith("shard name '../secret.safetensors' is a path")
    for text in ("{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        assert failure(folder).startswith("model.safetensors.index.json: ")


def header_file(path: Path, header: str) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))


@pytest.mark.parametrize(
    "header",
    [
        "[" * 200_000,
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": 1}',
    ],
    ids=["deep", "string offsets", "infinite shape", "one offset", "flag", "number"],
)
def test_headers_that_lie(folder: Path, header: str) -> None:
    header_file(folder / "model.safetensors", header)
    assert failure(folder).startswith("model.safetensors: not a readable safetensors file")


def test_a_deep_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)
    assert failure(folder).startswith("model.safetensors.index.json: not a readable shard index")


def test_a_config_alone_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are believed once the tensors are seen: nothing is allocated for those that are not there."""
    save_file(tensors(), folder / "model.safetensors")
    shapes: list[object] = []
    empty = torch.empty

    def watched(*shape: object, **options: Any) -> torch.Tensor:
        shapes.append(shape)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", watched)
    assert loaded(folder)
    assert shapes
    shapes.clear()
    huge = {"num_hidden_layers": 1024, "no_rope_layers": None}
    (folder / "config.json").write_text(json.dumps(config_json("llama-biased") | huge))
    assert "is missing (and " in failure(folder)
    assert not shapes


def test_what_nobody_foresaw_is_one_line_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(tensors(), folder / "model.safetensors")

    def no_memory(*_: object) -> None:
        raise RuntimeError("cannot allocate memory:\nyou asked for 8796093022208 bytes")

    monkeypatch.setattr(assemble.Assembler, "allocate", no_memory)
    assert failure(folder).endswith(
        "cannot be read (RuntimeError: cannot allocate memory: you asked for 8796093022208 bytes)"
    )


def test_rotary_settings_without_finite_frequencies(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    values = config_json("llama-biased") | {"rope_theta": 1e-300}
    (folder / "config.json").write_text(json.dumps(values))
    assert "no finite frequencies" in failure(folder)


def test_the_digest_covers_every_shard(folder: Path) -> None:
    found = tensors()
    shards(folder, found)
    source = ModelSource("folder", folder, "m")
    first = load_model(source, torch.float32, CPU).digest
    assert load_model(source, torch.bfloat16, CPU).digest == first
    found["model.norm.weight"][0] += 1
    shards(folder, found)
    assert load_model(source, torch.float32, CPU).digest != first


def test_other_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"float64 is not supported, only bf16, fp16, fp32"):
        load_model(ModelSource("folder", folder, "m"), torch.float64, CPU)
