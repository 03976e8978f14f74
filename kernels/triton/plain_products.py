"""Products with weights that are numbers: bfloat16, float16 and float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import TRITON_NAMES, Case, Choice, kernel, launch
from kernels.triton.part_sums import adding_case, adding_constants, finish, store_part, store_result
from kernels.triton.shapes import MODELS, STEPS, ModelShape
from kernels.triton.tiles import Split, Tile, split

_STEP = {2: 64, 4: 32}  # weights of the inner loop's step, by their bytes

TILES: Mapping[int, tuple[Tile, ...]] = {
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
    bias,  # [OUT]; anything where not BIAS
    y,  # [rows, OUT]; APART: [PARTS, rows, OUT] float32
    rows,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
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
        store_result(y, sums, bias, row, out, rows, OUT, 0, OUT, BIAS)


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
    def tiles(self) -> tuple[Tile, ...]:
        return TILES[self.dtype.itemsize]

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
        "BIAS": bias,
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
    number = TRITON_NAMES[dtype]
    plan = _split(out, width, dtype)
    shape = f"{out}x{width}{'-bias' if bias else ''}"
    for tile in TILES[dtype.itemsize]:
        constants = _constants(out, width, bias, plan, tile)
        signature = {"x": f"*{number}", "weight": f"*{number}", "bias": f"*{number}", "rows": "i32"}
        signature["y"] = "*fp32" if constants["APART"] else f"*{number}"
        label = f"product-{number}-{shape}-{tile.name}"
        yield Case(label, multiply, signature, constants, tile.choice, decode=tile.apart)
    if plan.parts > 1:
        yield adding_case(shape, number, adding_constants(out, 0, out, bias, plan.parts))
