"""Large runs of memory: in huge pages where the system gives them.

Paged attention jumps through the whole pool at every layer; with pages of 4 KiB most of its reads
would first have to look up where they go.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE = 2 << 20  # bytes of a huge page


def empty_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for KV pages on `device`; the contents mean nothing."""
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    flat = huge_bytes(math.prod(shape) * dtype.itemsize)
    return flat.view(dtype).view(tuple(shape))


def huge_bytes(nbytes: int) -> Tensor:
    """`[nbytes]` uint8 of zeros, starting at a huge page's edge. Not touched before it is used."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    # Private: shared anonymous memory gets no huge pages.
    area = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + nbytes]
