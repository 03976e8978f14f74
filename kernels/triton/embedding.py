"""Looking tokens up in an embedding, numbers or blocks, without a word from the host in between.

Blocks are read as a file has them: a step needs few rows, and these are spread out. A program decodes one
row's 256 neighbours, whatever their format; in which run of rows a token lies, the kernel finds by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import FORMATS, BlockFormat, BlockMatrix, Matrix
from kernels.narrow import expand_narrow_rows
from kernels.triton.launch import ALIGNMENT, TRITON_NAMES, Case, Choice, kernel, launch
from kernels.triton.shapes import MODELS, STEPS
from kernels.triton.tiles import aligned

_SPAN = 256  # weights of a program: a block of K formats, eight of the others
_CHOICE = Choice({"SPAN": _SPAN}, warps=1, stages=1)


@kernel()
def look_up_numbers(
    tokens,  # [rows] int64
    table,  # [.., WIDTH]
    out,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = column < WIDTH
    numbers = tl.load(table + tl.load(tokens + row) * WIDTH + column, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + column, numbers.to(out.dtype.element_ty), mask=mask)


@kernel()
def look_up_blocks(
    tokens,  # [rows] int64
    data,  # [COUNT, bytes of a row] uint8, a row every STRIDE bytes
    out,  # [rows, WIDTH]
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    STRIDE: tl.constexpr,  # from row to row
    WIDTH: tl.constexpr,
    NAME: tl.constexpr,
    WEIGHTS: tl.constexpr,  # of a block
    NBYTES: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Rows of tokens FIRST .. FIRST + COUNT - 1; those of others are left alone."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row) - FIRST
    if (token >= 0) & (token < COUNT):
        column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        mask = column < WIDTH
        block = data + token * STRIDE + (column // WEIGHTS) * NBYTES
        numbers = decoded(block, column % WEIGHTS, mask, NAME)
        tl.store(out + row * WIDTH + column, numbers.to(out.dtype.element_ty), mask=mask)


@triton.jit
def decoded(block, weight, mask, NAME: tl.constexpr):
    """Number `weight` of each block, float32: the order of operations is that of `kernels.blocks`."""
    if NAME == "Q8_0":
        code = byte(block + 2 + weight, mask).to(tl.int8, bitcast=True).to(tl.float32)
        numbers = half(block, mask) * code
    elif NAME == "Q6_K":
        numbers = _decoded_6_k(block, weight, mask)
    elif (NAME == "Q4_K") | (NAME == "Q5_K"):
        numbers = _decoded_k(block, weight, mask, NAME == "Q5_K")
    else:
        offset: tl.constexpr = (NAME == "Q4_1") | (NAME == "Q5_1")
        fifth: tl.constexpr = (NAME == "Q5_0") | (NAME == "Q5_1")
        numbers = _decoded_32(block, weight, mask, offset, fifth)
    return numbers


@triton.jit
def byte(at, mask):
    return tl.load(at, mask=mask, other=0)


@triton.jit
def half(at, mask):
    """The float16 at an even or odd byte."""
    bits = byte(at, mask).to(tl.uint16) | (byte(at + 1, mask).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _decoded_32(block, weight, mask, OFFSET: tl.constexpr, FIFTH: tl.constexpr):
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, offset, 32 fifth bits, 16 bytes (low halves first)."""
    head: tl.constexpr = 4 if OFFSET else 2
    start: tl.constexpr = head + 4 if FIFTH else head
    code = (byte(block + start + weight % 16, mask).to(tl.int32) >> (weight // 16 * 4)) & 15
    if FIFTH:
        code |= ((byte(block + head + weight // 8, mask).to(tl.int32) >> (weight % 8)) & 1) << 4
    scale = half(block, mask)
    if OFFSET:
        numbers = scale * code.to(tl.float32) + half(block + 2, mask)
    elif FIFTH:
        numbers = scale * (code - 16).to(tl.float32)
    else:
        numbers = scale * (code - 8).to(tl.float32)
    return numbers


@triton.jit
def _decoded_k(block, weight, mask, FIFTH: tl.constexpr):
    """Q4_K, Q5_K: two float16, 12 bytes of scales and minima of 8 groups, 32 of fifth bits, 128 of codes."""
    start: tl.constexpr = 48 if FIFTH else 16
    group = weight // 32
    code = (byte(block + start + weight // 64 * 32 + weight % 32, mask).to(tl.int32) >> (group % 2 * 4)) & 15
    if FIFTH:
        code |= ((byte(block + 16 + weight % 32, mask).to(tl.int32) >> group) & 1) << 4
    low = byte(block + 4 + group % 4, mask).to(tl.int32)
    high = byte(block + 8 + group % 4, mask).to(tl.int32)
    both = byte(block + 12 + group % 4, mask).to(tl.int32)
    later = group >= 4
    scale = tl.where(later, (both & 15) | (low >> 6 << 4), low & 63).to(tl.float32)
    minimum = tl.where(later, (both >> 4) | (high >> 6 << 4), high & 63).to(tl.float32)
    return half(block, mask) * scale * code.to(tl.float32) - half(block + 2, mask) * minimum


@triton.jit
def _decoded_6_k(block, weight, mask):
    """128 bytes of low halves, 64 of two further bits, 16 scales, a float16; two halves of 128 weights."""
    side, inside = weight // 128, weight % 128
    low = byte(block + side * 64 + inside % 64, mask).to(tl.int32) >> (inside // 64 * 4)
    high = byte(block + 128 + side * 32 + inside % 32, mask).to(tl.int32) >> (inside // 32 * 2)
    code = ((low & 15) | ((high & 3) << 4)) - 32
    scale = byte(block + 192 + weight // 16, mask).to(tl.int8, bitcast=True).to(tl.float32)
    return half(block + 208, mask) * scale * code.to(tl.float32)


def embed(matrix: Matrix, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """`kernels.blocks.expand_rows(matrix, tokens, dtype)` for `tokens [rows]` int64 on the matrix's device.

    Nothing waits for the device, so it can be captured in a graph. Tokens must be rows of the matrix.
    """
    width = matrix.shape[1]
    out = torch.empty((tokens.shape[0], width), dtype=dtype, device=tokens.device)
    grid = (tokens.shape[0], -(-width // _SPAN))
    if isinstance(matrix, Tensor):
        launch(look_up_numbers, grid, tokens, aligned(matrix), out, choice=_CHOICE, WIDTH=width)
        return out
    if not isinstance(matrix, BlockMatrix):
        return expand_narrow_rows(matrix, tokens, dtype)  # torch's own operations, which do not wait either
    first = 0
    for run in matrix.runs:
        data = run.data if run.data.data_ptr() % ALIGNMENT == 0 else run.data.clone()
        constants = _constants(run.format, first, data.shape[0], data.stride(0), width)
        launch(look_up_blocks, grid, tokens, data, out, choice=_CHOICE, **constants)
        first += run.data.shape[0]
    return out


def _constants(form: BlockFormat, first: int, count: int, stride: int, width: int) -> dict[str, Any]:
    return {
        "FIRST": first,
        "COUNT": count,
        "STRIDE": stride,
        "WIDTH": width,
        "NAME": form.name,
        "WEIGHTS": form.weights,
        "NBYTES": form.nbytes,
    }


def cases() -> Iterator[Case]:
    """Numbers for each model, and every format for those whose width it can have."""
    for model in MODELS:
        for dtype in STEPS:
            number, width = TRITON_NAMES[dtype], model.hidden
            out = {"tokens": "*i64", "out": f"*{number}"}
            label = f"embed-{number}-{model.name}"
            plain = out | {"table": f"*{number}"}
            yield Case(label, look_up_numbers, plain, {"WIDTH": width}, _CHOICE, decode=True)
            for form in FORMATS.values():
                if width % form.weights == 0:
                    constants = _constants(form, 0, model.vocab, form.row_bytes(width), width)
                    signature = out | {"data": "*u8"}
                    yield Case(
                        f"{label}-{form.name}", look_up_blocks, signature, constants, _CHOICE, decode=True
                    )
