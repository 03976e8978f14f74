"""Kernels to compile in tests: one that is good, one that must spill, and what cannot be compiled."""

from __future__ import annotations

import triton.language as tl

from kernels.triton.launch import Case, Choice, kernel


@kernel("rows")
def scale(x, y, rows, n: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = (at < n) & (row < rows)
    wide = tl.load(x + row * n + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(wide * wide) / n
    tl.store(y + row * n + at, (wide * tl.rsqrt(total + 1e-5)).to(y.dtype.element_ty), mask=mask)


@kernel()
def hoard(x, y, BLOCK: tl.constexpr):
    """One warp holds all of a block at once: too many numbers for its registers."""
    at = tl.arange(0, BLOCK)
    held = tl.load(x + at)
    tl.debug_barrier()
    tl.store(y + at, held)


@kernel()
def greedy(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


@kernel()
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.load(x, mask=nonsense))  # noqa: F821


def cases() -> list[Case]:
    tiles = {"BLOCK": 1024}
    pointers = {"x": "*bf16", "y": "*bf16"}
    return [
        Case("scale-bf16", scale, {**pointers, "rows": "i32"}, {"n": 576}, Choice(tiles, 4, 2), True),
        Case("hoard-fp32", hoard, {"x": "*fp32", "y": "*fp32"}, {}, Choice({"BLOCK": 16384}, 1), True),
        Case("greedy", greedy, {"x": "*fp32", "n": "i32"}, {}, Choice({"BLOCK": 16}), False),
        Case("wrong", wrong, {"x": "*fp32"}, {}, Choice({"BLOCK": 16}), False),
        Case("unnamed", scale, pointers, {"n": 576}, Choice(tiles), False),
    ]
