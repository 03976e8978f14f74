"""Kernels for FP8 weights and for 4-bit codes in groups, as `kernels.narrow` has them.

Codes become numbers inside, a tile at a time, and exactly: a code of FP8, and the difference of a 4-bit code
and its zero, are numbers of every operand dtype. So what is multiplied is never rounded; scales are applied
in float32 to the sums of the inputs that share them, one run after the other, with every rounding said aloud:
whether parts of the width are programs of their own shows in no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.narrow import UNIT
from kernels.triton.launch import kernel
from kernels.triton.part_sums import store_part, store_result

_UNIT = tl.constexpr(UNIT)
_HALF = tl.constexpr(UNIT // 2)


@triton.jit
def fp8_numbers(codes, kind: tl.constexpr, HARDWARE: tl.constexpr):
    """Numbers of FP8 codes (uint8) in `kind`, exactly; without HARDWARE 1/256 of them."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(kind)
    # Sign, exponent and mantissa where float16 has them; its exponent counts from 8 less. Small numbers
    # without a leading 1 are such numbers there, too.
    wide = codes.to(tl.uint16)
    halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return halves.to(kind)


@triton.jit
def less_zero(codes, zeros, kind: tl.constexpr):
    """`codes - zeros` in `kind` for uint8 below 16, exactly and without conversions, which are slow: a code
    is put into the last bits of a large number, where one step is 1."""
    if kind == tl.float16:
        one = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        other = (zeros.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    elif kind == tl.bfloat16:
        one = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        other = (zeros.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        one = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
        other = (zeros.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return one - other


@triton.jit
def add_scaled(sums, part, scale):
    """`sums + part * scale`, rounded once; `scale [outs]`."""
    return tl.fma(part, tl.broadcast_to(scale[:, None], part.shape), sums)


@triton.jit
def _scaled_part(
    xs,
    codes,
    scales,
    part,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    HARDWARE: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """The sums of one part of the width `[OUTS, ROWS]`; pointers to each row's and output's beginning."""
    kind: tl.constexpr = xs.dtype.element_ty
    at = tl.arange(0, STEP)
    factor: tl.constexpr = 1.0 if HARDWARE else 256.0
    zero = tl.zeros((OUTS, ROWS), tl.float32)
    sums = zero
    for step in range(part * STEPS, tl.minimum((part + 1) * STEPS, (WIDTH + STEP - 1) // STEP)):
        column = step * STEP + at
        if WIDTH % STEP == 0:
            tile = tl.load(codes[:, None] + column[None, :])
            operands = tl.load(xs[None, :] + column[:, None])
        else:
            tile = tl.load(codes[:, None] + column[None, :], mask=column[None, :] < WIDTH, other=0)
            operands = tl.load(xs[None, :] + column[:, None], mask=column[:, None] < WIDTH, other=0.0)
        numbers = fp8_numbers(tile, kind, HARDWARE)
        if RUN < WIDTH:
            product = tl.dot(numbers, operands, input_precision="ieee")
            sums = add_scaled(sums, product, tl.load(scales + step * STEP // RUN) * factor)
        else:
            sums = tl.dot(numbers, operands, sums, input_precision="ieee")
    return sums if RUN < WIDTH else add_scaled(zero, sums, tl.load(scales) * factor)


@kernel("rows")
def multiply_scaled(
    x,  # [rows, WIDTH]
    codes,  # [OUT, WIDTH] uint8
    scales,  # [ceil(OUT / HEIGHT), ceil(WIDTH / RUN)] float32
    bias,  # [OUT]; anything where not BIAS
    y,  # [rows, OUT]; APART: [PARTS, rows, OUT] float32
    rows,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    HEIGHT: tl.constexpr,
    RUN: tl.constexpr,
    HARDWARE: tl.constexpr,
    STEP: tl.constexpr,  # divides RUN where that is below WIDTH
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
    mine = tl.minimum(out, OUT - 1)
    c = codes + mine.to(tl.int64) * WIDTH
    s = scales + (mine // HEIGHT) * ((WIDTH + RUN - 1) // RUN)
    if APART:
        part = tl.program_id(2)
        sums = _scaled_part(xs, c, s, part, WIDTH, RUN, HARDWARE, STEP, STEPS, ROWS, OUTS)
        store_part(y, sums, part, row, out, rows, OUT)
    else:
        sums = tl.zeros((OUTS, ROWS), tl.float32)
        for part in range(PARTS):
            sums += _scaled_part(xs, c, s, part, WIDTH, RUN, HARDWARE, STEP, STEPS, ROWS, OUTS)
        store_result(y, sums, bias, row, out, rows, OUT, 0, OUT, BIAS)


@triton.jit
def _grouped_part(
    xs,
    codes,
    scales,
    zeros,
    part,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    """The sums of one part of the width `[OUTS, ROWS]`; pointers to each row's and output's beginning.

    Halves of bytes are multiplied apart, each with the inputs that it belongs to: nothing is interleaved.
    """
    kind: tl.constexpr = xs.dtype.element_ty
    byte = tl.arange(0, STEP // 2)
    at = (byte // _HALF) * _UNIT + byte % _HALF
    nothing = tl.zeros((OUTS, ROWS), tl.float32)
    sums = nothing
    for step in range(part * STEPS, tl.minimum((part + 1) * STEPS, (WIDTH + STEP - 1) // STEP)):
        column = step * STEP + at
        place = step * (STEP // 2) + byte
        if WIDTH % STEP == 0:
            tile = tl.load(codes[:, None] + place[None, :])
            low = tl.load(xs[None, :] + column[:, None])
            high = tl.load(xs[None, :] + _HALF + column[:, None])
        else:
            tile = tl.load(codes[:, None] + place[None, :], mask=place[None, :] < WIDTH // 2, other=0)
            low = tl.load(xs[None, :] + column[:, None], mask=column[:, None] < WIDTH, other=0.0)
            high = tl.load(xs[None, :] + _HALF + column[:, None], mask=column[:, None] < WIDTH, other=0.0)
        group = (step * STEP // RUN) * OUT
        zero = tl.load(zeros + group)[:, None]
        below, above = less_zero(tile & 15, zero, kind), less_zero(tile >> 4, zero, kind)
        if RUN < WIDTH:
            product = tl.dot(below, low, input_precision="ieee")
            product = tl.dot(above, high, product, input_precision="ieee")
            sums = add_scaled(sums, product, tl.load(scales + group).to(tl.float32))
        else:
            sums = tl.dot(below, low, sums, input_precision="ieee")
            sums = tl.dot(above, high, sums, input_precision="ieee")
    return sums if RUN < WIDTH else add_scaled(nothing, sums, tl.load(scales).to(tl.float32))


@kernel("rows")
def multiply_grouped(
    x,  # [rows, WIDTH], columns as the codes are stored
    codes,  # [OUT, WIDTH / 2] uint8 in units
    scales,  # [ceil(WIDTH / RUN), OUT]
    zeros,  # [ceil(WIDTH / RUN), OUT] uint8
    bias,  # [OUT]; anything where not BIAS
    y,  # [rows, OUT]; APART: [PARTS, rows, OUT] float32
    rows,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    RUN: tl.constexpr,
    STEP: tl.constexpr,  # divides RUN where that is below WIDTH
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
    mine = tl.minimum(out, OUT - 1)
    c, s, z = codes + mine.to(tl.int64) * (WIDTH // 2), scales + mine, zeros + mine
    if APART:
        part = tl.program_id(2)
        sums = _grouped_part(xs, c, s, z, part, OUT, WIDTH, RUN, STEP, STEPS, ROWS, OUTS)
        store_part(y, sums, part, row, out, rows, OUT)
    else:
        sums = tl.zeros((OUTS, ROWS), tl.float32)
        for part in range(PARTS):
            sums += _grouped_part(xs, c, s, z, part, OUT, WIDTH, RUN, STEP, STEPS, ROWS, OUTS)
        store_result(y, sums, bias, row, out, rows, OUT, 0, OUT, BIAS)
