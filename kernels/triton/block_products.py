"""Products with block weights: one launch for each run of outputs in one format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.blocks import BlockMatrix
from kernels.ops import Activations
from kernels.triton.block_kernels import expand_panels, multiply_blocks, round_operands
from kernels.triton.block_layout import GROUP, LAYOUTS, PAIR, PANEL, Layout, PackedRun, pack
from kernels.triton.launch import TRITON_NAMES, Case, Choice, launch
from kernels.triton.part_sums import adding_case, adding_constants, finish
from kernels.triton.plain_products import linear_shapes
from kernels.triton.shapes import MODELS, STEPS
from kernels.triton.tiles import Split, Tile, split

_FLOAT = (
    Tile(16, 64, 16, True, Choice(warps=4, stages=4)),
    Tile(32, 64, 32, True, Choice(warps=4, stages=4)),
    Tile(64, 64, 256, True, Choice(warps=4, stages=2)),
    Tile(128, 128, 1 << 31, False, Choice(warps=8, stages=3)),
)
_FLOAT_32 = (
    Tile(16, 64, 16, True, Choice(warps=4, stages=2)),
    Tile(64, 64, 1 << 31, False, Choice(warps=8, stages=2)),
)
_EIGHT = (
    Tile(16, 64, 16, True, Choice(warps=4, stages=3)),
    Tile(32, 64, 32, True, Choice(warps=4, stages=3)),
    Tile(64, 64, 256, True, Choice(warps=8, stages=3)),
    Tile(64, 64, 1 << 31, False, Choice(warps=8, stages=2)),
)
_EXPANDING = Choice(warps=4, stages=1)
_ROUNDING = Choice({"SPAN": 16}, warps=4, stages=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """What the kernels take for x. `scales` and `spreads` are of 8-bit codes, else anything."""

    x: Tensor
    scales: Tensor
    spreads: Tensor


class BlockProduct:
    """`kernels.triton.tiles.Product` with a copy of the blocks in the kernels' layout."""

    def __init__(
        self, weight: BlockMatrix, bias: Tensor | None, dtype: torch.dtype, activations: Activations
    ) -> None:
        self.out, self.width = weight.shape
        self.bias = bias
        self.dtype = dtype
        self._eight = activations == "int8"
        self.runs = pack(weight)
        self.device = self.runs[0].codes.device
        self.tiles = tiles_of(dtype, self._eight)
        formats = tuple((run.name, run.out) for run in self.runs)
        self.shape: tuple[object, ...] = (
            "blocks",
            dtype,
            self._eight,
            self.width,
            bias is not None,
            *formats,
        )

    def dense(self) -> Tensor:
        out = torch.empty((self.out, self.width), dtype=self.dtype, device=self.device)
        for run in self.runs:
            _expand(run, 0, out[run.first : run.first + run.out])
        return out

    def rows_of_weight(self, outs: Sequence[int]) -> Tensor:
        found = []
        for out in outs:
            run = next(run for run in self.runs if out < run.first + run.out)
            panel, row = divmod(out - run.first, PANEL)
            numbers = torch.empty((PANEL, self.width), dtype=self.dtype, device=self.device)
            _expand(run, panel, numbers)
            found.append(numbers[row])
        return torch.stack(found)

    def multiply(self, x: Tensor, y: Tensor, tile: Tile) -> None:
        operands = rounded(x) if self._eight else _Operands(x, x, x)
        for run in self.runs:
            self._multiply_run(operands, y, run, tile)

    def _multiply_run(self, operands: _Operands, y: Tensor, run: PackedRun, tile: Tile) -> None:
        rows, plan = y.shape[0], split_of(run.out, run.pairs, self._eight)
        apart = tile.apart and plan.parts > 1
        shape = (plan.parts, rows, run.out)
        target = torch.empty(shape, dtype=torch.float32, device=y.device) if apart else y
        launch(
            multiply_blocks,
            (-(-rows // tile.rows), -(-run.out // tile.outs), plan.parts if apart else 1),
            operands.x,
            operands.scales,
            operands.spreads,
            run.codes,
            run.words,
            run.heads,
            y if self.bias is None else self.bias,
            target,
            rows,
            choice=choice_of(tile, run.layout, self.dtype, self._eight),
            OUT=run.out,
            FIRST=run.first,
            TOTAL=self.out,
            BIAS=self.bias is not None,
            **_constants(self.width, run.pairs, plan, tile, self._eight),
            **format_constants(run.layout),
        )
        if apart:
            finish(target, self.bias, y, run.first)


def tiles_of(dtype: torch.dtype, eight: bool) -> tuple[Tile, ...]:
    if eight:
        return _EIGHT
    return _FLOAT_32 if dtype == torch.float32 else _FLOAT


def choice_of(tile: Tile, layout: Layout, dtype: torch.dtype, eight: bool) -> Choice:
    """The tile's, but for 8-bit codes with bfloat16 operands in 64 rows: four warps spill on sm_80."""
    if layout.wide and tile.rows == 64 and dtype == torch.bfloat16 and not eight:
        return replace(tile.choice, warps=8)
    return tile.choice


def rounded(x: Tensor) -> _Operands:
    """`x [rows, width]` in 8 bits, filled up with zeros to whole pairs."""
    rows, width = x.shape
    groups = -(-width // PAIR) * (PAIR // GROUP)
    codes = torch.empty((rows, groups * GROUP), dtype=torch.float16, device=x.device)
    scales, spreads = (torch.empty((groups, rows), dtype=torch.float32, device=x.device) for _ in range(2))
    grid = (rows, -(-groups // _ROUNDING.tiles["SPAN"]))
    constants = {"WIDTH": width, "GROUPS": groups}
    launch(round_operands, grid, x, codes, scales, spreads, rows, choice=_ROUNDING, **constants)
    return _Operands(codes, scales, spreads)


def split_of(out: int, pairs: int, eight: bool) -> Split:
    """Steps of the inner loop are two pairs, where the width has whole ones; with 8-bit operands one: what
    more groups need would not fit into registers."""
    step = 1 if eight or pairs % 2 else 2
    return split(out, pairs, step, PANEL)


def _expand(run: PackedRun, panel: int, out: Tensor) -> None:
    """The numbers of `run` from a panel on, as many rows as `out` has, in its dtype."""
    launch(
        expand_panels,
        (run.pairs, -(-out.shape[0] // PANEL)),
        run.codes[panel:],
        run.words[panel:],
        run.heads[panel:],
        out,
        out.shape[0],
        choice=_EXPANDING,
        WIDTH=out.shape[1],
        PAIRS=run.pairs,
        **format_constants(run.layout),
    )


def format_constants(layout: Layout) -> dict[str, Any]:
    return {
        "WORDS": layout.words,
        "WIDE": layout.wide,
        "MORE": layout.more,
        "HEADS": layout.heads,
        "OFFSETS": layout.offsets,
        "CENTRE": layout.centre,
    }


def _constants(width: int, pairs: int, plan: Split, tile: Tile, eight: bool) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "PAIRS": pairs,
        "STEP": plan.step,
        "STEPS": plan.steps,
        "PARTS": plan.parts,
        "APART": tile.apart and plan.parts > 1,
        "ROWS": tile.rows,
        "OUTS": tile.outs,
        "EIGHT": eight,
    }


def cases() -> Iterator[Case]:
    """Every format: all products of one model in the commonest ones, one product in the others."""
    llama, smallest = MODELS[0], MODELS[-1]
    for dtype in STEPS:
        for eight in (False, True):
            for out, width, _ in linear_shapes(llama):
                for name in ("Q4_K", "Q6_K"):
                    yield from _cases(name, out, width, dtype, eight)
            for name in LAYOUTS:
                if name not in ("Q4_K", "Q6_K"):
                    yield from _cases(name, llama.hidden, llama.hidden, dtype, eight)
            for name in ("Q4_1", "Q8_0"):  # a width that is no multiple of 256
                yield from _cases(name, 2 * smallest.inner, smallest.hidden, dtype, eight)
        for name in LAYOUTS:
            yield _expanding_case(name, llama.hidden, dtype)
        yield _rounding_case(llama.hidden, dtype)
        yield _rounding_case(llama.inner, dtype)


def _cases(name: str, out: int, width: int, dtype: torch.dtype, eight: bool) -> Iterator[Case]:
    number, layout, pairs = TRITON_NAMES[dtype], LAYOUTS[name], -(-width // PAIR)
    plan = split_of(out, pairs, eight)
    shape = f"{name}-{out}x{width}{'-int8' if eight else ''}"
    fixed = {"OUT": out, "FIRST": 0, "TOTAL": out, "BIAS": False} | format_constants(layout)
    for tile in tiles_of(dtype, eight):
        constants = fixed | _constants(width, pairs, plan, tile, eight)
        signature = {
            "x": "*fp16" if eight else f"*{number}",
            "scales": "*fp32" if eight else f"*{number}",
            "spreads": "*fp32" if eight else f"*{number}",
            "codes": "*u8",
            "words": "*i32",
            "heads": "*i32",
            "bias": f"*{number}",
            "y": "*fp32" if constants["APART"] else f"*{number}",
            "rows": "i32",
        }
        label = f"product-{number}-{shape}-{tile.name}"
        choice = choice_of(tile, layout, dtype, eight)
        yield Case(label, multiply_blocks, signature, constants, choice, decode=tile.apart)
    if plan.parts > 1:
        yield adding_case(shape, number, adding_constants(out, 0, out, False, plan.parts))


def _expanding_case(name: str, width: int, dtype: torch.dtype) -> Case:
    number = TRITON_NAMES[dtype]
    signature = {"codes": "*u8", "words": "*i32", "heads": "*i32", "out": f"*{number}", "outs": "i32"}
    constants = {"WIDTH": width, "PAIRS": width // PAIR} | format_constants(LAYOUTS[name])
    label = f"expand-{number}-{name}-{width}"
    return Case(label, expand_panels, signature, constants, _EXPANDING, decode=False)


def _rounding_case(width: int, dtype: torch.dtype) -> Case:
    number = TRITON_NAMES[dtype]
    signature = {"x": f"*{number}", "codes": "*fp16", "scales": "*fp32", "spreads": "*fp32", "rows": "i32"}
    constants: Mapping[str, Any] = {"WIDTH": width, "GROUPS": width // GROUP}
    return Case(f"round-{number}-{width}", round_operands, signature, constants, _ROUNDING, decode=True)
