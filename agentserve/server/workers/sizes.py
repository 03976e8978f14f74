"""What a worker's settings ask of model, kernels and memory: refused before weights are read."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from agentserve.executor.pool import KV_DTYPES, kv_groups
from agentserve.machine import available_memory, pool_bytes
from agentserve.models.config import DecoderConfig
from agentserve.models.load import DTYPES, OpenModel, WeightStorage
from agentserve.models.source import ModelSource
from agentserve.models.weights import DecoderWeights
from agentserve.server.workers.spec import WorkerSpec
from agentserve.types import KVGroup
from agentserve.values import show_size
from kernels.ops import AttentionShape, Ops, Span
from tiering.stores.disk import PAGE, block_footprint, capacity_of
from tiering.stores.host import slot_bytes, staging_slots
from tiering.stores.private import make_folder

GPU_SHARE = 0.8  # of a GPU's free memory, once the weights are there; the rest is for activations


def check_settings(spec: WorkerSpec, source: ModelSource, config: DecoderConfig, ops: Ops) -> None:
    """All that can be known without the weights. ValueError, one line that names the flag."""
    context_of(spec, config)
    dtype, kept = DTYPES[spec.dtype], kv_dtype_of(spec)
    possible = ops.kv_dtypes(dtype)
    if not possible:
        raise ValueError(f"--dtype {spec.dtype}: {ops.name} kernels do not compute in it")
    if kept not in possible:
        names = " or ".join(name for name, kind in KV_DTYPES.items() if kind in possible)
        raise ValueError(
            f"--kv-dtype {spec.kv_dtype}: {ops.name} kernels keep KV of a {spec.dtype} model as {names} only"
        )
    if spec.activations != "float" and source.kind == "folder":
        raise _no_blocks(spec, source)
    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, spec.page_size)
    table = torch.zeros((1, 1), dtype=torch.int64)
    try:
        ops.attention(shape, [Span(0, 1, 0)], table)
    except ValueError as error:
        raise ValueError(f"--page-size {spec.page_size}: {error}") from None
    groups = kv_groups(config, spec.page_size, kept)
    if spec.device_kv is not None:
        _page_count(spec.device_kv, groups)
        if not spec.replaces:
            check_pool(spec.device_kv, free_on(torch.device(spec.device)))
    tiers = tier_sizes(spec, groups, available_memory())
    if tiers is not None and spec.data_dir is not None and not spec.replaces:
        check_data_dir(Path(spec.data_dir))


def free_on(device: torch.device) -> int | None:
    """Bytes that are free for a pool; None where nobody says."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def check_pool(size: int, free: int | None) -> None:
    """ValueError, one line, for a pool that is larger than the memory it would lie in."""
    if free is not None and size > free:
        raise ValueError(f"--device-kv {show_size(size)}: only {show_size(free)} are free")


def check_blocks(spec: WorkerSpec, source: ModelSource, weights: DecoderWeights) -> None:
    """8-bit activations are for weights in blocks: ValueError where no layer has any."""
    if spec.activations != "float" and not weights.layers_in_blocks:
        raise _no_blocks(spec, source)


def _no_blocks(spec: WorkerSpec, source: ModelSource) -> ValueError:
    return ValueError(
        f"--activations {spec.activations}: {source.path} has no layer whose weights are in blocks"
    )


def storage_of(spec: WorkerSpec, opened: OpenModel) -> WeightStorage:
    """How weights are kept. Kernels of the CPU multiply with numbers, not with a folder's codes: these are
    expanded at once, and not kept beside their numbers."""
    if opened.quantization is not None and torch.device(spec.device).type == "cpu":
        return "expanded"
    return spec.weights


def kv_dtype_of(spec: WorkerSpec) -> torch.dtype:
    """In which numbers KV is kept."""
    return DTYPES[spec.dtype] if spec.kv_dtype == "auto" else KV_DTYPES[spec.kv_dtype]


def context_of(spec: WorkerSpec, config: DecoderConfig) -> int:
    if spec.max_model_len is None:
        return config.max_position
    if spec.max_model_len > config.max_position:
        raise ValueError(
            f"--max-model-len {spec.max_model_len}: the model was made for {config.max_position} positions"
        )
    return spec.max_model_len


def page_counts(spec: WorkerSpec, groups: tuple[KVGroup, ...], device: torch.device) -> tuple[int, ...]:
    """As many pages for every group as the pool's bytes allow."""
    size = spec.device_kv
    if size is None and device.type == "cuda":
        size = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) // spec.kv_share
    elif size is None:
        available = available_memory()
        if available is not None:  # the host tier takes its memory at once, after the pool
            available = max(0, available - spec.host_kv * spec.kv_share)
        size = pool_bytes(available, spec.kv_share)
    return (_page_count(size, groups),) * len(groups)


@dataclass(frozen=True, slots=True)
class TierSizes:
    """What one worker's tiers below the device hold."""

    block_bytes: int  # one page of every KV group
    host_slots: int  # blocks
    disk_budget: int  # bytes; 0: no disk tier
    staging: bool = False  # the slots are no tier, but the way to the disk


def tier_sizes(spec: WorkerSpec, groups: tuple[KVGroup, ...], available: int | None) -> TierSizes | None:
    """The tiers' sizes; None when there are none. `available`: the machine's free memory, if it says.

    Raises ValueError, one line that names the flag, for a tier that holds no block and for host memory
    that is not there.
    """
    if not spec.host_kv and not spec.disk_kv:
        return None
    block = sum(group.page_bytes for group in groups)
    slot, on_disk = slot_bytes(block), block_footprint(block, spec.page_size)
    for flag, size, room, least in (
        ("--host-kv", spec.host_kv, spec.host_kv, slot),
        ("--disk-kv", spec.disk_kv, capacity_of(spec.disk_kv // PAGE * PAGE), on_disk),
    ):
        if size and room < least:
            raise ValueError(
                f"{flag} {show_size(size)} per worker holds no block of {show_size(block)}: give it more"
            )
    # Its own share only: others may have taken theirs by now. Before the start all are counted (`launch`).
    if available is not None and spec.host_kv > available:
        raise ValueError(f"--host-kv {show_size(spec.host_kv)}: only {show_size(available)} are free")
    if not spec.host_kv:
        return TierSizes(block, staging_slots(block), spec.disk_kv, staging=True)
    return TierSizes(block, spec.host_kv // slot, spec.disk_kv)


def check_data_dir(folder: Path) -> None:
    """Make the folder if need be. ValueError, one line, where nothing can be written in it."""
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--data-dir {folder}: {error.strerror or error}") from None


def reach_of(longest: int, pages: int, page_size: int) -> int:
    """Positions that a session can come to (the core's own limit): tables for more are never read, and a
    model's file may name millions."""
    return min(longest, (pages - 1) * page_size)


def _page_count(size: int, groups: tuple[KVGroup, ...]) -> int:
    per_page = sum(group.page_bytes for group in groups)
    if size < 2 * per_page:
        raise ValueError(
            f"a KV pool of {show_size(size)} holds {size // per_page} pages of {show_size(per_page)}: "
            "give it more with --device-kv"
        )
    return size // per_page
