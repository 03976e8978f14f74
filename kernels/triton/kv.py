"""Device functions over KV pages of every dtype: where a token's numbers lie, storing them, loading them.

Pages are the plain ones of `kernels.ops`: `kv [pages, 2, slots, kv_heads, width]`, a view into storage
`[pages, layers, 2, slots, kv_heads, width]` whose page stride (`PAGE`, in elements) is that of all its
layers. A *row* is one token's K or V of one head: `DIM` numbers, and in int8 four bytes of scale behind
them. What rows keep is the rule of `kernels.kv_formats`, bit for bit.

Pools have more than 2^31 elements: page numbers are widened before they are multiplied.

Loading (attention): `row_pointers` for the keys of a tile, `load_rows` for their numbers (codes, in
int8) and `load_scales` for what codes are multiplied with. Keys that are not `seen` come out as 0 and
have scale 0, whatever lies there. Storing (`heads.py`): halves of rows, since RoPE turns these.
"""

from __future__ import annotations

import triton
import triton.language as tl

TAIL = 4  # bytes of a scale behind a row's codes


@triton.jit
def row_pointers(
    kv,
    page,
    part: tl.constexpr,
    offset,
    head,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Where rows begin. `page`, `offset` (slot of the page) and `head` may be blocks of one shape."""
    inside = ((part * SLOTS + offset) * KV_HEADS + head) * WIDTH
    return kv + (page.to(tl.int64) * PAGE + inside)


@triton.jit
def load_rows(rows, seen, columns, DIM: tl.constexpr, dtype: tl.constexpr):
    """`rows [n]`, `seen [n]`, `columns [width]` -> `[n, width]` in `dtype`: 0 beyond DIM and if not seen.

    Codes of int8 pages are whole numbers up to 127, exact in every dtype; `load_scales` has the rest.
    """
    mask = seen[:, None] & (columns < DIM)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0).to(dtype)


@triton.jit
def load_scales(rows, seen, DIM: tl.constexpr):
    """`rows [n]` of int8 pages -> their scales `[n]`, float32; 0 if not seen, NaN for what was not finite."""
    return tl.load((rows + DIM).to(tl.pointer_type(tl.float32)), mask=seen, other=0.0)


@triton.jit
def half_even(x):
    """Round float32 within +-2^22 to whole numbers, half to even: adding 1.5 * 2^23 leaves no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def magnitudes(x):
    """|x| in float32, infinite for all that is not finite (a maximum would pass over NaN)."""
    most = tl.abs(x.to(tl.float32))
    return tl.where(most < float("inf"), most, float("inf"))


@triton.jit
def scales_of(most):
    """Scales of rows whose greatest `magnitudes` are `most`: NaN where that is not finite."""
    scale = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)  # the smallest that is not subnormal
    return tl.where(most < float("inf"), scale, float("nan"))


@triton.jit
def codes_of(x, scale):
    """`x` over `scale` (of its shape) as codes; all 0 where the scale is 0 or NaN."""
    usable = scale > 0
    ratio = tl.div_rn(x.to(tl.float32), tl.where(usable, scale, 1.0))
    return tl.where(usable, half_even(ratio), 0.0).to(tl.int8)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """`x` as pages of a floating `dtype` keep it: NaN for what they cannot; their own dtype as it is."""
    if x.dtype == dtype:
        kept = x
    else:
        narrow = x.to(dtype)
        kept = tl.where(tl.abs(narrow.to(tl.float32)) < float("inf"), narrow, float("nan"))
    return kept


@triton.jit
def store_halves(rows, keep, columns, first, second, DIM: tl.constexpr):
    """Store `first, second [n, width]`, the halves of `rows [n]`, where `keep [n]`; scales behind codes.

    `columns [width]` counts 0 .. DIM / 2 and beyond, where both halves must be 0. Both are in the step's
    dtype, rounded: the rule begins there.
    """
    half: tl.constexpr = DIM // 2
    mask = keep[:, None] & (columns < half)[None, :]
    at = rows[:, None] + columns[None, :]
    if rows.dtype.element_ty == tl.int8:
        most = tl.max(tl.maximum(magnitudes(first), magnitudes(second)), axis=1)
        scale = scales_of(most)
        spread = tl.broadcast_to(scale[:, None], first.shape)
        tl.store(at, codes_of(first, spread), mask=mask)
        tl.store(at + half, codes_of(second, spread), mask=mask)
        tl.store((rows + DIM).to(tl.pointer_type(tl.float32)), scale, mask=keep)
    else:
        tl.store(at, narrowed(first, rows.dtype.element_ty), mask=mask)
        tl.store(at + half, narrowed(second, rows.dtype.element_ty), mask=mask)
