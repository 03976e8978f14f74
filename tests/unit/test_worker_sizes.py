"""What a worker refuses before it reads weights, and that each setting names its KV apart."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch

from agentserve.config import load
from agentserve.models.load import load_model, open_model
from agentserve.models.quantization import Quantization
from agentserve.models.source import ModelSource
from agentserve.server.launch import LaunchError, check_memory
from agentserve.server.workers import sizes
from agentserve.server.workers.build import _namespace
from agentserve.server.workers.sizes import (
    TierSizes,
    check_blocks,
    check_data_dir,
    check_settings,
    kv_dtype_of,
    page_counts,
    storage_of,
    tier_sizes,
)
from agentserve.server.workers.spec import WorkerSpec, replacement, worker_spec
from agentserve.types import KVGroup
from kernels.reference import ReferenceOps
from tests.quantized_folders import AWQ, awq, folder
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


GROUPS = (KVGroup("full", (0,), 3000), KVGroup("window", (1,), 1096, window=8))  # a block: 4 KiB


def test_without_tiers_nothing_is_sized() -> None:
    assert tier_sizes(spec_of(), GROUPS, 0) is None
    assert tier_sizes(spec_of(data_dir="d"), GROUPS, 0) is None


def test_bytes_become_slots_and_a_share_of_the_disk() -> None:
    flags = {"host_kv": "10KiB", "disk_kv": "9MiB", "data_dir": "d", "workers": 3}
    spec = spec_of(**flags)
    assert tier_sizes(spec, GROUPS, 10 << 10) == TierSizes(4096, 2, 3 << 20)
    assert spec.data_dir == str(Path("d").absolute())
    assert tier_sizes(spec, GROUPS, None) == TierSizes(4096, 2, 3 << 20), "a system that does not say"
    only_host = spec_of(host_kv="4KiB")
    assert tier_sizes(only_host, GROUPS, None) == TierSizes(4096, 1, 0)
    only_disk = spec_of(disk_kv="9MiB", data_dir="d")
    assert tier_sizes(only_disk, GROUPS, None) == TierSizes(4096, 8192, 9 << 20, staging=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"host_kv": "4095"},
            "--host-kv 4.0 KiB per worker holds no block of 4.0 KiB: give it more",
        ),
        (
            {"host_kv": "1MiB", "disk_kv": "2MiB", "data_dir": "d", "workers": 2},
            "--disk-kv 1.0 MiB per worker holds no block of 4.0 KiB: give it more",
        ),
        (
            {"host_kv": "3MiB", "workers": 3},
            "--host-kv 3.0 MiB: only 2.0 MiB are free",
        ),
    ],
)
def test_tiers_that_cannot_be(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        tier_sizes(spec_of(**flags), GROUPS, 2 << 20)
    assert str(caught.value) == message


def test_a_worker_that_starts_anew_counts_its_own_share_only() -> None:
    """The others have theirs already: what is free is what they left."""
    sizes_found = tier_sizes(spec_of(host_kv="1MiB", workers=3), GROUPS, 1 << 20)
    assert sizes_found is not None
    assert sizes_found.host_slots == 256


def test_all_workers_are_counted_before_the_first_one_starts() -> None:
    config = load({"host_kv": "1MiB", "workers": 3})
    check_memory(config, 3 << 20)
    check_memory(config, None)
    check_memory(load({}), 0)
    message = r"^--host-kv 1\.0 MiB: 3 worker\(s\) would take 3\.0 MiB of the 2\.0 MiB that are free$"
    with pytest.raises(LaunchError, match=message):
        check_memory(config, 2 << 20)


def test_a_data_dir_is_made_or_refused_in_one_line(tmp_path: Path) -> None:
    check_data_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^--data-dir .*file/below: Not a directory$"):
        check_data_dir(tmp_path / "file" / "below")
    with pytest.raises(ValueError, match=r"^--data-dir .*file: File exists$"):
        check_data_dir(tmp_path / "file")


def test_tiers_are_refused_before_weights_are_read(tmp_path: Path, ops: ReferenceOps) -> None:
    source = source_of(tmp_path, Kind.Q4_1)
    config = open_model(source).config
    with pytest.raises(ValueError, match=r"^--host-kv 5 B per worker holds no block of "):
        check_settings(spec_of(host_kv="5"), source, config, ops)
    with pytest.raises(ValueError, match=r"^--host-kv 8388608 TiB: only "):
        check_settings(spec_of(host_kv=str(2**63 - 1)), source, config, ops)
    with pytest.raises(ValueError, match=r"^--device-kv 8388608 TiB: only .* are free$"):
        check_settings(spec_of(device_kv=str(2**63 - 1)), source, config, ops)
    flags = {"host_kv": "1MiB", "disk_kv": "4MiB", "data_dir": str(source.path)}
    with pytest.raises(ValueError, match="File exists"):
        check_settings(spec_of(**flags), source, config, ops)
    check_settings(spec_of(**{**flags, "data_dir": str(tmp_path / "new")}), source, config, ops)


def test_the_pool_leaves_room_for_the_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_memory", lambda: 10_000 << 10)
    group = (KVGroup("full", (0,), 1024),)
    assert page_counts(spec_of(workers=2), group, CPU) == (2000,)
    assert page_counts(spec_of(workers=2, host_kv="1000KiB"), group, CPU) == (1600,)


def test_the_pool_of_a_gpu_leaves_room_for_the_copy_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000 << 10, 1 << 40))
    group, device = (KVGroup("full", (0,), 1024),), torch.device("cuda")
    assert page_counts(spec_of(), group, device) == (8000,)
    assert page_counts(spec_of(), group, device, 4_000 << 10) == (4800,)


def test_weights_in_blocks_are_counted(tmp_path: Path) -> None:
    source = source_of(tmp_path, Kind.Q4_1)
    weights = open_model(source).load(torch.float32, CPU, "stored").weights
    numbers_of = open_model(source).load(torch.float32, CPU, "expanded").weights
    assert weights.nbytes > weights.nbytes_in_blocks > weights.nbytes // 20
    assert numbers_of.nbytes_in_blocks == 0


def test_who_takes_a_dead_workers_place_has_its_pool_whatever_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "available_memory", lambda: 10_000 << 10)
    spec = spec_of(workers=2, host_kv="1000KiB")
    pages = page_counts(spec, GROUPS, CPU)
    nbytes = sum(count * group.page_bytes for count, group in zip(pages, GROUPS, strict=True))
    monkeypatch.setattr(sizes, "available_memory", lambda: 3_000 << 10)  # the others have theirs
    again = replacement(spec, nbytes)
    assert page_counts(again, GROUPS, CPU) == pages
    assert page_counts(spec, GROUPS, CPU) != pages
    assert again.replaces
    assert not spec.replaces
    assert replacement(spec_of(device_kv="1MiB"), 0).device_kv == 1 << 20, "of a pool that was not told of"


def test_who_takes_a_dead_workers_place_needs_no_data_dir(tmp_path: Path, ops: ReferenceOps) -> None:
    source = source_of(tmp_path, Kind.Q4_1)
    config = open_model(source).config
    spec = spec_of(host_kv="1MiB", disk_kv="4MiB", data_dir=str(source.path))
    with pytest.raises(ValueError, match="File exists"):
        check_settings(spec, source, config, ops)
    check_settings(replacement(spec, 1 << 20), source, config, ops)


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
        _namespace(spec_of(tensor_parallel=2), stored, ops),
        _namespace(spec_of(), replace(stored, quantization=Quantization("gptq", less_one=True)), ops),
        _namespace(spec_of(), replace(stored, quantization=Quantization("gptq")), ops),
    ]
    assert len(set(names)) == len(names)
    assert _namespace(spec_of(kv_dtype="bf16"), stored, ops) == names[0], "auto is the model's own"


def test_a_model_without_blocks_is_the_same_however_it_is_kept(tmp_path: Path, ops: ReferenceOps) -> None:
    source = source_of(tmp_path, Kind.F16)
    one, other = (load_model(source, torch.bfloat16, CPU, kept) for kept in ("stored", "expanded"))
    assert _namespace(spec_of(), one, ops) == _namespace(spec_of(weights="expanded"), other, ops)


def test_a_folders_codes_are_expanded_on_a_cpu(tmp_path: Path) -> None:
    quantised = open_model(ModelSource("folder", folder(AWQ, awq(32)).write(tmp_path / "awq"), "m"))
    blocks = open_model(source_of(tmp_path, Kind.Q4_1))
    gpu = spec_of(device="cuda")
    assert quantised.load(torch.float32, CPU).quantization == Quantization("awq", group=32)
    assert storage_of(spec_of(), quantised) == "expanded"
    assert storage_of(gpu, quantised) == "stored"
    assert storage_of(spec_of(device="cuda", weights="expanded"), quantised) == "expanded"
    assert storage_of(spec_of(), blocks) == "stored"
