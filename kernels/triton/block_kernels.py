"""Kernels for block weights as `block_layout` has them, which become numbers inside.

With activations as they are ("float"), a weight is `scale * code + offset` in float32, the value that
`kernels.blocks.expand` gives, then rounded once to the dtype of the operands: that is what is multiplied
(in float32: the value itself), and sums are float32.

With activations in 8 bits ("int8"), `round_operands` makes codes and scales of them first, and codes are
multiplied with codes, as float16: they are whole numbers up to 128, their products and the sums of a group
are exact whatever the order, and every machine has these instructions (integer ones would save nothing:
each group's sum has to be scaled, and that takes longer than the sum). Then every group's sum goes, times
both scales, into the total in float32, one group after the other: element by element, with every rounding
said aloud, so bits cannot depend on the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import kernel
from kernels.triton.part_sums import store_part, store_result

_GROUP = tl.constexpr(32)
_PANEL = tl.constexpr(64)
_PAIRS_OF_HEAD = tl.constexpr(4)
_TINY = tl.constexpr(1e-36)  # of the rule that `kernels.ops.Activations` states


@triton.jit
def half(word, index: tl.constexpr):
    """One of the two float16 of int32 words, in float32."""
    bits = (word >> (16 * index)) & 0xFFFF
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def byte(word, index: tl.constexpr):
    """One of the four signed bytes of int32 words, in float32."""
    return ((word << (24 - 8 * index)) >> 24).to(tl.float32)


@triton.jit
def group_codes(
    low,
    words,
    weight,
    GROUP_INDEX: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Codes `[outs, 32]` int32 of a group of a pair; `words` points to each output's first word."""
    if WIDE:
        codes = low.to(tl.int8, bitcast=True).to(tl.int32)
    else:
        codes = (low.to(tl.int32) >> (4 * GROUP_INDEX)) & 15
        before: tl.constexpr = 2 if OFFSETS and not HEADS else 1
        for bit in tl.static_range(MORE):
            plane = tl.load(words + (before + 2 * bit + GROUP_INDEX) * _PANEL)
            codes = codes | (((plane[:, None] >> weight[None, :]) & 1) << (4 + bit))
    return codes


@triton.jit
def scale_of(
    head, word, GROUP_INDEX: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr, OFFSETS: tl.constexpr
):
    """Scales `[outs]` of a group of a pair; in Q6_K of its first or second PART."""
    if not HEADS:
        scale = half(word, GROUP_INDEX)
    elif OFFSETS:
        scale = half(head, 0) * byte(word, GROUP_INDEX)
    else:
        scale = half(head, 0) * byte(word, 2 * GROUP_INDEX + PART)
    return scale


@triton.jit
def offset_of(head, word, words, GROUP_INDEX: tl.constexpr, HEADS: tl.constexpr):
    """Offsets `[outs]` of a group of a pair."""
    if HEADS:
        offset = -(half(head, 1) * byte(word, 2 + GROUP_INDEX))
    else:
        offset = half(tl.load(words + _PANEL), GROUP_INDEX)
    return offset


@triton.jit
def group_numbers(
    low,
    head,
    word,
    words,
    weight,
    GROUP_INDEX: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Weights `[outs, 32]` in float32 of a group of a pair: the values that `kernels.blocks.expand` gives."""
    codes = group_codes(low, words, weight, GROUP_INDEX, WIDE, MORE, HEADS, OFFSETS) - CENTRE
    scale = scale_of(head, word, GROUP_INDEX, 0, HEADS, OFFSETS)[:, None]
    if HEADS and not OFFSETS:
        other = scale_of(head, word, GROUP_INDEX, 1, HEADS, OFFSETS)[:, None]
        scale = tl.where(weight[None, :] < 16, scale, other)
    numbers = scale * codes.to(tl.float32)
    if OFFSETS:
        numbers += offset_of(head, word, words, GROUP_INDEX, HEADS)[:, None]
    return numbers


@triton.jit
def add_group(
    sums,
    operands,
    scale_x,
    spread,
    low,
    head,
    word,
    words,
    weight,
    GROUP_INDEX: tl.constexpr,
    EIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """`sums [outs, rows]` and the products of a group's weights with `operands [32, rows]`.

    EIGHT: these are codes; `scale_x [rows]` is their scale, `spread [rows]` the sum of codes times it.
    """
    if EIGHT:
        codes = group_codes(low, words, weight, GROUP_INDEX, WIDE, MORE, HEADS, OFFSETS) - CENTRE
        factor = scale_of(head, word, GROUP_INDEX, 0, HEADS, OFFSETS)[:, None] * scale_x[None, :]
        if HEADS and not OFFSETS:
            start = weight[None, :] < 16
            sums = tl.fma(tl.dot(tl.where(start, codes, 0).to(tl.float16), operands), factor, sums)
            factor = scale_of(head, word, GROUP_INDEX, 1, HEADS, OFFSETS)[:, None] * scale_x[None, :]
            sums = tl.fma(tl.dot(tl.where(start, 0, codes).to(tl.float16), operands), factor, sums)
        else:
            sums = tl.fma(tl.dot(codes.to(tl.float16), operands), factor, sums)
        if OFFSETS:
            offset = offset_of(head, word, words, GROUP_INDEX, HEADS)[:, None]
            shape: tl.constexpr = sums.shape
            sums = tl.fma(tl.broadcast_to(offset, shape), tl.broadcast_to(spread[None, :], shape), sums)
    else:
        numbers = group_numbers(
            low, head, word, words, weight, GROUP_INDEX, WIDE, MORE, HEADS, OFFSETS, CENTRE
        ).to(operands.dtype)
        sums = tl.dot(numbers, operands, sums, input_precision="ieee")
    return sums


@triton.jit
def load_operands(xs, column, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """`[columns, rows]` of the operands that `xs [rows]` point to."""
    if MASKED:
        operands = tl.load(xs[None, :] + column[:, None], mask=column[:, None] < WIDTH, other=0.0)
    else:
        operands = tl.load(xs[None, :] + column[:, None])
    return operands


@triton.jit
def load_scales(scales, spreads, index, mine, rows, EIGHT: tl.constexpr, OFFSETS: tl.constexpr):
    """Of group `index` of 8-bit operands; anything where they are not needed."""
    scale = mine
    spread = mine
    if EIGHT:
        scale = tl.load(scales + index * rows + mine)
        if OFFSETS:
            spread = tl.load(spreads + index * rows + mine)
    return scale, spread


@kernel("rows")
def multiply_blocks(
    x,  # [rows, WIDTH]; EIGHT: [rows, 64 * PAIRS] float16, codes of `round_operands`
    scales,  # [2 * PAIRS, rows] float32; anything where not EIGHT
    spreads,  # likewise
    codes,
    words,
    heads,  # as `block_layout.PackedRun` has them
    bias,  # [TOTAL]; anything where not BIAS
    y,  # [rows, TOTAL]; APART: [PARTS, rows, OUT] float32
    rows,
    OUT: tl.constexpr,
    FIRST: tl.constexpr,
    TOTAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,  # along the width
    STEP: tl.constexpr,  # pairs of a step of the inner loop, none across two heads
    STEPS: tl.constexpr,  # of each part
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    EIGHT: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Outputs FIRST .. FIRST + OUT - 1, in one format."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, OUTS)
    out = tl.program_id(1) * OUTS + at
    # Beyond the last row or panel, the last one is computed again and not stored.
    mine = tl.minimum(row, rows - 1)
    panel = tl.minimum(tl.program_id(1) * (OUTS // _PANEL) + at // _PANEL, (OUT - 1) // _PANEL).to(tl.int64)
    inner = at % _PANEL
    weight = tl.arange(0, _GROUP)
    bytes_of_pair: tl.constexpr = (2 if WIDE else 1) * _PANEL * _GROUP
    masked: tl.constexpr = not EIGHT and WIDTH != PAIRS * 2 * _GROUP
    xs = x + mine.to(tl.int64) * (PAIRS * 2 * _GROUP if EIGHT else WIDTH)
    tiles = codes + (panel * (PAIRS * bytes_of_pair) + inner * _GROUP)[:, None] + weight[None, :]
    word_at = words + panel * (PAIRS * WORDS * _PANEL) + inner
    head_at = heads + panel * (PAIRS // _PAIRS_OF_HEAD * _PANEL) + inner
    total = tl.zeros((OUTS, ROWS), tl.float32)
    part = tl.program_id(2)
    for turn in range(1 if APART else PARTS):
        first = (part + turn) * STEPS
        sums = tl.zeros((OUTS, ROWS), tl.float32)
        for step in range(first, tl.minimum(first + STEPS, PAIRS // STEP)):
            head = tl.zeros((OUTS,), tl.int32)
            if HEADS:
                head = tl.load(head_at + step * STEP // _PAIRS_OF_HEAD * _PANEL)
            for inside in tl.static_range(STEP):
                pair = step * STEP + inside
                pair_words = word_at + pair * (WORDS * _PANEL)
                word = tl.load(pair_words)
                low = tl.load(tiles + pair * bytes_of_pair)
                for group in tl.static_range(2):
                    if WIDE and group == 1:
                        low = tl.load(tiles + pair * bytes_of_pair + _PANEL * _GROUP)
                    index = 2 * pair + group
                    column = index * _GROUP + weight
                    operands = load_operands(xs, column, WIDTH, masked)
                    scale_x, spread = load_scales(scales, spreads, index, mine, rows, EIGHT, OFFSETS)
                    sums = add_group(
                        sums, operands, scale_x, spread, low, head, word, pair_words, weight,
                        group, EIGHT, WIDE, MORE, HEADS, OFFSETS, CENTRE,
                    )  # fmt: skip
        if PARTS == 1 or APART:
            total = sums
        else:
            total += sums
    if APART:
        store_part(y, total, part, row, out, rows, OUT)
    else:
        store_result(y, total, bias, row, out, rows, OUT, FIRST, TOTAL, BIAS)


@kernel("rows")
def round_operands(
    x,  # [rows, WIDTH]
    codes,  # [rows, GROUPS * 32] float16
    scales,  # [GROUPS, rows] float32
    spreads,  # [GROUPS, rows] float32: the sum of the codes, times their scale
    rows,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,  # groups of a program
):
    """The rule of `kernels.ops.Activations`; a group whose largest number is not finite has scale NaN."""
    row = tl.program_id(0)
    group = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    start = row.to(tl.int64)
    numbers = tl.load(x + start * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    magnitudes = tl.abs(numbers)
    # A maximum would pass over NaN.
    most = tl.max(tl.where(magnitudes < float("inf"), magnitudes, float("inf")), axis=1)
    usable = (most >= _TINY) & (most < float("inf"))
    top = tl.full((SPAN,), 127.0, tl.float32)
    scale = tl.where(usable, tl.div_rn(most, top), tl.where(most < _TINY, 0.0, float("nan")))
    inverse = tl.where(usable, tl.div_rn(top, tl.where(usable, most, 1.0)), 0.0)
    whole = half_even(tl.where(usable[:, None], numbers, 0.0) * inverse[:, None])
    inside = group < GROUPS
    tl.store(codes + start * (GROUPS * _GROUP) + column, whole.to(tl.float16), mask=inside[:, None])
    tl.store(scales + group * rows + row, scale, mask=inside)
    tl.store(spreads + group * rows + row, tl.sum(whole, axis=1).to(tl.float32) * scale, mask=inside)


@triton.jit
def half_even(x):
    """Float32 below 2^31 rounded to whole numbers, half to even, int32. By comparisons alone: an addition
    would be fused with the product that x is, and see it before its rounding."""
    below = tl.floor(x)
    middle = below + 0.5
    whole = below.to(tl.int32)
    return whole + ((x > middle) | ((x == middle) & ((whole & 1) == 1))).to(tl.int32)


@kernel("outs")
def expand_panels(
    codes,
    words,
    heads,  # as `block_layout.PackedRun` has them
    out,  # [outs, WIDTH]
    outs,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDE: tl.constexpr,
    MORE: tl.constexpr,
    HEADS: tl.constexpr,
    OFFSETS: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """The weights that `multiply_blocks` multiplies, written out: a panel and pair per program."""
    pair = tl.program_id(0)
    panel = tl.program_id(1).to(tl.int64)
    inner = tl.arange(0, _PANEL)
    weight = tl.arange(0, _GROUP)
    bytes_of_pair: tl.constexpr = (2 if WIDE else 1) * _PANEL * _GROUP
    tile = codes + (panel * PAIRS + pair) * bytes_of_pair + (inner * _GROUP)[:, None] + weight[None, :]
    pair_words = words + (panel * PAIRS + pair) * (WORDS * _PANEL) + inner
    head = tl.zeros((_PANEL,), tl.int32)
    if HEADS:
        head = tl.load(heads + (panel * (PAIRS // _PAIRS_OF_HEAD) + pair // _PAIRS_OF_HEAD) * _PANEL + inner)
    word = tl.load(pair_words)
    low = tl.load(tile)
    row = panel * _PANEL + inner
    for group in tl.static_range(2):
        if WIDE and group == 1:
            low = tl.load(tile + _PANEL * _GROUP)
        numbers = group_numbers(
            low, head, word, pair_words, weight, group, WIDE, MORE, HEADS, OFFSETS, CENTRE
        )
        column = (2 * pair + group) * _GROUP + weight
        mask = (row < outs)[:, None] & (column < WIDTH)[None, :]
        tl.store(out + row[:, None] * WIDTH + column[None, :], numbers.to(out.dtype.element_ty), mask=mask)
