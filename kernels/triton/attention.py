"""Paged causal attention for decode rows and chunks of prompts alike: one kernel, and one that merges.

Keys are cut into tiles of `TILE` at absolute positions, tiles into segments of `SEGMENT` keys. Within a
segment the maximum, sum and output of a query follow each other tile by tile; each segment starts from
nothing, and segments are merged in their order. Work comes as *items* (`attention_plan.py`): up to
`BLOCK_M` queries (tokens x query heads of a KV head) against consecutive segments of one page table.
An item of one segment leaves its part (maximum, sum, output in float32) for `_merge`; an item that has
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

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from kernels.ops import AttentionShape
from kernels.triton.launch import Choice, kernel

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
def _rows_of(
    kv,
    plan,
    table,
    key,
    seen,
    head,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where the K of each of a tile's keys begins; `table` is the place of its page table in the plan."""
    if SLOTS % TILE == 0:  # a tile lies in one page
        first = tl.min(key)
        page = tl.load(plan + table + first // SLOTS).to(tl.int64)
        offset = first % SLOTS + tl.arange(0, TILE)
    else:
        page = tl.load(plan + table + key // SLOTS, mask=seen, other=0).to(tl.int64)
        offset = key % SLOTS
    return kv + (page * PAGE + (offset * KV_HEADS + head) * WIDTH)


@triton.jit
def _load(rows, seen, dims, DIM: tl.constexpr, operand: tl.constexpr):
    """`[keys, dims]` of pages in the dtype of the products; 0 for keys that are not seen."""
    mask = seen[:, None] & (dims < DIM)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=mask, other=0).to(operand)


@triton.jit
def _scales(rows, seen, DIM: tl.constexpr):
    """Scales `[keys]` behind int8 codes; 0 for keys that are not seen."""
    return tl.load((rows + DIM).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)


@kernel()
def _attend(
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
                key = tile * TILE + tl.arange(0, TILE)
                seen = (key >= low) & (key < high)
                rows = _rows_of(kv, plan, table, key, seen, kv_head, PAGE, SLOTS, KV_HEADS, WIDTH, TILE)
                keys = _load(rows, seen, dims, DIM, operand)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
                if SCALED:
                    scores *= _scales(rows, seen, DIM)[None, :]
                visible = key[None, :] <= position[:, None]
                if WINDOW > 0:
                    visible &= key[None, :] > position[:, None] - WINDOW
                scores = tl.where(visible, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, axis=1))
                fade = tl.exp2(top - new_top)
                weights = tl.exp2(scores - new_top[:, None])
                sum = tl.fma(sum, fade, tl.sum(weights, axis=1))
                rows += SLOTS * KV_HEADS * WIDTH
                if SCALED:
                    weights = tl.where(visible, weights * _scales(rows, seen, DIM)[None, :], 0.0)
                values = _load(rows, seen, dims, DIM, operand)
                acc = tl.dot(weights.to(operand), values, acc * fade[:, None], input_precision="ieee")
                top = new_top
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
def _merge(
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


def layout_of(shape: AttentionShape) -> Mapping[str, int]:
    """Tiles that the cutting depends on, so that they hang on the shape alone."""
    group = shape.heads // shape.kv_heads
    return {"BLOCK_M": max(64, triton.next_power_of_2(group)), "SEGMENT": 512}


def choice_for(shape: AttentionShape, dtype: torch.dtype, kv_dtype: torch.dtype) -> Choice:
    """What `_attend` is compiled with for steps in `dtype` over pages in `kv_dtype`."""
    exact = dtype == torch.float32 or kv_dtype not in (dtype, torch.int8)
    tile = 32 if exact or shape.dim > 128 else 64
    warps = 8 if exact or shape.dim > 128 else 4
    return Choice({**layout_of(shape), "TILE": tile}, warps=warps, stages=2 if exact else 3)
