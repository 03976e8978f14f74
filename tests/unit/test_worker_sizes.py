"""What a worker refuses before it reads weights, and that each setting names its KV apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch

from agentserve.config import load
from agentserve.models.load import load_model, open_model
from agentserve.models.source import ModelSource
from agentserve.server.workers.build import _namespace
from agentserve.server.workers.sizes import check_blocks, check_settings, kv_dtype_of
from agentserve.server.workers.spec import WorkerSpec, worker_spec
from kernels.reference import ReferenceOps
from tests.unit.test_models_gguf import model
from tests.unit.test_models_gguf_blocks import uniform, write

CPU = torch.device("cpu")
Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def ops() -> ReferenceOps:
    return ReferenceOps(CPU)


def source_of(tmp_path: Path, kind: Kind) -> ModelSource:
    _, _, stored = model()
    write(tmp_path / "m.gguf", stored, uniform(kind))
    return ModelSource("gguf", tmp_path / "m.gguf", "m")


def spec_of(**flags: Any) -> WorkerSpec:
    return worker_spec(load({"threads": 1, **flags}), 0, "unused", os.getpid(), cores=1)


def test_the_spec_carries_the_numbers_through_json() -> None:
    spec = spec_of(activations="int8", kv_dtype="fp16")
    assert (spec.weights, spec.activations, spec.kv_dtype) == ("stored", "int8", "fp16")
    assert spec_of(weights="expanded").weights == "expanded"
    assert msgspec.json.decode(msgspec.json.encode(spec), type=WorkerSpec) == spec


def test_kv_is_kept_in_the_models_numbers_unless_told_otherwise() -> None:
    assert kv_dtype_of(spec_of()) == torch.bfloat16
    assert kv_dtype_of(spec_of(dtype="fp32")) == torch.float32
    assert kv_dtype_of(spec_of(dtype="fp32", kv_dtype="bf16")) == torch.bfloat16
    assert kv_dtype_of(spec_of(kv_dtype="int8")) == torch.int8


class OnlyOwn(ReferenceOps):
    """Kernels that keep KV in the step's own dtype."""

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        return frozenset({dtype})


def test_kv_that_the_kernels_cannot_keep(tmp_path: Path) -> None:
    source = source_of(tmp_path, Kind.Q4_1)
    config = open_model(source).config
    with pytest.raises(ValueError, match=r"^--kv-dtype int8: ") as caught:
        check_settings(spec_of(kv_dtype="int8"), source, config, OnlyOwn(CPU))
    assert str(caught.value).endswith("reference kernels keep KV of a bf16 model as bf16 only")
    check_settings(spec_of(kv_dtype="bf16"), source, config, OnlyOwn(CPU))
    check_settings(spec_of(), source, config, OnlyOwn(CPU))


def test_8_bit_activations_need_blocks(tmp_path: Path, ops: ReferenceOps) -> None:
    spec = spec_of(activations="int8")
    source = source_of(tmp_path, Kind.F16)
    loaded = load_model(source, torch.bfloat16, CPU, "stored")
    assert loaded.weights.formats == ()
    message = f"^--activations int8: {source.path} has no layer whose weights are in blocks$"
    with pytest.raises(ValueError, match=message):
        check_blocks(spec, source, loaded.weights)
    folder = ModelSource("folder", source.path, "m")
    with pytest.raises(ValueError, match=message):  # before minutes of reading
        check_settings(spec, folder, loaded.config, ops)
    blocks = load_model(source_of(tmp_path, Kind.Q8_0), torch.bfloat16, CPU, "stored")
    check_blocks(spec, source, blocks.weights)
    check_blocks(spec_of(), source, loaded.weights)


def test_each_setting_names_its_kv_apart(tmp_path: Path, ops: ReferenceOps) -> None:
    source = source_of(tmp_path, Kind.Q4_1)
    stored = load_model(source, torch.bfloat16, CPU, "stored")
    expanded = load_model(source, torch.bfloat16, CPU, "expanded")
    assert stored.digest == expanded.digest
    names = [
        _namespace(spec_of(), stored, ops),
        _namespace(spec_of(weights="expanded"), expanded, ops),
        _namespace(spec_of(activations="int8"), stored, ops),
        _namespace(spec_of(kv_dtype="int8"), stored, ops),
        _namespace(spec_of(kv_dtype="fp16"), stored, ops),
        _namespace(spec_of(dtype="fp32", kv_dtype="bf16"), stored, ops),
        _namespace(spec_of(page_size=32), stored, ops),
    ]
    assert len(set(names)) == len(names)
    assert _namespace(spec_of(kv_dtype="bf16"), stored, ops) == names[0], "auto is the model's own"


def test_a_model_without_blocks_is_the_same_however_it_is_kept(tmp_path: Path, ops: ReferenceOps) -> None:
    source = source_of(tmp_path, Kind.F16)
    one, other = (load_model(source, torch.bfloat16, CPU, kept) for kept in ("stored", "expanded"))
    assert _namespace(spec_of(), one, ops) == _namespace(spec_of(weights="expanded"), other, ops)
