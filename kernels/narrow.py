"""Weights in few bits with scales beside them, as GPUs are served them: FP8, and 4-bit codes in groups.

Both are kept as what a product reads fastest, runs of codes along the inputs; what files have is put into
this order when a model is loaded (`agentserve.models.packings`), and a matrix fused from several is these
beneath each other. Values are exact in float32: a code is one of 256, or 16, small numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 32
"""4-bit codes of neighbouring inputs that share 16 bytes: byte i has code i below and code 16 + i above, so
that halves of a unit are taken out with one shift, and no neighbours are interleaved."""

_AT_ONCE = 1 << 22  # weights expanded together: bounds what expanding holds beside its result


@dataclass(frozen=True, slots=True, eq=False)
class ScaledMatrix:
    """FP8 weights `[out, in]`: `float8_e4m3fn(codes[r, c]) * scales[r // height, c // width]`.

    `width` is a multiple of 32, or all of `in`. Codes are numbers: not 127 or 255, which are NaN.
    """

    codes: Tensor  # [out, in] uint8, the bits of float8_e4m3fn
    scales: Tensor  # [ceil(out / height), ceil(in / width)] float32
    height: int
    width: int

    def __post_init__(self) -> None:
        out, inputs = self.codes.shape
        if self.width % UNIT and self.width < inputs:
            raise ValueError(f"scales of {self.width} inputs: not a multiple of {UNIT}")
        expected = (-(-out // self.height), -(-inputs // self.width))
        if self.codes.dtype != torch.uint8 or self.scales.dtype != torch.float32:
            raise ValueError(f"codes and scales are {self.codes.dtype} and {self.scales.dtype}")
        if tuple(self.scales.shape) != expected:
            raise ValueError(f"{list(self.scales.shape)} scales, {list(expected)} needed")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def format(self) -> str:
        """What people call it: "FP8", or "FP8-128" where that many inputs share a scale."""
        return "FP8" if self.width >= self.shape[1] else f"FP8-{self.width}"

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numel(self) -> int:
        return self.codes.numel()

    def values(self, rows: Tensor) -> Tensor:
        """`[len(rows), in]` float32."""
        found = self.codes[rows].view(torch.float8_e4m3fn).to(torch.float32)
        for run, scale in _runs(found, self.scales[rows // self.height], self.width):
            run.mul_(scale)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix:
    """4-bit weights `[out, in]`: `(code - zeros[g, r]) * scales[g, r]` with `g` the group of the column.

    Columns are stored in an order in which groups are runs of `group` columns (the last may be shorter):
    stored column j, of group `j // group`, is input `order[j]`, or j itself without an order.
    `in` is a multiple of 32, and so is `group`, which may also be all of `in`.
    """

    codes: Tensor  # [out, in / 2] uint8, see `UNIT`
    scales: Tensor  # [groups, out] float16, bfloat16 or float32
    zeros: Tensor  # [groups, out] uint8
    group: int
    order: Tensor | None = None  # [in] int64, a permutation

    def __post_init__(self) -> None:
        out, inputs = self.shape
        if inputs % UNIT or self.group < 1 or (self.group % UNIT and self.group < inputs):
            raise ValueError(f"groups of {self.group} among {inputs} inputs: not multiples of {UNIT}")
        expected = (-(-inputs // self.group), out)
        if self.codes.dtype != torch.uint8 or self.zeros.dtype != torch.uint8:
            raise ValueError(f"codes and zeros are {self.codes.dtype} and {self.zeros.dtype}")
        for name, found in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(found.shape) != expected:
                raise ValueError(f"{list(found.shape)} {name}, {list(expected)} needed")
        if self.order is not None and tuple(self.order.shape) != (inputs,):
            raise ValueError(f"an order of {self.order.shape[0]} columns for {inputs}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def format(self) -> str:
        """What people call it: "INT4-128" for groups of that many inputs, "INT4" for one per output."""
        return "INT4" if self.group >= self.shape[1] else f"INT4-{self.group}"

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + order

    def numel(self) -> int:
        return self.codes.numel() * 2

    def values(self, rows: Tensor) -> Tensor:
        """`[len(rows), in]` float32, columns as inputs are."""
        stored = unpack_codes(self.codes[rows]).to(torch.float32)
        zeros, scales = (beside[:, rows].t().to(torch.float32) for beside in (self.zeros, self.scales))
        for run, zero in _runs(stored, zeros, self.group):
            run.sub_(zero)
        for run, scale in _runs(stored, scales, self.group):
            run.mul_(scale)
        if self.order is None:
            return stored
        found = torch.empty_like(stored)
        found[:, self.order] = stored
        return found


def _runs(values: Tensor, beside: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of `values [rows, in]` with what of `beside [rows, runs]` is for each: all whole runs of `width`
    columns together, then a shorter one."""
    inputs = values.shape[1]
    whole = inputs // width
    yield values[:, : whole * width].view(values.shape[0], whole, width), beside[:, :whole, None]
    if inputs % width:
        yield values[:, whole * width :], beside[:, whole:]


NarrowMatrix = ScaledMatrix | GroupedMatrix


def pack_codes(codes: Tensor) -> Tensor:
    """`[out, in]` uint8 codes below 16 -> `[out, in / 2]` bytes in the order of `UNIT`."""
    halves = codes.reshape(codes.shape[0], -1, 2, UNIT // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpack_codes(packed: Tensor) -> Tensor:
    """`pack_codes` undone."""
    units = packed.reshape(packed.shape[0], -1, 1, UNIT // 2)
    return torch.cat((units & 15, units >> 4), dim=2).flatten(1)


def expand_narrow(matrix: NarrowMatrix, dtype: torch.dtype) -> Tensor:
    """The numbers `[out, in]`: exact in float32, then rounded once to `dtype`."""
    every = torch.arange(matrix.shape[0], device=matrix.device)
    return expand_narrow_rows(matrix, every, dtype)


def expand_narrow_rows(matrix: NarrowMatrix, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`expand_narrow(matrix, dtype)[rows]`, without expanding the others."""
    out = torch.empty((rows.shape[0], matrix.shape[1]), dtype=dtype, device=matrix.device)
    done = 0
    for some in torch.split(rows, max(1, _AT_ONCE // max(1, matrix.shape[1]))):
        out[done : done + some.shape[0]] = matrix.values(some)
        done += some.shape[0]
    return out


def stack(parts: Sequence[NarrowMatrix]) -> NarrowMatrix:
    """The parts beneath each other as one matrix, nothing expanded.

    ValueError where they do not fit: of different kinds, scales over different runs of inputs, 4-bit groups
    of other inputs (act-order that differs).
    """
    if all(isinstance(part, ScaledMatrix) for part in parts):
        return _stack_scaled([part for part in parts if isinstance(part, ScaledMatrix)])
    if all(isinstance(part, GroupedMatrix) for part in parts):
        return _stack_grouped([part for part in parts if isinstance(part, GroupedMatrix)])
    raise ValueError("matrices of different kinds")


def _stack_scaled(parts: Sequence[ScaledMatrix]) -> ScaledMatrix:
    first = parts[0]
    if any(part.shape[1] != first.shape[1] or part.width != first.width for part in parts):
        raise ValueError("scales over different runs of inputs")
    if len(parts) == 1:
        return first
    # Runs of rows that share scales must not reach over the edge of a part.
    step = math.gcd(*(part.height if part.height < part.shape[0] else part.shape[0] for part in parts))
    step = math.gcd(step, *(part.shape[0] for part in parts))
    scales = [
        part.scales[torch.arange(0, part.shape[0], step, device=part.device) // part.height] for part in parts
    ]
    return ScaledMatrix(torch.cat([part.codes for part in parts]), torch.cat(scales), step, first.width)


def _stack_grouped(parts: Sequence[GroupedMatrix]) -> GroupedMatrix:
    first = parts[0]
    for part in parts[1:]:
        if part.shape[1] != first.shape[1] or part.group != first.group:
            raise ValueError("groups of different size")
        if not _same(part.order, first.order):
            raise ValueError("groups of different inputs")
    if len(parts) == 1:
        return first
    return GroupedMatrix(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts], dim=1),
        torch.cat([part.zeros for part in parts], dim=1),
        first.group,
        first.order,
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def narrow_part(
    matrix: NarrowMatrix, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
) -> NarrowMatrix:
    """Rows and columns from, to (None: all) as a matrix of its own, contiguous. Its codes are the same memory
    where only rows are cut.

    ValueError where columns cannot be cut: through 32 neighbours of 4-bit codes or of a run that shares a
    scale, and where an order (act-order) spreads groups over all of them.
    """
    out, inputs = matrix.shape
    first, end = rows or (0, out)
    start, stop = columns or (0, inputs)
    if isinstance(matrix, ScaledMatrix):
        height = end - first if matrix.height >= out else math.gcd(matrix.height, first)
        width, runs = _cut_runs(inputs, matrix.width, start, stop)
        at = torch.arange(first, end, height, device=matrix.device) // matrix.height
        scales = matrix.scales[at][:, runs.to(matrix.device)]
        return ScaledMatrix(matrix.codes[first:end, start:stop].contiguous(), scales, height, width)
    if columns is not None and matrix.order is not None:
        raise ValueError("groups are spread over all columns (act-order)")
    if start % UNIT or stop % UNIT:
        raise ValueError(f"columns {start} to {stop} of 4-bit codes: not multiples of {UNIT}")
    group, runs = _cut_runs(inputs, matrix.group, start, stop)
    beside = runs.to(matrix.device)
    return GroupedMatrix(
        matrix.codes[first:end, start // 2 : stop // 2].contiguous(),
        matrix.scales[beside, first:end].contiguous(),
        matrix.zeros[beside, first:end].contiguous(),
        group,
        matrix.order,
    )


def _cut_runs(inputs: int, width: int, start: int, stop: int) -> tuple[int, Tensor]:
    """Of columns `start .. stop-1`: how many share a scale, and which run of the whole each run is."""
    if width >= inputs:
        return stop - start, torch.zeros(1, dtype=torch.int64)
    each = math.gcd(width, start, stop if stop < inputs else 0)
    if each % UNIT:
        raise ValueError(f"columns {start} to {stop} cut through {UNIT} that share a scale")
    return each, torch.arange(start, stop, each) // width
