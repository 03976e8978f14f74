"""Paged causal attention for decode rows and chunks of prompts alike: one kernel, and one that merges.

Keys are cut into tiles of `TILE` at absolute positions, tiles into segments of `SEGMENT` keys. Within a
segment the maximum, sum and output of a query follow each other tile by tile; each segment starts from
nothing, and segments are merged in their order. Work comes as *items* (`attention_plan.py`): up to
`BLOCK_M` queries (tokens x query heads of a KV head) against consecutive segments of one page table.
An item of one segment leaves its part (maximum, sum, output in float32) for `merge_kernel`; an item that has
all segments of its tokens merges in registers, by the same instructions, and writes the result.

Why a token's bits are its own: every item is computed by the same compiled kernel, whatever it holds and
however many there are, so tiles have one shape and products one order of summation. A row of a tile
product depends on that row alone. A tile or segment in which a query sees nothing adds exact zeros and
scales by exactly one (so a -0.0 could become 0.0: results end with `+ 0.0`). Which tokens share
an item, and whether segments are merged here or there, is therefore free.

Keys that no query of an item may see are not loaded; scores of those that one query may not see are
-inf before anything is made of them, and their weights exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.ops import AttentionShape, kv_width
from kernels.triton.kv import load_rows, load_scales, row_pointers
from kernels.triton.launch import TRITON_NAMES, Case, Choice, kernel
from kernels.triton.shapes import MODELS, PAGE_SIZES, STEPS, ModelShape

_LOG2_E = 1.4426950408889634
MERGE_CHOICE = Choice({"BLOCK_HEADS": 8})

# Stands for minus infinity where a difference of two of them is taken.
_FLOOR = tl.constexpr(-1e30)

# The plan: one int32 tensor (`attention_plan.py` writes it, with the same numbers).
_HEADER = tl.constexpr(8)  # number of items; where items, entries, merges, tables begin; columns of a table
_ITEM = tl.constexpr(8)  # first entry, entries, table, first and end segment, first and end key, nothing
_ENTRY = tl.constexpr(4)  # a query token: row of the step, position, partial (-1: none), nothing
_PARTS = tl.constexpr(2)  # of a row: first partial, their number


@triton.jit
def _merge_in(top, sum, out, total_top, total_sum, total_out):
    """Add a segment's maximum, sum `[n]` and output `[n, dim]` to those of the segments before it.

    Fused by name: a product and a sum may be fused in two ways.
    """
    new_top = tl.maximum(total_top, top)
    fade = tl.exp2(total_top - new_top)
    scale = tl.exp2(top - new_top)
    total_sum = tl.fma(sum, scale, total_sum * fade)
    wide = tl.broadcast_to(scale[:, None], out.shape)
    total_out = tl.fma(out, wide, total_out * fade[:, None])
    return new_top, total_sum, total_out


@triton.jit
def _normalised(sum, out):
    return out * tl.div_rn(tl.full(sum.shape, 1.0, tl.float32), sum)[:, None] + 0.0


@triton.jit
def _keys_of(
    kv,
    plan,
    table,
    tile,
    low,
    high,
    head,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the K of each of a tile's keys begins, which keys these are, and whether a query may see them:
    those of `low .. high - 1`. `table` is the place of their page table in the plan."""
    key = tile * TILE + tl.arange(0, TILE)
    seen = (key >= low) & (key < high)
    if SLOTS % TILE == 0:  # a tile lies in one page
        page = tl.load(plan + table + tile * TILE // SLOTS)
        offset = tile * TILE % SLOTS + tl.arange(0, TILE)
    else:
        page = tl.load(plan + table + key // SLOTS, mask=seen, other=0)
        offset = key % SLOTS
    return row_pointers(kv, page, 0, offset, head, PAGE, SLOTS, KV_HEADS, WIDTH), key, seen


@triton.jit
def _add_tile(
    queries,
    rows,
    seen,
    visible,
    dims,
    top,
    sum,
    out,
    SCALE: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Add a tile to a segment's maximum, sum and output. V lies `VALUES` numbers behind K (`rows`)."""
    keys = load_rows(rows, seen, dims, DIM, queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
    if SCALED:
        scores *= load_scales(rows, seen, DIM)[None, :]
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    fade = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    sum = tl.fma(sum, fade, tl.sum(weights, axis=1))
    rows += VALUES
    if SCALED:
        weights = tl.where(visible, weights * load_scales(rows, seen, DIM)[None, :], 0.0)
    values = load_rows(rows, seen, dims, DIM, queries.dtype)
    out = tl.dot(weights.to(queries.dtype), values, out * fade[:, None], input_precision="ieee")
    return new_top, sum, out


@kernel()
def attend_kernel(
    q,
    kv,
    plan,
    out,
    parts,
    marks,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """`q [rows, HEADS, DIM]`, `kv` pages of `PAGE` elements, `plan` int32, `out [rows, HEADS, DIM]`, `parts
    [partials, HEADS, DIM]` and `marks [partials, HEADS, 2]` (maximum, sum) float32.

    Grid: KV heads, then as many programs as are wanted, which take items in turn. `SCALE` is that of
    scores, in powers of two. `WIDE`: DIM up to a power of two. `WINDOW` 0: none. `SCALED`: int8 pages.
    `EXACT`: products in float32.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    operand: tl.constexpr = tl.float32 if EXACT else q.dtype.element_ty
    kv_head = tl.program_id(0)
    items_at = tl.load(plan + 1)
    entries_at = tl.load(plan + 2)
    tables_at = tl.load(plan + 4)
    columns = tl.load(plan + 5)
    lane = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, WIDE)
    for number in range(tl.program_id(1), tl.load(plan), tl.num_programs(1)):
        item = plan + items_at + number * _ITEM
        count = tl.load(item + 1)
        table = tables_at + tl.load(item + 2) * columns
        low = tl.load(item + 5)
        high = tl.load(item + 6)

        entry = plan + entries_at + (tl.load(item) + lane // group) * _ENTRY
        used = (lane // group < count) & (lane < BLOCK_M // group * group)
        head = kv_head * group + lane % group
        row = tl.load(entry, mask=used, other=0).to(tl.int64)
        position = tl.load(entry + 1, mask=used, other=-1)
        partial = tl.load(entry + 2, mask=used, other=-1).to(tl.int64)
        inside = used[:, None] & (dims < DIM)[None, :]
        places = ((row * HEADS + head) * DIM)[:, None] + dims[None, :]
        queries = tl.load(q + places, mask=inside, other=0.0).to(operand)

        total_top = tl.full([BLOCK_M], _FLOOR, tl.float32)
        total_sum = tl.zeros([BLOCK_M], tl.float32)
        total_out = tl.zeros([BLOCK_M, WIDE], tl.float32)
        for segment in range(tl.load(item + 3), tl.load(item + 4)):
            first = tl.maximum(segment * SEGMENT, low) // TILE
            end = tl.cdiv(tl.minimum((segment + 1) * SEGMENT, high), TILE)
            top = tl.full([BLOCK_M], _FLOOR, tl.float32)
            sum = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
            for tile in range(first, end):
                rows, key, seen = _keys_of(
                    kv, plan, table, tile, low, high, kv_head, PAGE, SLOTS, KV_HEADS, WIDTH, TILE
                )
                visible = key[None, :] <= position[:, None]
                if WINDOW > 0:
                    visible &= key[None, :] > position[:, None] - WINDOW
                top, sum, acc = _add_tile(
                    queries,
                    rows,
                    seen,
                    visible,
                    dims,
                    top,
                    sum,
                    acc,
                    SCALE,
                    DIM,
                    SLOTS * KV_HEADS * WIDTH,
                    SCALED,
                )
            total_top, total_sum, total_out = _merge_in(top, sum, acc, total_top, total_sum, total_out)

        left = partial >= 0
        # Rows without a result: 1, since there is nothing to divide by.
        result = _normalised(tl.where((position < 0) | left, 1.0, total_sum), total_out).to(
            out.dtype.element_ty
        )
        tl.store(out + places, result, mask=inside & ~left[:, None])
        partial = partial * HEADS + head
        tl.store(marks + partial * 2, total_top, mask=left)
        tl.store(marks + partial * 2 + 1, total_sum, mask=left)
        tl.store(parts + partial[:, None] * DIM + dims[None, :], total_out, mask=inside & left[:, None])


@kernel()
def merge_kernel(
    plan,
    out,
    parts,
    marks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Merge each row's parts in their order. Grid: rows, then blocks of heads. Rows without parts stay."""
    row = tl.program_id(0).to(tl.int64)
    mine = plan + tl.load(plan + 3) + row * _PARTS
    first = tl.load(mine).to(tl.int64)
    count = tl.load(mine + 1)
    if count > 0:
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        dims = tl.arange(0, WIDE)
        used = head < HEADS
        inside = used[:, None] & (dims < DIM)[None, :]
        top = tl.full([BLOCK_HEADS], _FLOOR, tl.float32)
        sum = tl.zeros([BLOCK_HEADS], tl.float32)
        acc = tl.zeros([BLOCK_HEADS, WIDE], tl.float32)
        for number in range(0, count):
            at = (first + number) * HEADS + head
            part = tl.load(parts + at[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
            part_top = tl.load(marks + at * 2, mask=used, other=0.0)
            part_sum = tl.load(marks + at * 2 + 1, mask=used, other=0.0)
            top, sum, acc = _merge_in(part_top, part_sum, part, top, sum, acc)
        places = ((row * HEADS + head) * DIM)[:, None] + dims[None, :]
        sum = tl.where(used, sum, 1.0)
        tl.store(out + places, _normalised(sum, acc).to(out.dtype.element_ty), mask=inside)


def layout_of(shape: AttentionShape, kv_dtype: torch.dtype | None = None) -> Mapping[str, int]:
    """Tiles that the cutting depends on: they hang on the shape, and on whether pages are int8."""
    small = shape.dim > 128 or (kv_dtype == torch.int8 and _is_odd(shape))
    group = shape.heads // shape.kv_heads
    return {"BLOCK_M": max(32 if small else 64, triton.next_power_of_2(group)), "SEGMENT": 512}


def _is_odd(shape: AttentionShape) -> bool:
    """Query heads per KV head that are no power of two, and wide ones: takes more registers."""
    group = shape.heads // shape.kv_heads
    return bool(group & (group - 1)) and shape.dim > 64


def choice_for(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> Choice:
    """What `attend_kernel` is compiled with for steps in `dtype` over pages in `kv_dtype`: nothing spills."""
    exact = dtype == torch.float32 or kv_dtype not in (dtype, torch.int8)
    small = exact or shape.dim > 128 or kv_dtype == torch.int8 or _is_odd(shape)
    tiles = {**layout_of(shape, kv_dtype), "TILE": 32 if small else 64}
    return Choice(tiles, warps=8, stages=2 if exact else 3)


def constants_of(
    shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype, page: int
) -> dict[str, Any]:
    """The constants of `attend_kernel`; `page`: elements from one page to the next."""
    return {
        "SCALE": shape.dim**-0.5 * _LOG2_E,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.dim,
        "WIDE": triton.next_power_of_2(shape.dim),
        "PAGE": page,
        "SLOTS": shape.slots,
        "WIDTH": kv_width(shape.dim, kv_dtype),
        "WINDOW": shape.window or 0,
        "SCALED": kv_dtype == torch.int8,
        "EXACT": kv_dtype not in (dtype, torch.int8),
    }


def merge_constants(shape: AttentionShape) -> dict[str, int]:
    """The constants of `merge_kernel`."""
    return {"HEADS": shape.heads, "DIM": shape.dim, "WIDE": triton.next_power_of_2(shape.dim)}


def cases(models: Sequence[ModelShape] = MODELS) -> Iterator[Case]:
    """Each model's attention over pages of both sizes; int8 pages and a window over the smaller ones."""
    for model in models:
        for dtype in STEPS:
            for slots in PAGE_SIZES:
                yield _case(model, dtype, dtype, slots, None)
            name = f"attention_merge-{model.name}-{TRITON_NAMES[dtype]}"
            signature = {"plan": "*i32", "out": f"*{TRITON_NAMES[dtype]}", "parts": "*fp32", "marks": "*fp32"}
            shape = AttentionShape(model.heads, model.kv_heads, model.dim, PAGE_SIZES[0])
            yield Case(name, merge_kernel, signature, merge_constants(shape), MERGE_CHOICE, decode=True)
        yield _case(model, torch.bfloat16, torch.int8, PAGE_SIZES[0], None)
        yield _case(model, torch.bfloat16, torch.bfloat16, PAGE_SIZES[0], 4096)


def _case(
    model: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype, slots: int, window: int | None
) -> Case:
    shape = AttentionShape(model.heads, model.kv_heads, model.dim, slots, window)
    step, pages = TRITON_NAMES[dtype], TRITON_NAMES[kv_dtype]
    signature = {"q": f"*{step}", "kv": f"*{pages}", "plan": "*i32", "out": f"*{step}"}
    signature |= {"parts": "*fp32", "marks": "*fp32"}
    page = model.layers * 2 * slots * model.kv_heads * kv_width(model.dim, kv_dtype)
    name = f"attention-{model.name}-{step}-{pages}-{slots}" + ("" if window is None else "-window")
    constants = constants_of(shape, dtype, kv_dtype, page)
    return Case(name, attend_kernel, signature, constants, choice_for(shape, dtype, kv_dtype), decode=True)
