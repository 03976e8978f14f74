"""Products with weights that are numbers: bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import TRITON_NAMES, Case, Choice, kernel, launch
from kernels.triton.shapes import MODELS, STEPS, ModelShape
from kernels.triton.tiles import DECODE_ROWS, Split, Tile, split
from kernels.triton.tuning import product_key, tuning_for

_STEP = {2: 64, 4: 32}  # weights of the inner loop's step, by their bytes

TILES: Mapping[int, Sequence[Tile]] = {
    2: (
        Tile(16, 64, 16, True, Choice(warps=4, stages=6)),
        Tile(32, 64, 32, True, Choice(warps=4, stages=5)),
        Tile(64, 64, 256, True, Choice(warps=4, stages=4)),
        Tile(128, 128, 1 << 31, False, Choice(warps=8, stages=3)),
    ),
    4: (
        Tile(16, 64, 16, True, Choice(warps=4, stages=4)),
        Tile(64, 64, 1 << 31, False, Choice(warps=8, stages=2)),
    ),
}
"""Tiles by bytes of a weight: those of float32 are not for tensor cores (all its bits count)."""


@kernel("rows")
def multiply(
    x,  # [rows, WIDTH]
    weight,  # [OUT, WIDTH]
    bias,  # [OUT]; anything where not HAS_BIAS
    y,  # [rows, OUT]; APART: [PARTS, rows, OUT] float32
    rows,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,  # of each part
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    # Beyond the last row or output, the last one is computed again and not stored.
    xs = x + tl.minimum(row, rows - 1).to(tl.int64) * WIDTH
    weights = weight + tl.minimum(out, OUT - 1).to(tl.int64) * WIDTH
    if APART:
        sums = _part(xs, weights, tl.program_id(2), WIDTH, STEP, STEPS, ROWS, OUTS)
        store_part(y, sums, tl.program_id(2), row, out, rows, OUT)
    else:
        if PARTS == 1:
            sums = _part(xs, weights, 0, WIDTH, STEP, STEPS, ROWS, OUTS)
        else:
            sums = tl.zeros((OUTS, ROWS), tl.float32)
            for part in range(PARTS):
                sums += _part(xs, weights, part, WIDTH, STEP, STEPS, ROWS, OUTS)
        store_result(y, sums, bias, row, out, rows, OUT, HAS_BIAS)


@triton.jit
def _part(
    xs,
    weights,
    part,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """The sums of one part of the width `[OUTS, ROWS]`."""
    at = tl.arange(0, STEP)
    sums = tl.zeros((OUTS, ROWS), tl.float32)
    for step in range(part * STEPS, tl.minimum((part + 1) * STEPS, (WIDTH + STEP - 1) // STEP)):
        column = step * STEP + at
        if WIDTH % STEP == 0:
            tile = tl.load(weights[:, None] + column[None, :])
            operands = tl.load(xs[None, :] + column[:, None])
        else:
            tile = tl.load(weights[:, None] + column[None, :], mask=column[None, :] < WIDTH, other=0.0)
            operands = tl.load(xs[None, :] + column[:, None], mask=column[:, None] < WIDTH, other=0.0)
        sums = tl.dot(tile, operands, sums, input_precision="ieee")
    return sums


@triton.jit
def store_part(partial, sums, part, row, out, rows, OUT: tl.constexpr):
    """Keep `sums [outs, rows]` of one part as they are, in float32."""
    at = (part.to(tl.int64) * rows + row)[:, None] * OUT + out[None, :]
    tl.store(partial + at, tl.trans(sums), mask=(row < rows)[:, None] & (out < OUT)[None, :])


@triton.jit
def store_result(y, sums, bias, row, out, rows, OUT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """`sums [outs, rows]` plus bias, rounded once."""
    if HAS_BIAS:
        sums += tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)[:, None]
    at = row.to(tl.int64)[:, None] * OUT + out[None, :]
    mask = (row < rows)[:, None] & (out < OUT)[None, :]
    tl.store(y + at, tl.trans(sums).to(y.dtype.element_ty), mask=mask)


@kernel("rows")
def add_parts(
    partial,  # [PARTS, rows, OUT] float32
    bias,  # [OUT]
    y,  # [rows, OUT]
    rows,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    if HAS_BIAS:
        sums += tl.load(bias + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * OUT + out, sums.to(y.dtype.element_ty), mask=mask)


ADDING = Choice({"SPAN": 512}, warps=4, stages=1)


def finish(partial: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """`y [rows, out]` from its `partial [parts, rows, out]` sums."""
    parts, rows, out = partial.shape
    launch(
        add_parts,
        (rows, -(-out // ADDING.tiles["SPAN"])),
        partial,
        y if bias is None else bias,
        y,
        rows,
        choice=ADDING,
        OUT=out,
        HAS_BIAS=bias is not None,
        PARTS=parts,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlainProduct:
    """`kernels.triton.tiles.Product` with `weight [out, width]` as it is."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def tiles(self) -> Sequence[Tile]:
        tuning = tuning_for(self.device)

        def tuned(tile: Tile) -> Tile:
            key = product_key(self.dtype, self.out, self.width, tile.name)
            return replace(tile, choice=tuning.choose("product", key, tile.choice))

        return [tuned(tile) for tile in TILES[self.dtype.itemsize]]

    @property
    def split(self) -> Split:
        return _split(self.out, self.width, self.dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        return ("plain", self.dtype, self.out, self.width, self.bias is not None)

    def dense(self) -> Tensor:
        return self.weight

    def rows_of_weight(self, outs: Sequence[int]) -> Tensor:
        return self.weight[torch.tensor(outs, device=self.device)]

    def multiply(self, x: Tensor, y: Tensor, tile: Tile) -> None:
        rows, plan = x.shape[0], self.split
        apart = tile.apart and plan.parts > 1
        shape = (plan.parts, rows, self.out)
        target = torch.empty(shape, dtype=torch.float32, device=x.device) if apart else y
        launch(
            multiply,
            (-(-rows // tile.rows), -(-self.out // tile.outs), plan.parts if apart else 1),
            x,
            self.weight,
            y if self.bias is None else self.bias,
            target,
            rows,
            choice=tile.choice,
            **_constants(self.out, self.width, self.bias is not None, plan, tile),
        )
        if apart:
            finish(target, self.bias, y)


def _split(out: int, width: int, dtype: torch.dtype) -> Split:
    smallest = TILES[dtype.itemsize][0]
    return split(out, width, _STEP[dtype.itemsize], smallest.outs)


def _constants(out: int, width: int, bias: bool, plan: Split, tile: Tile) -> dict[str, Any]:
    return {
        "OUT": out,
        "WIDTH": width,
        "HAS_BIAS": bias,
        "STEP": plan.step,
        "STEPS": plan.steps,
        "PARTS": plan.parts,
        "APART": tile.apart and plan.parts > 1,
        "ROWS": tile.rows,
        "OUTS": tile.outs,
    }


def cases() -> Iterator[Case]:
    """The products of each model, head included, in each step dtype; those of the smallest in float32 too."""
    for model in MODELS:
        for dtype in (*STEPS, torch.float32) if model == MODELS[-1] else STEPS:
            for out, width, bias in linear_shapes(model):
                yield from _cases(out, width, bias, dtype)


def linear_shapes(model: ModelShape) -> Sequence[tuple[int, int, bool]]:
    """`(out, width, with a bias)` of each of a decoder's weights: qkv, o, gate_up, down, head."""
    queries = model.heads * model.dim
    return (
        (queries + 2 * model.kv_heads * model.dim, model.hidden, model.name.startswith("qwen")),
        (model.hidden, queries, False),
        (2 * model.inner, model.hidden, False),
        (model.hidden, model.inner, False),
        (model.vocab, model.hidden, False),
    )


def _cases(out: int, width: int, bias: bool, dtype: torch.dtype) -> Iterator[Case]:
    number = "*" + TRITON_NAMES[dtype]
    plan = _split(out, width, dtype)
    shape = f"{number[1:]}-{out}x{width}{'-bias' if bias else ''}"
    for tile in TILES[dtype.itemsize]:
        constants = _constants(out, width, bias, plan, tile)
        signature = {"x": number, "weight": number, "bias": number, "rows": "i32"}
        signature["y"] = "*fp32" if constants["APART"] else number
        decode = tile.rows <= DECODE_ROWS
        yield Case(f"product-{shape}-{tile.name}", multiply, signature, constants, tile.choice, decode)
    if plan.parts > 1:
        yield adding_case(shape, number, {"OUT": out, "HAS_BIAS": bias, "PARTS": plan.parts})


def adding_case(shape: str, number: str, constants: Mapping[str, Any]) -> Case:
    """`add_parts` for results in `number` ("*bf16")."""
    signature = {"partial": "*fp32", "bias": number, "y": number, "rows": "i32"}
    return Case(f"add_parts-{shape}", add_parts, signature, constants, ADDING, decode=True)
