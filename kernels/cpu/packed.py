"""Weights in the panels that the products read, in memory of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels import blocks
from kernels.blocks import BlockMatrix, expand
from kernels.cpu.block_panels import BlockRun, block_runs, lanes_of, need_of, pack_run, packed_run_bytes
from kernels.cpu.columns import columns, in_columns, panel_count
from kernels.cpu.library import PAIRS, PANEL, PLAIN, TYPES, UNIT, Library, Matrix, Panel
from kernels.memory import huge_bytes
from kernels.ops import Activations

_LINE = 64  # bytes of a cache line


class Arena:
    """One run of memory, handed out piece by piece."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = huge_bytes(nbytes)
        self._next = 0

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` bytes, at the start of a cache line."""
        start = self._next
        if start + nbytes > self._bytes.shape[0]:
            raise ValueError(f"arena is full: {nbytes} bytes wanted, {self._bytes.shape[0] - start} left")
        self._next += padded(nbytes)
        return self._bytes[start : start + nbytes]


def padded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def packed_bytes(
    library: Library, weight: blocks.Matrix, dtype: torch.dtype, *, pair_halves: bool = False
) -> int:
    """Bytes of the panels of `weight [out, in]` for operands of `dtype`."""
    if isinstance(weight, BlockMatrix):
        runs = block_runs(weight, pair_halves)
        return sum(packed_run_bytes(library, run, weight.width) for run in runs)
    out, width = weight.shape
    return panel_count(out, pair_halves) * _plain_panel_bytes(width, dtype)


class PackedMatrix:
    """`weight [out, in]` in panels; `pair_halves` puts each output of the first half beside its
    partner of the second. Holds no reference to `weight` itself.

    `dtype` is that of the operands; `activations` holds for blocks. Raises ValueError for another
    dtype than those of the library, or of a plain weight than `dtype`, and for gates and ups in
    blocks of different formats. FP8 and 4-bit groups (`kernels.narrow`) are expanded to `dtype`.
    """

    def __init__(
        self,
        library: Library,
        weight: blocks.Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activations: Activations = "float",
        pair_halves: bool = False,
        arena: Arena | None = None,
    ) -> None:
        if dtype not in TYPES:
            raise ValueError(f"products are computed in bfloat16 or float32, not {dtype}")
        self.out, self.width = weight.shape
        self.dtype = dtype
        size = packed_bytes(library, weight, dtype, pair_halves=pair_halves)
        self._data = arena.take(size) if arena else torch.empty(size, dtype=torch.uint8)
        self._pair_halves = pair_halves
        runs: Sequence[BlockRun] = ()
        if isinstance(weight, BlockMatrix):
            runs = block_runs(weight, pair_halves)
            panels = self._pack_blocks(library, runs, lanes_of(dtype, activations))
            orders = [run.order.where(run.order < 0, run.order + first) for run, first in _firsts(runs)]
            order = torch.cat(orders) if orders else columns(0)
        else:
            plain = weight if isinstance(weight, Tensor) else expand(weight, dtype)
            panels = self._pack_plain(library, plain)
            order = columns(self.out, pair_halves)
        self._panels = (Panel * len(panels))(*panels)
        self._bias = None if bias is None else in_columns(bias.to(torch.float32), order)
        self.matrix = Matrix(
            ctypes.cast(self._panels, ctypes.POINTER(Panel)),
            None if self._bias is None else self._bias.data_ptr(),
            self.out,
            -(-self.width // PAIRS[dtype]),
            self.width // UNIT,
            len(panels),
            need_of(library, runs, activations),
        )
        self.reference = ctypes.byref(self.matrix)

    def _pack_plain(self, library: Library, weight: Tensor) -> Sequence[Panel]:
        if weight.dtype != self.dtype:
            raise ValueError(f"weights are {weight.dtype}, their operands {self.dtype}")
        weight = weight.contiguous()
        library.pack(
            TYPES[self.dtype],
            weight.data_ptr(),
            self.out,
            self.width,
            self._pair_halves,
            self._data.data_ptr(),
            torch.get_num_threads(),
        )
        size = _plain_panel_bytes(self.width, self.dtype)
        return self._table(PLAIN, self._data.data_ptr(), size, 0, self.out)

    def _pack_blocks(self, library: Library, runs: Sequence[BlockRun], lanes: int) -> Sequence[Panel]:
        panels: list[Panel] = []
        at = self._data.data_ptr()
        for run, first in _firsts(runs):
            pack_run(library, run, self.width, lanes, at)
            nbytes = packed_run_bytes(library, run, self.width)
            panels += self._table(run.format, at, nbytes // run.panels, first, run.out)
            at += nbytes
        return panels

    def _table(self, form: int, start: int, size: int, first: int, out: int) -> Sequence[Panel]:
        """The panels of `out` outputs from `first` on; `size` bytes each."""
        columns = PANEL // 2 if self._pair_halves else PANEL
        places = out // 2 if self._pair_halves else out
        return [
            Panel(start + number * size, form, first + at, min(columns, places - at))
            for number, at in enumerate(range(0, places, columns))
        ]


def _plain_panel_bytes(width: int, dtype: torch.dtype) -> int:
    return PANEL * 4 * -(-width // PAIRS[dtype])


def _firsts(runs: Sequence[BlockRun]) -> Iterator[tuple[BlockRun, int]]:
    """Each run and its first output."""
    first = 0
    for run in runs:
        yield run, first
        first += run.out
