"""What the machine itself can do: the two rates that bound every step of a model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.ops import Ops

READ_BYTES = 512 << 20
ROWS, WIDTH = 1024, 2048


def best(function: Callable[[], object], seconds: float = 1.0) -> float:
    """Shortest of the runs that fit in `seconds`: the machine's limit, not its average."""
    shortest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        function()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def read_bandwidth() -> float:
    """Bytes per second of reading memory once, with all kernel threads."""
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / best(data.sum)


def product_peak(dtype: torch.dtype, ops: Ops) -> float:
    """Floating-point operations per second of a large matrix product: torch's library or ours, the faster."""
    left: Tensor = torch.randn(ROWS, WIDTH).to(dtype)
    right: Tensor = torch.randn(WIDTH, WIDTH).to(dtype)
    ours = ops.linear(right)
    shortest = min(best(lambda: F.linear(left, right)), best(lambda: ours(left)))
    return 2 * ROWS * WIDTH * WIDTH / shortest
