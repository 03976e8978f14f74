"""RMS norms of rows, and the gate of an MLP. Float32 inside, rounded where the reference rounds.

A norm takes one program for a row. Its block and warps follow from the row's width alone, so a row's sum
is taken in one order however many rows there are. Rows wider than `WIDEST` are read twice, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import TRITON_NAMES, Case, Choice, kernel, launch
from kernels.triton.shapes import MODELS, STEPS, ModelShape

WIDEST = 8192  # numbers of a row that one program holds in registers: 16 a thread
_PER_WARP = 512
_GATE_CHOICE = Choice({"BLOCK": 1024}, warps=4, stages=1)  # element by element: no bits depend on it


@triton.jit
def _normed(total, weight, scale):
    """`total`, rounded already, times `scale`, rounded, times `weight`; the caller rounds again."""
    return (total.to(tl.float32) * scale).to(total.dtype).to(tl.float32) * weight.to(tl.float32)


@kernel()
def rms_norm_kernel(x, weight, out, eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid `(rows,)`."""
    begin = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    if N <= BLOCK:
        inside = columns < N
        values = tl.load(x + begin + columns, mask=inside, other=0.0)
        gains = tl.load(weight + columns, mask=inside, other=0.0)
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / N + eps)
        tl.store(out + begin + columns, _normed(values, gains, scale), mask=inside)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            at = start + columns
            wide = tl.load(x + begin + at, mask=at < N, other=0.0).to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares) / N + eps)
        for start in range(0, N, BLOCK):
            at = start + columns
            values = tl.load(x + begin + at, mask=at < N, other=0.0)
            gains = tl.load(weight + at, mask=at < N, other=0.0)
            tl.store(out + begin + at, _normed(values, gains, scale), mask=at < N)


@kernel()
def add_rms_norm_kernel(x, residual, weight, out, eps: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid `(rows,)`. The sum, rounded, is left in `residual`; what is normed is the rounded sum."""
    begin = tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, BLOCK)
    if N <= BLOCK:
        inside = columns < N
        left = tl.load(x + begin + columns, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(residual + begin + columns, mask=inside, other=0.0)
        gains = tl.load(weight + columns, mask=inside, other=0.0)
        total = (left + right.to(tl.float32)).to(right.dtype)
        tl.store(residual + begin + columns, total, mask=inside)
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / N + eps)
        tl.store(out + begin + columns, _normed(total, gains, scale), mask=inside)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            at = start + columns
            left = tl.load(x + begin + at, mask=at < N, other=0.0).to(tl.float32)
            right = tl.load(residual + begin + at, mask=at < N, other=0.0)
            total = (left + right.to(tl.float32)).to(right.dtype)
            tl.store(residual + begin + at, total, mask=at < N)
            wide = total.to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares) / N + eps)
        tl.debug_barrier()  # sums are read by threads other than those that wrote them, perhaps
        for start in range(0, N, BLOCK):
            at = start + columns
            total = tl.load(residual + begin + at, mask=at < N, other=0.0)
            gains = tl.load(weight + at, mask=at < N, other=0.0)
            tl.store(out + begin + at, _normed(total, gains, scale), mask=at < N)


@kernel()
def silu_mul_kernel(gate_up, out, N: tl.constexpr, BLOCK: tl.constexpr):
    """Grid `(rows, blocks of a row)`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(gate_up + row * (2 * N) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * N) + N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Ops.rms_norm`: `x [..., n]`, `weight [n]` of its dtype."""
    width = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = math.prod(x.shape[:-1])
    launch(rms_norm_kernel, (rows,), x, weight, out, choice=_choice(width), eps=eps, N=width)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`Ops.add_rms_norm`: `x, residual [rows, hidden]`, contiguous. The sum is written into `residual`."""
    rows, width = x.shape
    if not (x.is_contiguous() and residual.is_contiguous()):
        raise ValueError("rows that are added must be contiguous")
    out = torch.empty_like(x)
    launch(add_rms_norm_kernel, (rows,), x, residual, weight, out, choice=_choice(width), eps=eps, N=width)
    return out, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """`Ops.silu_mul`: `[rows, 2 * n]` -> `[rows, n]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, _GATE_CHOICE.tiles["BLOCK"])
    launch(silu_mul_kernel, (rows, blocks), gate_up.contiguous(), out, choice=_GATE_CHOICE, N=width)
    return out


def _choice(width: int) -> Choice:
    """By the width of rows alone."""
    block = min(WIDEST, 1 << (width - 1).bit_length())
    return Choice({"BLOCK": block}, warps=max(1, block // _PER_WARP), stages=1)


def cases(models: Sequence[ModelShape] = MODELS) -> Iterator[Case]:
    """Norms of each model's rows and of its heads, gates of its MLP, and norms of rows read in blocks."""
    for dtype in STEPS:
        element = f"*{TRITON_NAMES[dtype]}"
        added = {"x": element, "residual": element, "weight": element, "out": element}
        normed = {"x": element, "weight": element, "out": element}
        widths = {model.hidden for model in models}
        for width in sorted({*widths, 2 * WIDEST}):
            constants, name = {"eps": 1e-6, "N": width}, f"{TRITON_NAMES[dtype]}-{width}"
            choice = _choice(width)
            yield Case(f"add_rms_norm-{name}", add_rms_norm_kernel, added, constants, choice, decode=True)
        for width in sorted({*widths, *(model.dim for model in models), 2 * WIDEST}):
            constants, name = {"eps": 1e-6, "N": width}, f"{TRITON_NAMES[dtype]}-{width}"
            yield Case(f"rms_norm-{name}", rms_norm_kernel, normed, constants, _choice(width), decode=True)
        for width in sorted({model.inner for model in models}):
            signature, name = {"gate_up": element, "out": element}, f"{TRITON_NAMES[dtype]}-{width}"
            yield Case(
                f"silu_mul-{name}", silu_mul_kernel, signature, {"N": width}, _GATE_CHOICE, decode=True
            )
