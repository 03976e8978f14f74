"""Sums of a product's parts: where they are kept, how they are added, what becomes of the total."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Case, Choice, kernel, launch


@triton.jit
def store_part(partial, sums, part, row, out, rows, OUT: tl.constexpr):
    """Keep `sums [outs, rows]` of one part as they are, in float32."""
    at = (part.to(tl.int64) * rows + row)[:, None] * OUT + out[None, :]
    tl.store(partial + at, tl.trans(sums), mask=(row < rows)[:, None] & (out < OUT)[None, :])


@triton.jit
def store_result(
    y,
    sums,
    bias,
    row,
    out,
    rows,
    OUT: tl.constexpr,
    FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    BIAS: tl.constexpr,
):
    """`sums [outs, rows]` plus bias, rounded once, to outputs from FIRST on of `y [rows, TOTAL]`."""
    if BIAS:
        sums += tl.load(bias + FIRST + out, mask=out < OUT, other=0.0).to(tl.float32)[:, None]
    at = row.to(tl.int64)[:, None] * TOTAL + FIRST + out[None, :]
    mask = (row < rows)[:, None] & (out < OUT)[None, :]
    tl.store(y + at, tl.trans(sums).to(y.dtype.element_ty), mask=mask)


@kernel("rows")
def add_parts(
    partial,  # [PARTS, rows, OUT] float32
    bias,  # [TOTAL]; anything where not BIAS
    y,  # [rows, TOTAL]
    rows,
    OUT: tl.constexpr,
    FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The parts in their order, from 0: as a program adds them that computes them all."""
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = out < OUT
    sums = tl.zeros((SPAN,), tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(partial + (part * rows.to(tl.int64) + row) * OUT + out, mask=mask, other=0.0)
    if BIAS:
        sums += tl.load(bias + FIRST + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * TOTAL + FIRST + out, sums.to(y.dtype.element_ty), mask=mask)


ADDING = Choice({"SPAN": 512}, warps=4, stages=1)


def finish(partial: Tensor, bias: Tensor | None, y: Tensor, first: int = 0) -> None:
    """Outputs `first ..` of `y [rows, total]` from their `partial [parts, rows, out]` sums."""
    parts, rows, out = partial.shape
    grid = (rows, -(-out // ADDING.tiles["SPAN"]))
    constants = adding_constants(out, first, y.shape[1], bias is not None, parts)
    launch(add_parts, grid, partial, y if bias is None else bias, y, rows, choice=ADDING, **constants)


def adding_constants(out: int, first: int, total: int, bias: bool, parts: int) -> dict[str, Any]:
    return {"OUT": out, "FIRST": first, "TOTAL": total, "BIAS": bias, "PARTS": parts}


def adding_case(shape: str, number: str, constants: Mapping[str, Any]) -> Case:
    """`add_parts` for results in `number` ("bf16")."""
    signature = {"partial": "*fp32", "bias": f"*{number}", "y": f"*{number}", "rows": "i32"}
    return Case(f"add_parts-{number}-{shape}", add_parts, signature, constants, ADDING, decode=True)
