"""Products with FP8 weights and with 4-bit codes in groups (`kernels.narrow`), which stay as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.narrow import (
    GroupedMatrix,
    NarrowMatrix,
    ScaledMatrix,
    expand_narrow,
    expand_narrow_rows,
)
from kernels.triton.launch import TRITON_NAMES, Case, Choice, launch
from kernels.triton.narrow import multiply_grouped, multiply_scaled
from kernels.triton.part_sums import adding_case, adding_constants, finish
from kernels.triton.plain_products import linear_shapes
from kernels.triton.shapes import MODELS, STEPS
from kernels.triton.tiles import Split, Tile, TiledLinear, alike, split

_LARGER = (
    Tile(32, 64, 32, True, Choice(warps=4, stages=3)),
    Tile(64, 64, 256, True, Choice(warps=4, stages=3)),
    Tile(128, 64, 1 << 31, False, Choice(warps=8, stages=2)),
)
_FP8 = (Tile(16, 64, 16, True, Choice(warps=8, stages=4)), *_LARGER)
_FOUR = (Tile(16, 64, 16, True, Choice(warps=4, stages=4)), *_LARGER)
_FLOAT_32 = (
    Tile(16, 64, 16, True, Choice(warps=4, stages=2)),
    Tile(64, 64, 1 << 31, False, Choice(warps=8, stages=2)),
)
_OUTS = 64  # of every tile
_MOST_STEP = {2: 128, 4: 64}  # inputs of the inner loop's step, by bytes of an operand
_FP8_IN_HARDWARE = 89  # compute capability, as two digits, from which FP8 is a type of the machine


class NarrowProduct:
    """`kernels.triton.tiles.Product` with such a weight; keeps the weight as it is.

    Act-order: rows' columns are put into the order of the codes first, in a launch of its own; within the
    kernel every program would gather them again, two bytes at a time.
    """

    def __init__(self, weight: NarrowMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.out, self.width = weight.shape
        self.bias = bias
        self.dtype = dtype
        self.device = weight.device
        self._weight = weight
        self._run = run_of(weight)
        self.tiles = tiles_of(dtype, four=isinstance(weight, GroupedMatrix))
        self._hardware = _has_fp8(self.device)
        height = weight.height if isinstance(weight, ScaledMatrix) else 1
        self.shape: tuple[object, ...] = (
            weight.format, height, dtype, self.out, self.width, bias is not None,
        )  # fmt: skip

    def dense(self) -> Tensor:
        return expand_narrow(self._weight, self.dtype)

    def rows_of_weight(self, outs: Sequence[int]) -> Tensor:
        """Rounded to `dtype`, which the kernels do not: they apply scales to sums."""
        at = torch.tensor(outs, dtype=torch.int64, device=self.device)
        return expand_narrow_rows(self._weight, at, self.dtype)

    def multiply(self, x: Tensor, y: Tensor, tile: Tile) -> None:
        rows, weight = x.shape[0], self._weight
        plan = split_of(self.out, self.width, self._run, self.dtype)
        apart = tile.apart and plan.parts > 1
        shape = (plan.parts, rows, self.out)
        target = torch.empty(shape, dtype=torch.float32, device=x.device) if apart else y
        grid = (-(-rows // tile.rows), -(-self.out // tile.outs), plan.parts if apart else 1)
        bias = y if self.bias is None else self.bias
        constants = _constants(self.out, self.width, self._run, self.bias is not None, plan, tile)
        if isinstance(weight, ScaledMatrix):
            constants |= {"HEIGHT": weight.height, "HARDWARE": self._hardware}
            args = (x, weight.codes, weight.scales, bias, target, rows)
            launch(multiply_scaled, grid, *args, choice=tile.choice, **constants)
        else:
            x = x if weight.order is None else x.index_select(1, weight.order)
            given = (x, weight.codes, weight.scales, weight.zeros, bias, target, rows)
            launch(multiply_grouped, grid, *given, choice=tile.choice, **constants)
        if apart:
            finish(target, self.bias, y)


def prepare_narrow(weight: NarrowMatrix, bias: Tensor | None, dtype: torch.dtype) -> TiledLinear:
    """The product with `weight` for operands of `dtype`, with the tiles that are alike on its device (in the
    interpreter the smallest alone)."""
    product = NarrowProduct(weight, bias, dtype)
    return TiledLinear(product, alike(product) if product.device.type != "cpu" else product.tiles[:1])


def tiles_of(dtype: torch.dtype, *, four: bool) -> tuple[Tile, ...]:
    """For weights of `four` bits, or FP8."""
    if dtype == torch.float32:
        return _FLOAT_32
    return _FOUR if four else _FP8


def run_of(weight: NarrowMatrix) -> int:
    """The inputs that share a scale, at most all of them."""
    return min(weight.shape[1], weight.width if isinstance(weight, ScaledMatrix) else weight.group)


def step_of(width: int, run: int, dtype: torch.dtype) -> int:
    """The inputs of a step: a power of two that divides the run of inputs that share a scale."""
    most = _MOST_STEP[dtype.itemsize]
    return most if run >= width else math.gcd(run, most)


def split_of(out: int, width: int, run: int, dtype: torch.dtype) -> Split:
    return split(out, width, step_of(width, run, dtype), _OUTS)


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor >= _FP8_IN_HARDWARE


def _constants(out: int, width: int, run: int, bias: bool, plan: Split, tile: Tile) -> dict[str, Any]:
    return {
        "OUT": out,
        "WIDTH": width,
        "BIAS": bias,
        "RUN": run,
        "STEP": plan.step,
        "STEPS": plan.steps,
        "PARTS": plan.parts,
        "APART": tile.apart and plan.parts > 1,
        "ROWS": tile.rows,
        "OUTS": tile.outs,
    }


def cases(capability: int = 80) -> Iterator[Case]:
    """The products of one model in FP8 (blocks, outputs) and 4 bits (groups of 128), one of the smallest, as
    a GPU of `capability` runs them; those of 80 compile for every GPU."""
    llama, smallest = MODELS[0], MODELS[-1]
    inside = [shape for shape in linear_shapes(llama) if shape[0] != llama.vocab]
    for dtype in STEPS:
        for out, width, _ in (*inside, (2 * smallest.inner, smallest.hidden, False)):
            plain = {"HARDWARE": capability >= _FP8_IN_HARDWARE}
            yield from _cases("fp8-blocks", out, width, 128, dtype, plain | {"HEIGHT": 128})
            yield from _cases("fp8-outputs", out, width, width, dtype, plain | {"HEIGHT": 1})
            yield from _cases("int4", out, width, 128, dtype, {})


def _cases(
    name: str, out: int, width: int, run: int, dtype: torch.dtype, more: Mapping[str, Any]
) -> Iterator[Case]:
    number, plan = TRITON_NAMES[dtype], split_of(out, width, run, dtype)
    shape = f"{name}-{out}x{width}"
    for tile in tiles_of(dtype, four=not more):
        constants = _constants(out, width, run, False, plan, tile) | dict(more)
        signature = {"x": f"*{number}", "codes": "*u8", "bias": f"*{number}", "rows": "i32"}
        signature["y"] = "*fp32" if constants["APART"] else f"*{number}"
        signature |= {"scales": "*fp32"} if more else {"scales": "*fp16", "zeros": "*u8"}
        which = multiply_scaled if more else multiply_grouped
        label, decode = f"product-{number}-{shape}-{tile.name}", tile.apart
        yield Case(label, which, signature, constants, tile.choice, decode)
    if plan.parts > 1:
        yield adding_case(shape, number, adding_constants(out, 0, out, False, plan.parts))
