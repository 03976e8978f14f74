"""A step's attention on the device: laid out once, run for each layer of its KV group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import KV_TAILS, AttentionShape, Span, head_dim
from kernels.triton.attention import (
    MERGE_CHOICE,
    attend_kernel,
    choice_for,
    constants_of,
    layout_of,
    merge_constants,
    merge_kernel,
)
from kernels.triton.attention_items import ENTRY, HEADER, ITEM, PARTS, Cut, blocks_of, plan
from kernels.triton.launch import Choice, launch

SCRATCH_BYTES = 128 << 20  # of partial results
_PROGRAMS = 1024  # of a step whose size is not known when it is captured; each takes items in turn
_MOST_PROGRAMS = 65535  # of a grid's second axis


class _Runner:
    """Launches both kernels for plans of one shape."""

    def __init__(self, shape: AttentionShape, kv_dtype: torch.dtype | None, choice: Choice | None) -> None:
        self.shape = shape
        self._choice = choice
        tiles = layout_of(shape, kv_dtype) if choice is None else choice.tiles
        self.block, self.segment = tiles["BLOCK_M"], tiles["SEGMENT"]
        self._group = shape.heads // shape.kv_heads

    @property
    def room(self) -> int:
        """Partial results that `SCRATCH_BYTES` hold."""
        return SCRATCH_BYTES // (4 * self.shape.heads * (self.shape.dim + 2))

    def cut(self, partials: int) -> Cut:
        shape = self.shape
        return Cut(
            self.block // self._group, self.segment, shape.slots, shape.kv_heads, shape.window, partials
        )

    def scratch(self, partials: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for the outputs, and for maxima and sums, of `partials` partial results."""
        heads, dim = self.shape.heads, self.shape.dim
        return (
            torch.empty((partials, heads, dim), dtype=torch.float32, device=device),
            torch.empty((partials, heads, 2), dtype=torch.float32, device=device),
        )

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        packed: Tensor,
        out: Tensor,
        scratch: tuple[Tensor, Tensor],
        programs: int,
    ) -> None:
        shape = self.shape
        _check(shape, q, kv)
        choice = self._choice or choice_for(shape, q.dtype, kv.dtype)
        if choice.tiles["BLOCK_M"] != self.block:  # items of more queries than the kernel would answer
            raise ValueError(f"attention was laid out for pages of another dtype than {kv.dtype}")
        launch(
            attend_kernel,
            (shape.kv_heads, programs),
            q,
            kv,
            packed,
            out,
            *scratch,
            choice=choice,
            **constants_of(shape, q.dtype, kv.dtype, kv.stride(0)),
        )

    def merge(self, packed: Tensor, out: Tensor, scratch: tuple[Tensor, Tensor], rows: int) -> None:
        shape = self.shape
        launch(
            merge_kernel,
            (rows, -(-shape.heads // MERGE_CHOICE.tiles["BLOCK_HEADS"])),
            packed,
            out,
            *scratch,
            choice=MERGE_CHOICE,
            **merge_constants(shape),
        )


class TritonAttention:
    """`kernels.ops.Attention`. Tables are read on the host: give such that lie there, and the `device`.

    `kv_dtype`: of the pages, needed if they are int8. `choice` replaces what is chosen for both.
    ValueError for spans beyond their tables.
    """

    def __init__(
        self,
        shape: AttentionShape,
        spans: Sequence[Span],
        tables: Tensor,
        kv_dtype: torch.dtype | None = None,
        *,
        device: torch.device | None = None,
        choice: Choice | None = None,
    ) -> None:
        self._runner = runner = _Runner(shape, kv_dtype, choice)
        self._rows = max((span.row + span.rows for span in spans), default=0)
        cut = runner.cut(runner.room)
        self._plan = plan(blocks_of(spans, cut.tokens), _on_host(tables), self._rows, cut)
        device = device or tables.device
        self._packed = torch.from_numpy(self._plan.packed).to(device)
        self._scratch = runner.scratch(max(1, self._plan.partials), device)

    @property
    def shared_keys(self) -> int:
        """Keys that rows read together with another row that has the same pages, summed over rows."""
        return self._plan.shared_keys

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        if q.shape[0] < self._rows:
            raise ValueError(f"queries must be at least {self._rows} rows, not {q.shape[0]}")
        q = q.contiguous()
        out = torch.empty_like(q)
        programs = min(self._plan.items, _MOST_PROGRAMS)
        self._runner.attend(q, kv, self._packed, out, self._scratch, programs)
        if self._plan.partials:
            self._runner.merge(self._packed, out, self._scratch, self._rows)
        return out.view(q.shape[0], -1)


class DecodeLayout:
    """Attention of steps in which each of `rows` rows is one token, in buffers that stay where they are.

    What a captured graph launches hangs on `rows`, `pages_per_row`, the shape and dtypes alone; `fill`
    brings each step's contents. The result lies in a buffer that the next call overwrites. Bits are
    `TritonAttention`'s.

    `beside`: a layout of the same heads and dimension that never runs at the same time; its scratch memory
    serves both (up to `SCRATCH_BYTES`, so make the largest layout first).
    """

    def __init__(
        self,
        rows: int,
        pages_per_row: int,
        shape: AttentionShape,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        choice: Choice | None = None,
        beside: DecodeLayout | None = None,
    ) -> None:
        self._runner = runner = _Runner(shape, kv_dtype, choice)
        self._rows, self._columns = rows, pages_per_row
        segments = -(-pages_per_row * shape.slots // runner.segment)
        if shape.window is not None:
            segments = min(segments, (shape.window - 1) // runner.segment + 2)
        most = rows * segments
        if beside is None:
            self._scratch = runner.scratch(max(1, min(most, runner.room)), device)
        else:
            self._scratch = beside._scratch
            if self._scratch[0].shape[1:] != (shape.heads, shape.dim):
                raise ValueError("layouts of different heads cannot share scratch memory")
        partials = min(most, len(self._scratch[0]))
        self._cut = runner.cut(partials)
        self._programs = min(most, max(1, _PROGRAMS // shape.kv_heads))
        size = HEADER + rows * PARTS + most * (ITEM + ENTRY) + rows * pages_per_row
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._out = torch.zeros((rows, shape.heads, shape.dim), dtype=dtype, device=device)
        self.fill((), torch.zeros((0, 0), dtype=torch.int64))

    def fill(self, positions: Sequence[int], tables: Tensor) -> None:
        """The next step: row i is the token at `positions[i]` of the sequence with pages `tables[i]`.

        Rows of position -1, and those behind `positions`, are padding. ValueError for more rows or
        pages than there is room for, and for positions beyond their tables.
        """
        pages = _on_host(tables)
        if len(positions) > self._rows or len(pages) != len(positions) or pages.shape[1] > self._columns:
            raise ValueError(
                f"{len(positions)} rows with tables {list(pages.shape)} in a layout of {self._rows} rows"
                f" of {self._columns} pages"
            )
        at = np.array(positions, dtype=np.int64)
        row = np.flatnonzero(at >= 0)
        blocks = np.stack((row, row, np.ones_like(row), at[row]), axis=1)
        packed = plan(blocks, pages, self._rows, self._cut).packed
        self._packed[: len(packed)].copy_(torch.from_numpy(packed))

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        """`q [rows, heads, dim]`, contiguous, in the layout's dtype -> `[rows, heads * dim]`."""
        if q.shape != self._out.shape or q.dtype != self._out.dtype or not q.is_contiguous():
            raise ValueError(f"queries must be contiguous {self._out.dtype} {list(self._out.shape)}")
        self._runner.attend(q, kv, self._packed, self._out, self._scratch, self._programs)
        self._runner.merge(self._packed, self._out, self._scratch, self._rows)
        return self._out.view(self._rows, -1)


def _on_host(tables: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    found: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = tables.to("cpu", torch.int64).numpy()
    return found


def _check(shape: AttentionShape, q: Tensor, kv: Tensor) -> None:
    """ValueError for queries or pages of another shape than attention was laid out for."""
    if q.shape[1:] != (shape.heads, shape.dim):
        raise ValueError(f"queries are {list(q.shape)}, not [rows, {shape.heads}, {shape.dim}]")
    if kv.dtype not in KV_TAILS:
        raise ValueError(f"KV pages cannot be {kv.dtype}")
    width = kv.shape[-1]
    if kv.shape[1:-1] != (2, shape.slots, shape.kv_heads) or head_dim(width, kv.dtype) != shape.dim:
        raise ValueError(f"KV pages are of another shape than attention was laid out for: {list(kv.shape)}")
    inside = (shape.slots * shape.kv_heads * width, shape.kv_heads * width, width, 1)
    if kv.stride()[1:] != inside:
        raise ValueError("a layer's part of a page must be one run of memory")
