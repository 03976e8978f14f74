"""Block weights in panels: straight from a file's rows, and as compact as they are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from kernels.blocks import BlockMatrix, BlockRows
from kernels.cpu.columns import columns, in_columns
from kernels.cpu.library import BLOCK_FORMATS, NEED_CODES, NEED_SUMS, PAIRS, PANEL, UNIT, Library
from kernels.ops import Activations

_BYTE_LANES = 4  # 8-bit operands in 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun:
    """Outputs that share a format, beneath each other. `order` says what stands in which column."""

    rows: tuple[BlockRows, ...]
    order: Tensor

    @property
    def name(self) -> str:
        return self.rows[0].format.name

    @property
    def format(self) -> int:
        return BLOCK_FORMATS[self.name]

    @property
    def out(self) -> int:
        return sum(rows.data.shape[0] for rows in self.rows)

    @property
    def panels(self) -> int:
        return self.order.shape[0] // PANEL


def block_runs(matrix: BlockMatrix, pair_halves: bool) -> Sequence[BlockRun]:
    """The runs of a matrix. ValueError if it is to be paired and has more than one format."""
    runs = []
    filled = [rows for rows in matrix.runs if rows.data.shape[0]]
    for _, group in groupby(filled, lambda rows: rows.format.name):
        rows = tuple(group)
        runs.append(BlockRun(rows, columns(sum(part.data.shape[0] for part in rows), pair_halves)))
    if pair_halves and len(runs) > 1:
        raise ValueError(f"gates and ups cannot be in blocks of {' and '.join(run.name for run in runs)}")
    return runs


def packed_run_bytes(library: Library, run: BlockRun, width: int) -> int:
    panel: int = library.block_panel_bytes(run.format, width // UNIT)
    return run.panels * panel


def pack_run(library: Library, run: BlockRun, width: int, lanes: int, to: int) -> None:
    """Pack a run to the address `to`; `lanes` as `lanes_of` says."""
    addresses = in_columns(_addresses(run), run.order)
    library.pack_blocks(
        run.format,
        lanes,
        addresses.data_ptr(),
        run.panels,
        width // UNIT,
        to,
        torch.get_num_threads(),
    )


def lanes_of(dtype: torch.dtype, activations: Activations) -> int:
    """Operands in 32 bits: codes are laid out like them."""
    return _BYTE_LANES if activations == "int8" else PAIRS[dtype]


def need_of(library: Library, runs: Sequence[BlockRun], activations: Activations) -> int:
    """What a product with these runs wants of its operand rows."""
    if runs and activations == "int8":
        return NEED_CODES
    return NEED_SUMS if any(library.block_has_offset(run.format) for run in runs) else 0


def _addresses(run: BlockRun) -> Tensor:
    """`[out]` int64: where each row's blocks are."""
    parts = []
    for rows in run.rows:
        if rows.data.stride(1) != 1 or rows.data.dtype != torch.uint8 or rows.data.device.type != "cpu":
            raise ValueError("rows of blocks must be contiguous bytes in memory")
        parts.append(rows.data.data_ptr() + torch.arange(rows.data.shape[0]) * rows.data.stride(0))
    return torch.cat(parts)
