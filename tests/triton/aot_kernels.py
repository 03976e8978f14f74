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
def hoard(x, y, w, BLOCK: tl.constexpr):
    """Keeps a product that is far too large for the registers of one warp."""
    at = tl.arange(0, BLOCK)
    square = at[:, None] * BLOCK + at[None, :]
    product = tl.dot(tl.load(x + square), tl.load(w + square))
    tl.store(y + square, product)


@kernel()
def greedy(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), n)


@kernel()
def wrong(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.load(x, mask=nonsense))  # noqa: F821


def cases() -> list[Case]:
    tiles = {"BLOCK": 1024}
    pointers = {"x": "*bf16", "y": "*bf16"}
    matrices = {"x": "*bf16", "w": "*bf16", "y": "*fp32"}
    return [
        Case("scale-bf16", scale, {**pointers, "rows": "i32"}, {"n": 576}, Choice(tiles, 4, 2), True),
        Case("hoard-bf16", hoard, matrices, {}, Choice({"BLOCK": 128}, 1, 1), True),
        Case("hoard-large", hoard, matrices, {}, Choice({"BLOCK": 512}, 8, 1), False),
        Case("greedy", greedy, {"x": "*fp32", "n": "i32"}, {}, Choice({"BLOCK": 16}), False),
        Case("wrong", wrong, {"x": "*fp32"}, {}, Choice({"BLOCK": 16}), False),
        Case("unnamed", scale, pointers, {"n": 576}, Choice(tiles), False),
    ]
