"""Products with FP8 weights and with 4-bit codes in groups (`kernels.narrow`).

Weights are turned into numbers inside the kernels, a tile at a time, and exactly: a code of FP8 and the
difference of a 4-bit code and its zero are numbers of every operand dtype. So what is multiplied is never
rounded, and scales are applied to sums in float32, one group of inputs after the other.

Bits of a row: one tile shape for all numbers of rows (`Choice`), and one walk over the inputs, from the
first to the last, by one program: nothing is split, and no row's sum knows of another. Rows beyond the last
repeat the last one and are not stored, so no tile has another shape at the edge.

Outputs are the rows of a tile, tokens its columns: tensor cores take the wide side from the weights, and the
side that the number of tokens leaves half empty stays narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.narrow import UNIT, GroupedMatrix, NarrowMatrix, ScaledMatrix
from kernels.triton.launch import ALIGNMENT, TRITON_NAMES, Case, Choice, kernel, launch

_MOST_INPUTS = 128  # of a tile
_FP8_IN_HARDWARE = 89  # compute capability, as two digits, from which FP8 is a type of the machine
_HALF_UNIT = tl.constexpr(UNIT // 2)
_WHOLE_UNIT = tl.constexpr(UNIT)


@triton.jit
def fp8_as(codes, kind: tl.constexpr, HARDWARE: tl.constexpr):
    """Numbers of FP8 codes (uint8) in `kind`, exactly; without hardware 1/256 of them, see `fp8_factor`."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(kind)
    # Sign, exponent and mantissa where float16 has them; its exponent counts from 8 less. Small numbers
    # without a leading 1 are such numbers there, too.
    wide = codes.to(tl.uint16)
    halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return halves.to(kind)


@triton.jit
def less_zero(codes, zeros, kind: tl.constexpr):
    """`codes - zeros` in `kind` for uint8 below 17, exactly and without conversions, which are slow: a code
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
def store_tile(out, bias, sums, n, r, rows, N: tl.constexpr):
    """`sums [outputs, tokens]` plus bias, rounded once, to `out [rows, N]`."""
    if bias is not None:
        sums += tl.load(bias + tl.minimum(n, N - 1)).to(tl.float32)[:, None]
    at = out + r.to(tl.int64)[:, None] * N + n[None, :]
    inside = (r < rows)[:, None] & (n < N)[None, :]
    tl.store(at, tl.trans(sums).to(out.dtype.element_ty), mask=inside)


@kernel("rows")
def scaled_product(
    x,  # [rows, K]
    codes,  # [N, K] uint8
    scales,  # [ceil(N / HEIGHT), ceil(K / WIDTH)] float32
    bias,  # [N] or None
    out,  # [rows, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HARDWARE: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """`out = x @ W.T + bias` for FP8 weights: BN outputs of BR rows. BK divides WIDTH if that is below K."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    kind = x.dtype.element_ty
    mine = tl.minimum(n, N - 1)
    w_at = codes + mine[:, None] * K + k[None, :]
    x_at = x + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * K + k[None, :]
    s_at = scales + (mine // HEIGHT) * tl.cdiv(K, WIDTH)
    sums = tl.zeros([BN, BR], dtype=tl.float32)
    for tile in range(0, K, BK):
        if K % BK:
            there = (tile + k < K)[None, :]
            w = tl.load(w_at + tile, mask=there, other=0)
            tokens = tl.load(x_at + tile, mask=there, other=0)
        else:
            w = tl.load(w_at + tile)
            tokens = tl.load(x_at + tile)
        numbers = fp8_as(w, kind, HARDWARE)
        if WIDTH < K:
            part = tl.dot(numbers, tl.trans(tokens), input_precision="ieee")
            sums += part * tl.load(s_at + tile // WIDTH)[:, None]
        else:
            sums = tl.dot(numbers, tl.trans(tokens), sums, input_precision="ieee")
    if WIDTH >= K:
        sums *= tl.load(s_at)[:, None]
    if not HARDWARE:
        sums *= 256.0
    store_tile(out, bias, sums, n, r, rows, N)


@kernel("rows")
def grouped_product(
    x,  # [rows, K], columns as the codes are
    codes,  # [N, K / 2] uint8 in units
    scales,  # [ceil(K / GROUP), N]
    zeros,  # [ceil(K / GROUP), N] uint8
    bias,  # [N] or None
    out,  # [rows, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """`out = x @ W.T + bias` for 4-bit weights: BN outputs of BR rows. BK divides GROUP if that is below K.

    Halves of bytes are multiplied apart, each with the inputs that it belongs to: nothing is interleaved.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    byte = tl.arange(0, BK // 2)
    k = (byte // _HALF_UNIT) * _WHOLE_UNIT + byte % _HALF_UNIT
    kind = x.dtype.element_ty
    mine = tl.minimum(n, N - 1)
    w_at = codes + mine[:, None] * (K // 2) + byte[None, :]
    x_at = x + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * K + k[None, :]
    sums = tl.zeros([BN, BR], dtype=tl.float32)
    for tile in range(0, K, BK):
        if K % BK:
            there = (tile + k < K)[None, :]
            w = tl.load(w_at + tile // 2, mask=there, other=0)
            low = tl.load(x_at + tile, mask=there, other=0)
            high = tl.load(x_at + tile + _HALF_UNIT, mask=there, other=0)
        else:
            w = tl.load(w_at + tile // 2)
            low = tl.load(x_at + tile)
            high = tl.load(x_at + tile + _HALF_UNIT)
        beside = (tile // GROUP) * N + mine
        zero = tl.load(zeros + beside)[:, None]
        if GROUP < K:
            part = tl.dot(less_zero(w & 15, zero, kind), tl.trans(low), input_precision="ieee")
            part = tl.dot(less_zero(w >> 4, zero, kind), tl.trans(high), part, input_precision="ieee")
            sums += part * tl.load(scales + beside).to(tl.float32)[:, None]
        else:
            sums = tl.dot(less_zero(w & 15, zero, kind), tl.trans(low), sums, input_precision="ieee")
            sums = tl.dot(less_zero(w >> 4, zero, kind), tl.trans(high), sums, input_precision="ieee")
    if GROUP >= K:
        sums *= tl.load(scales + mine).to(tl.float32)[:, None]
    store_tile(out, bias, sums, n, r, rows, N)


class NarrowLinear:
    """`kernels.ops.Linear` with such a weight; keeps the weight as it is."""

    def __init__(self, weight: NarrowMatrix, bias: Tensor | None, dtype: torch.dtype, choice: Choice) -> None:
        self._weight = weight
        self._bias = None if bias is None else bias.contiguous()
        self._dtype = dtype
        self._choice = choice
        self._hardware = _has_fp8(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        weight, choice = self._weight, self._choice
        outputs, inputs = weight.shape
        if x.dim() != 2 or x.shape[1] != inputs or x.dtype != self._dtype:
            raise ValueError(f"operands [rows, {inputs}] of {self._dtype}, not {list(x.shape)} of {x.dtype}")
        if isinstance(weight, GroupedMatrix) and weight.order is not None:
            x = x.index_select(1, weight.order)
        x = x.contiguous()
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()
        rows = x.shape[0]
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        grid = (triton.cdiv(outputs, choice.tiles["BN"]), triton.cdiv(rows, choice.tiles["BR"]))
        sizes = {"N": outputs, "K": inputs}
        if isinstance(weight, ScaledMatrix):
            sizes |= {"HEIGHT": weight.height, "WIDTH": weight.width, "HARDWARE": self._hardware}
            args = (x, weight.codes, weight.scales, self._bias, out, rows)
            launch(scaled_product, grid, *args, choice=choice, **sizes)
        else:
            given = (x, weight.codes, weight.scales, weight.zeros, self._bias, out, rows)
            launch(grouped_product, grid, *given, choice=choice, **sizes, GROUP=weight.group)
        return out


def prepare_narrow(
    weight: NarrowMatrix, bias: Tensor | None, dtype: torch.dtype, choice: Choice | None = None
) -> NarrowLinear:
    """The product with `weight` for operands of `dtype`; `choice` as `default_choice` unless tuned."""
    return NarrowLinear(weight, bias, dtype, choice or default_choice(weight))


def default_choice(weight: NarrowMatrix) -> Choice:
    """Tiles for a matrix: what its size and groups ask for, whatever number of rows comes."""
    inputs = weight.shape[1]
    run = weight.width if isinstance(weight, ScaledMatrix) else weight.group
    return _choice(weight.shape[0], inputs, run)


def _choice(outputs: int, inputs: int, run: int) -> Choice:
    # Few outputs: smaller tiles, so that every multiprocessor has one.
    tiles = {"BN": 64 if outputs >= 8192 else 32, "BR": 32}
    return Choice(tiles | {"BK": tile_inputs(inputs, run)}, warps=4, stages=3)


def tile_inputs(inputs: int, run: int) -> int:
    """The inputs of a tile: a power of two that divides the run of inputs that share a scale."""
    return _MOST_INPUTS if run >= inputs else math.gcd(run, _MOST_INPUTS)


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor >= _FP8_IN_HARDWARE


_MODELS = (  # name, hidden, rows of qkv, heads * dim, inner
    ("llama-3-8b", 4096, 6144, 4096, 14336),
    ("qwen2.5-7b", 3584, 4608, 3584, 18944),
    ("smollm2-135m", 576, 960, 576, 1536),
)


def cases(capability: int = 80) -> Iterable[Case]:
    """Kernels of some models in each format, as a GPU of `capability` runs them; those of 80 compile for
    every GPU."""
    hardware = capability >= _FP8_IN_HARDWARE
    for name, hidden, qkv, mixed, inner in _MODELS:
        shapes = {"qkv": (qkv, hidden), "o": (hidden, mixed)}
        shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        for product, (outputs, inputs) in shapes.items():
            for dtype in (torch.bfloat16, torch.float16):
                label = f"{TRITON_NAMES[dtype]}-{name}-{product}"
                biased = product == "qkv"
                yield _scaled_case(f"fp8-block-{label}", dtype, outputs, inputs, 128, 128, hardware, biased)
                yield _scaled_case(f"fp8-row-{label}", dtype, outputs, inputs, 1, inputs, hardware, biased)
                yield _grouped_case(f"int4-{label}", dtype, outputs, inputs, 128, biased)


def _scaled_case(
    name: str,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    height: int,
    width: int,
    hardware: bool,
    biased: bool,
) -> Case:
    kind = "*" + TRITON_NAMES[dtype]
    signature = {"x": kind, "codes": "*u8", "scales": "*fp32", "out": kind, "rows": "i32"}
    constants: dict[str, object] = {"N": outputs, "K": inputs, "HEIGHT": height, "WIDTH": width}
    constants["HARDWARE"] = hardware
    return _case(name, scaled_product, signature, constants, kind, biased, _choice(outputs, inputs, width))


def _grouped_case(name: str, dtype: torch.dtype, outputs: int, inputs: int, group: int, biased: bool) -> Case:
    kind = "*" + TRITON_NAMES[dtype]
    signature = {"x": kind, "codes": "*u8", "scales": "*fp16", "zeros": "*u8", "out": kind, "rows": "i32"}
    constants: dict[str, object] = {"N": outputs, "K": inputs, "GROUP": group}
    return _case(name, grouped_product, signature, constants, kind, biased, _choice(outputs, inputs, group))


def _case(
    name: str,
    which: object,
    signature: dict[str, str],
    constants: dict[str, object],
    kind: str,
    biased: bool,
    choice: Choice,
) -> Case:
    if biased:
        signature["bias"] = kind
    else:
        constants["bias"] = None
    return Case(name, which, signature, constants, choice, decode=True)
