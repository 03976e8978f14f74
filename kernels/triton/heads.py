"""Between a layer's qkv product and its attention: norms of heads, RoPE, K and V into their pages.

One program does some heads of one row: all of q, of k or of v. Nothing in it hangs on other rows, so a
row's bits do not either. Heads are worked on in halves of `dim`, which RoPE turns against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import head_dim, kv_width
from kernels.triton.kv import TAIL, row_pointers, store_halves
from kernels.triton.launch import TRITON_NAMES, Case, Choice, kernel, launch
from kernels.triton.shapes import MODELS, PAGE_SIZES, STEPS, ModelShape

TILE = 8  # heads that one program does
CHOICE = Choice({"TILE": TILE}, warps=2, stages=1)


@triton.jit
def _load(x, at, columns, mask, HALF: tl.constexpr):
    """Halves of the heads that begin at `x + at`: two blocks `[heads, columns]`, 0 outside `mask`."""
    first = x + at[:, None] + columns[None, :]
    return tl.load(first, mask=mask, other=0.0), tl.load(first + HALF, mask=mask, other=0.0)


@triton.jit
def _normed(first, second, weight, eps, columns, DIM: tl.constexpr):
    """RMS norm over both halves, rounded where the reference rounds: before the weight, and after it."""
    dtype: tl.constexpr = first.dtype
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    inside = columns < DIM // 2
    by_first = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    by_second = tl.load(weight + DIM // 2 + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = ((wide_first * scale).to(dtype).to(tl.float32) * by_first).to(dtype)
    second = ((wide_second * scale).to(dtype).to(tl.float32) * by_second).to(dtype)
    return first, second


@triton.jit
def _turned(first, second, cos, sin, at, columns, HALF: tl.constexpr):
    """RoPE by row `at` of the tables `[.., HALF]`, in float32, rounded once."""
    inside = columns < HALF
    c = tl.load(cos + at * HALF + columns, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + at * HALF + columns, mask=inside, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * c - b * s).to(first.dtype), (b * c + a * s).to(first.dtype)


@triton.jit
def _write(
    kv,
    slot,
    part: tl.constexpr,
    heads,
    columns,
    first,
    second,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
):
    """One token's K (part 0) or V of some heads into its slot; nothing if that is negative."""
    place = tl.maximum(slot, 0)
    rows = row_pointers(kv, place // SLOTS, part, place % SLOTS, heads, PAGE, SLOTS, KV_HEADS, WIDTH)
    store_halves(rows, heads < tl.where(slot >= 0, KV_HEADS, 0), columns, first, second, DIM)


@kernel()
def rotate_and_write_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    kv,
    slots,
    out,
    eps: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid `(rows, tiles of q + tiles of k + tiles of v)`."""
    half: tl.constexpr = DIM // 2
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    kv_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = (columns < half)[None, :]
    x = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM)
    position = tl.maximum(tl.load(positions + row), 0)  # padding rows of a captured step have -1
    if tile < q_tiles:
        heads = tile * TILE + tl.arange(0, TILE)
        mask = (heads < HEADS)[:, None] & inside
        first, second = _load(x, heads * DIM, columns, mask, half)
        if q_norm is not None:
            first, second = _normed(first, second, q_norm, eps, columns, DIM)
        if ROTARY:
            first, second = _turned(first, second, cos, sin, position, columns, half)
        at = out + row * (HEADS * DIM) + heads[:, None] * DIM + columns[None, :]
        tl.store(at, first, mask=mask)
        tl.store(at + half, second, mask=mask)
    elif tile < q_tiles + kv_tiles:
        heads = (tile - q_tiles) * TILE + tl.arange(0, TILE)
        mask = (heads < KV_HEADS)[:, None] & inside
        first, second = _load(x, (HEADS + heads) * DIM, columns, mask, half)
        if k_norm is not None:
            first, second = _normed(first, second, k_norm, eps, columns, DIM)
        if ROTARY:
            first, second = _turned(first, second, cos, sin, position, columns, half)
        slot = tl.load(slots + row)
        _write(kv, slot, 0, heads, columns, first, second, PAGE, SLOTS, KV_HEADS, WIDTH, DIM)
    else:
        heads = (tile - q_tiles - kv_tiles) * TILE + tl.arange(0, TILE)
        mask = (heads < KV_HEADS)[:, None] & inside
        first, second = _load(x, (HEADS + KV_HEADS + heads) * DIM, columns, mask, half)
        slot = tl.load(slots + row)
        _write(kv, slot, 1, heads, columns, first, second, PAGE, SLOTS, KV_HEADS, WIDTH, DIM)


@kernel()
def rope_kernel(
    x,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid `(rows, tiles of heads)`."""
    half: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    mask = (heads < HEADS)[:, None] & (columns < half)[None, :]
    first, second = _load(x + row * (HEADS * DIM), heads * DIM, columns, mask, half)
    first, second = _turned(first, second, cos, sin, row, columns, half)
    at = out + row * (HEADS * DIM) + heads[:, None] * DIM + columns[None, :]
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)


@kernel()
def write_kv_kernel(
    k,
    v,
    kv,
    slots,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid `(rows, tiles of heads)`: K, then V."""
    half: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK)
    mask = (heads < KV_HEADS)[:, None] & (columns < half)[None, :]
    slot = tl.load(slots + row)
    begin = row * (KV_HEADS * DIM)
    first, second = _load(k + begin, heads * DIM, columns, mask, half)
    _write(kv, slot, 0, heads, columns, first, second, PAGE, SLOTS, KV_HEADS, WIDTH, DIM)
    first, second = _load(v + begin, heads * DIM, columns, mask, half)
    _write(kv, slot, 1, heads, columns, first, second, PAGE, SLOTS, KV_HEADS, WIDTH, DIM)


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotary: bool,
    kv: Tensor,
    slots: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
) -> Tensor:
    """q `[rows, heads, dim]`, normed and turned; k, likewise, and v go to their slots of `kv`.

    `qkv [rows, (heads + 2 * kv_heads) * dim]` in the step's dtype, like the norms `[dim]`; `cos, sin
    [positions, dim / 2]` float32, rows of which `positions [rows]` int64 names (negative: padding, any
    row); `slots [rows]` int64, as `Ops.write_kv` has them: negative ones write nothing.
    """
    rows = qkv.shape[0]
    out = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    launch(
        rotate_and_write_kernel,
        (rows, triton.cdiv(heads, TILE) + 2 * triton.cdiv(kv_heads, TILE)),
        qkv.contiguous(),
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        kv,
        slots,
        out,
        choice=CHOICE,
        eps=eps,
        ROTARY=rotary,
        HEADS=heads,
        **_page_sizes(kv, kv_heads, dim),
    )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Ops.rope`: `x [rows, heads, dim]`, each row by its own row of `cos, sin [rows, dim / 2]` float32."""
    rows, heads, dim = x.shape
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    launch(
        rope_kernel,
        (rows, triton.cdiv(heads, TILE)),
        x.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        out,
        choice=CHOICE,
        HEADS=heads,
        DIM=dim,
        BLOCK=_block(dim),
    )
    return out


def write_kv(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """`Ops.write_kv`: `k, v [rows, kv_heads, dim]` to `slots [rows]` int64; negative ones write nothing."""
    rows, kv_heads, dim = k.shape
    launch(
        write_kv_kernel,
        (rows, triton.cdiv(kv_heads, TILE)),
        k.contiguous(),
        v.contiguous(),
        kv,
        slots,
        choice=CHOICE,
        **_page_sizes(kv, kv_heads, dim),
    )


def _page_sizes(kv: Tensor, kv_heads: int, dim: int) -> Mapping[str, Any]:
    """What kernels must know of `kv`'s pages. Raises ValueError for pages of another form."""
    _, parts, slots, page_heads, width = kv.shape
    inner = (slots * page_heads * width, page_heads * width, width, 1)
    if parts != 2 or page_heads != kv_heads or head_dim(width, kv.dtype) != dim or kv.stride()[1:] != inner:
        raise ValueError(f"pages {tuple(kv.shape)} do not hold {kv_heads} heads of {dim} numbers")
    if kv.dtype == torch.int8 and dim % TAIL:
        raise ValueError(f"int8 pages need heads of a multiple of {TAIL} numbers, not {dim}")
    return {
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "BLOCK": _block(dim),
        "PAGE": kv.stride(0),
        "SLOTS": slots,
        "WIDTH": width,
    }


def _block(dim: int) -> int:
    """Columns of a block that holds half a head. Raises ValueError for a dimension without halves."""
    if dim % 2:
        raise ValueError(f"RoPE needs an even head dimension, not {dim}")
    return 1 << (dim // 2 - 1).bit_length()


def cases(models: Sequence[ModelShape] = MODELS) -> Iterator[Case]:
    """Every kernel for each model, step dtype, page size, and pages of the step's dtype and of int8."""
    for model in models:
        for dtype in STEPS:
            yield _rope_case(model, dtype)
            for slots in PAGE_SIZES:
                for kept in (dtype, torch.int8):
                    yield from _page_cases(model, dtype, slots, kept)


def _rope_case(model: ModelShape, dtype: torch.dtype) -> Case:
    element = f"*{TRITON_NAMES[dtype]}"
    signature = {"x": element, "cos": "*fp32", "sin": "*fp32", "out": element}
    constants = {"HEADS": model.heads, "DIM": model.dim, "BLOCK": _block(model.dim)}
    name = f"rope-{model.name}-{TRITON_NAMES[dtype]}"
    return Case(name, rope_kernel, signature, constants, CHOICE, decode=False)


def _page_cases(model: ModelShape, dtype: torch.dtype, slots: int, kept: torch.dtype) -> Iterable[Case]:
    element, pages = f"*{TRITON_NAMES[dtype]}", f"*{TRITON_NAMES[kept]}"
    width = kv_width(model.dim, kept)
    shared = {
        "KV_HEADS": model.kv_heads,
        "DIM": model.dim,
        "BLOCK": _block(model.dim),
        "PAGE": model.layers * 2 * slots * model.kv_heads * width,
        "SLOTS": slots,
        "WIDTH": width,
    }
    name = f"{model.name}-{TRITON_NAMES[dtype]}-{TRITON_NAMES[kept]}-{slots}"
    signature = {"k": element, "v": element, "kv": pages, "slots": "*i64"}
    yield Case(f"write_kv-{name}", write_kv_kernel, signature, shared, CHOICE, decode=False)
    constants = {"eps": 1e-6, "ROTARY": True, "HEADS": model.heads, **shared}
    signature = {
        "qkv": element,
        "cos": "*fp32",
        "sin": "*fp32",
        "positions": "*i64",
        "kv": pages,
        "slots": "*i64",
        "out": element,
    }
    plain = {**constants, "q_norm": None, "k_norm": None}
    yield Case(f"rotate-{name}", rotate_and_write_kernel, signature, plain, CHOICE, decode=True)
    normed = {**signature, "q_norm": element, "k_norm": element}
    yield Case(f"norm-rotate-{name}", rotate_and_write_kernel, normed, constants, CHOICE, decode=True)
