"""KV between the device and the host: pages gathered and copied to pinned memory, and back."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.result import Check, Part
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.report import Row
from kernels.triton import pages

LAYERS = 32


def measure(on: Device, sizes: Sizes) -> Part:
    """Rates in both directions, beside plain copies of as many bytes; and that all came back."""
    shape = (sizes.pages, LAYERS, 2, sizes.slots, sizes.kv_heads, sizes.dim)
    # Drawn where they lie: half a billion numbers take a CPU longer than all that is timed.
    where, generator = on.device, torch.Generator(on.device).manual_seed(4)
    storage = torch.randint(-9, 9, shape, dtype=torch.int16, generator=generator, device=where)
    ids = torch.randperm(sizes.pages, generator=generator, device=where)
    size = storage[0].numel() * storage.element_size()
    staging = torch.zeros(sizes.pages, size, dtype=torch.uint8, device=on.device)
    pinned = on.device.type == "cuda"
    host = torch.zeros(sizes.pages, size, dtype=torch.uint8, pin_memory=pinned)
    before = storage.clone()

    def out() -> None:
        pages.gather_pages(storage, ids, staging)
        host.copy_(staging, non_blocking=True)

    def back() -> None:
        staging.copy_(host, non_blocking=True)
        pages.scatter_pages(storage, ids, staging)

    out()
    on.finish()
    storage.zero_()
    staging.zero_()
    back()
    on.finish()
    whole = Check("pages that went to the host and back", torch.equal(storage, before))
    plain: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "device to host": (out, lambda: host.copy_(staging, non_blocking=True)),
        "host to device": (back, lambda: staging.copy_(host, non_blocking=True)),
    }
    return Part("transfers", [_row(on, name, host, *both) for name, both in plain.items()], [whole])


def _row(
    on: Device, name: str, host: Tensor, pages_move: Callable[[], object], plain: Callable[[], object]
) -> Row:
    runs = tuple(host.numel() / seconds / 1e9 for seconds in on.seconds(pages_move, cold=False))
    limit = host.numel() / min(on.seconds(plain, cold=False)) / 1e9
    return Row(
        f"{name}, {len(host)} pages of {host.shape[1]:,} bytes", statistics.median(runs), "GB/s", limit,
        "a plain copy", True, runs, "transfers",
    )  # fmt: skip
