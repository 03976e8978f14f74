"""One step's attention for the compiled library: its plan, and the call for one layer."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.checks import check
from kernels.cpu.library import KV_PAIRS, KV_TYPES, TYPES, Kv, Library
from kernels.ops import AttentionShape, Span, head_dim


class CpuAttention:
    """`kernels.ops.Attention` over pages in this backend's own layout."""

    def __init__(
        self, library: Library, shape: AttentionShape, spans: Sequence[Span], tables: Tensor
    ) -> None:
        self._library = library
        self._shape = shape
        flat = array("q")
        for span in spans:
            flat.extend((span.row, span.rows, span.position))
        check("page tables", tables, (len(spans), None), torch.int64)
        self._rows = max((span.row + span.rows for span in spans), default=0)
        tables = tables.contiguous()
        self.plan: int | None = library.plan(
            flat.buffer_info()[0],
            len(spans),
            tables.data_ptr(),
            tables.shape[1],
            shape.window or 0,
            shape.heads // shape.kv_heads,
            shape.slots,
        )

    def __del__(self) -> None:
        plan, self.plan = getattr(self, "plan", None), None
        if plan is not None:
            self._library.free_plan(plan)

    @property
    def shared_keys(self) -> int:
        """Keys that rows read together with another row that has the same pages, summed over rows."""
        found: int = self._library.shared_keys(self.plan)
        return found

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        shape, pages = self._shape, pages_of(kv)
        check("queries", q, (None, shape.heads, shape.dim), None)
        if q.shape[0] < self._rows:
            raise ValueError(f"queries must be at least {self._rows} rows, not {q.shape[0]}")
        if (pages.slots, pages.kv_heads, pages.dim) != (shape.slots, shape.kv_heads, shape.dim):
            raise ValueError(
                f"KV pages are of another shape than attention was laid out for: {list(kv.shape)}"
            )
        q = q.contiguous()
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        self._library.attention(
            TYPES[q.dtype],
            self.plan,
            ctypes.byref(pages),
            shape.heads,
            q.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def pages_of(kv: Tensor) -> Kv:
    """One layer's view `[pages, 2, slots, kv_heads, kv_width(dim, kv.dtype)]` as the library sees it.

    ValueError for a dtype that pages cannot have, or a head dimension that they cannot hold.
    """
    _, _, slots, kv_heads, width = kv.shape
    kind, dim = kind_of(kv.dtype, width)
    return Kv(kv.data_ptr(), kv.stride(0), slots, kv_heads, dim, kind)


def kind_of(dtype: torch.dtype, width: int) -> tuple[int, int]:
    """The library's name for KV pages of `dtype`, and the head dimension of those `width` wide.

    ValueError as in `pages_of`.
    """
    kind, dim = KV_TYPES.get(dtype), head_dim(width, dtype)
    if kind is None:
        raise ValueError(f"KV pages cannot be {dtype}")
    if dim % KV_PAIRS[dtype]:
        raise ValueError(f"KV pages of {dtype} need an even head dimension, not {dim}")
    return kind, dim
