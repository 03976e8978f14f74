"""Weights as a file stores them: rows of quantised blocks (GGML formats), not expanded.

A block is a run of neighbouring weights of one row that share a scale, and in some formats an
offset: `weight = scale * code + offset`. Backends keep the codes and compute with these exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.narrow import GroupedMatrix, ScaledMatrix, expand_narrow, expand_narrow_rows

_AT_ONCE = 1 << 22  # weights decoded together: bounds what expanding holds beside its result


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One GGML format. `weights` and `nbytes` of a block as the file has it."""

    name: str
    weights: int
    nbytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights, which must be whole blocks."""
        if width % self.weights:
            raise ValueError(f"{self.name} has blocks of {self.weights} weights: {width} is no multiple")
        return width // self.weights * self.nbytes


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            BlockFormat("Q4_0", 32, 18),
            BlockFormat("Q4_1", 32, 20),
            BlockFormat("Q5_0", 32, 22),
            BlockFormat("Q5_1", 32, 24),
            BlockFormat("Q8_0", 32, 34),
            BlockFormat("Q4_K", 256, 144),
            BlockFormat("Q5_K", 256, 176),
            BlockFormat("Q6_K", 256, 210),
        )
    }
)
"""Formats that stay as they are; any other is expanded by whoever reads the file."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows in one format. `data [rows, bytes per row]` uint8, each row contiguous; may be a mapped file."""

    format: BlockFormat
    data: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix `[out, width]`: runs of rows, one beneath the other, each in its own format."""

    runs: tuple[BlockRows, ...]
    width: int

    def __post_init__(self) -> None:
        for run in self.runs:
            if run.data.shape[1] != run.format.row_bytes(self.width):
                raise ValueError(f"rows of {self.width} weights in {run.format.name} of wrong length")

    @property
    def shape(self) -> tuple[int, int]:
        return sum(run.data.shape[0] for run in self.runs), self.width

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(run.data.numel() for run in self.runs)


Matrix = Tensor | BlockMatrix | ScaledMatrix | GroupedMatrix
"""`[out, in]` weights: numbers, blocks as a file has them, or codes with scales (`kernels.narrow`)."""


def expand(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The numbers `[out, width]` of a matrix: exact in float32, then rounded once to `dtype`.

    Formats and the order of operations are those of GGML (ggml-quants.c, `dequantize_row_*`).
    """
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if not isinstance(matrix, BlockMatrix):
        return expand_narrow(matrix, dtype)
    device = matrix.runs[0].data.device if matrix.runs else torch.device("cpu")
    out = torch.empty(matrix.shape, dtype=dtype, device=device)
    row = 0
    for run in matrix.runs:
        for values in _decoded(run, matrix.width):
            out[row : row + values.shape[0]] = values
            row += values.shape[0]
    return out


def expand_rows(matrix: Matrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`expand(matrix, dtype)[rows]` for `rows [n]` int64, without expanding the others."""
    if isinstance(matrix, Tensor):
        return matrix[rows].to(dtype)
    if not isinstance(matrix, BlockMatrix):
        return expand_narrow_rows(matrix, rows, dtype)
    out = torch.empty((rows.shape[0], matrix.width), dtype=dtype, device=rows.device)
    first = 0
    for run in matrix.runs:
        count = run.data.shape[0]
        mine = torch.nonzero((rows >= first) & (rows < first + count)).flatten()
        picked = BlockRows(run.format, run.data[rows[mine] - first])
        done = 0
        for values in _decoded(picked, matrix.width):
            out[mine[done : done + values.shape[0]]] = values.to(dtype)
            done += values.shape[0]
        first += count
    return out


def _decoded(run: BlockRows, width: int) -> Iterator[Tensor]:
    """The rows of a run in float32, some at a time."""
    for data in torch.split(run.data, max(1, _AT_ONCE // max(1, width))):
        blocks = data.reshape(-1, run.format.nbytes)
        yield _DECODERS[run.format.name](blocks).view(data.shape[0], width)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, `[blocks, 1]` float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(data: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 2 * n]`: all low halves, then all high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """`[blocks, n]` bytes -> `[blocks, 8 * n]` bits, the lowest of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[:, :, None] >> shifts) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * codes.to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _q4_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _scaled_k(blocks, codes)


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, None, 16:48] >> shifts) & 1  # group g's fifth bits are bit g of 32 bytes
    return _scaled_k(blocks, low | high << 4)


def _scaled_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """Q4_K and Q5_K: `codes [blocks, 8, 32]`, each group with a 6-bit scale and a 6-bit minimum.

    The 12 bytes hold scales 0-3, minima 0-3 (six low bits each, the two high ones belong to groups
    4-7) and the low four bits of scales and minima 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    scale = _half(blocks, 0) * scales.to(torch.float32)
    minimum = _half(blocks, 2) * minima.to(torch.float32)
    return (scale[:, :, None] * codes.to(torch.float32) - minimum[:, :, None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # [blocks, half, group of 32, 32]
    codes = (low.view(-1, 16, 16) | high.reshape(-1, 16, 16) << 4).to(torch.float32) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    return ((_half(blocks, 208) * scales)[:, :, None] * codes).flatten(1)


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
"""`[blocks, bytes]` uint8 -> `[blocks, weights]` float32, by format."""
