"""What the device itself can do: copying its memory, and torch's matrix product."""

from __future__ import annotations

import torch

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.result import Part
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.limits import DTYPE_NAMES
from agentserve.bench.report import Row

MEMORY = "device memory"


def measure(on: Device, sizes: Sizes) -> Part:
    """Best of many runs each: limits, not averages."""
    rows = [_row(MEMORY, copy_rate(on, sizes.copied) / 1e9, "GB/s")]
    for dtype in sizes.dtypes:
        rows.append(_row(products(dtype), product_rate(on, sizes.squares, dtype) / 1e12, "TFLOP/s"))
    return Part("limits", rows)


def products(dtype: torch.dtype) -> str:
    """What the limit of products is called."""
    return f"{DTYPE_NAMES[dtype]} products"


def copy_rate(on: Device, nbytes: int) -> float:
    """Bytes per second, read and written together."""
    source = torch.ones(nbytes, dtype=torch.int8, device=on.device)
    target = torch.empty_like(source)
    return 2 * nbytes / min(on.seconds(lambda: target.copy_(source)))


def product_rate(on: Device, size: int, dtype: torch.dtype) -> float:
    """Operations per second of torch's product of square matrices."""
    left = torch.randn(size, size, device=on.device).to(dtype)
    right = torch.randn(size, size, device=on.device).to(dtype)
    return 2 * size**3 / min(on.seconds(lambda: left @ right))


def _row(name: str, rate: float, unit: str) -> Row:
    return Row(name, rate, unit, higher_is_better=True, group="limits")
