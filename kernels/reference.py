"""The operations in plain torch, for any device: the CPU's fallback, and every other backend's oracle.

What torch adds, multiplies and divides element by element has the same bits wherever an element
stands. What sums over a dimension, or is approximated in vectors (exp), goes through a row rule
(`kernels.invariant`). `torch.nn.functional.silu` is not used: its float32 result differs between a
vector's body and its tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import Matrix, expand
from kernels.invariant import MOST_ROWS, RowRule, cancelling, choose_rule, random_rows
from kernels.kv_formats import kept
from kernels.ops import (
    KV_TAILS,
    Activations,
    Attention,
    AttentionShape,
    DecoderParts,
    Drawing,
    Linear,
    Span,
    StepDecoder,
    operand_dtype,
)
from kernels.paged_attention import PagedAttention, TileOps

_LARGE_WEIGHT = 1 << 24  # elements; above it, rules are measured on fewer rows to keep loading short
_FEW_ROWS = 64
_GROUP, _TINY = 32, 1e-36  # of the rule that `kernels.ops.Activations` states
_STEPS = (torch.bfloat16, torch.float32)


class ReferenceLinear:
    """`F.linear` under a row rule."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rule: RowRule) -> None:
        self._weight = weight
        self._bias = bias
        self.rule = rule

    def __call__(self, x: Tensor) -> Tensor:
        return self.rule.apply(self.product, x)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class RoundedLinear:
    """A float32 product of operands that are rounded to 8 bits first."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(rounded_operands(x)).to(x.dtype)


class ReferenceOps:
    """`kernels.ops.Ops` in plain torch on `device`."""

    name = "reference"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._linear_rules: dict[tuple[torch.dtype, int, int, bool], RowRule] = {}
        self._norm_rules: dict[int, RowRule] = {}
        self._silu_rules: dict[int, RowRule] = {}
        self._tiles: dict[int, TileOps] = {}

    @property
    def numerics(self) -> str:
        threads = torch.get_num_threads()
        level = torch.backends.cpu.get_cpu_capability()
        return f"reference-3 torch-{torch.__version__} {self._device.type} {level} threads-{threads}"

    def linear(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activations: Activations = "float",
    ) -> Linear:
        dtype = operand_dtype(weight, dtype, activations)
        if isinstance(weight, Tensor):
            return self._plain(weight, bias)
        if activations == "float":
            return self._plain(expand(weight, dtype), bias)
        wide = None if bias is None else bias.to(torch.float32)
        return RoundedLinear(self._plain(expand(weight, torch.float32), wide))

    def _plain(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        out, width = weight.shape
        key = (weight.dtype, width, out, bias is not None)
        if key not in self._linear_rules:
            rows = MOST_ROWS if weight.numel() <= _LARGE_WEIGHT else _FEW_ROWS
            sample, probe = cancelling((rows, width, out), weight.dtype, weight.device)
            zero = None if bias is None else torch.zeros_like(bias)
            bare = ReferenceLinear(probe[0], zero, RowRule(1, False, rows))
            self._linear_rules[key] = choose_rule(bare.product, sample[0])
        return ReferenceLinear(weight, bias, self._linear_rules[key])

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        return frozenset(KV_TAILS) if dtype in _STEPS else frozenset()

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        return None

    def drawing(self) -> Drawing | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        wide = x.to(torch.float32).contiguous().view(-1, width)
        scale = torch.rsqrt(self._norm_rule(width).apply(_mean_square, wide) + eps)
        return (wide * scale).to(x.dtype).view(x.shape) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.to(torch.float32).chunk(2, dim=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1]
        if width not in self._silu_rules:
            sample = random_rows(MOST_ROWS, width, self._device)[0]
            self._silu_rules[width] = choose_rule(_silu_mul, sample)
        return self._silu_rules[width].apply(_silu_mul, gate_up)

    def write_kv(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        per_page = kv.shape[2]
        pages, offsets = slots // per_page, slots % per_page
        kv[pages, 0, offsets] = kept(k, kv.dtype)
        kv[pages, 1, offsets] = kept(v, kv.dtype)

    def attention(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor) -> Attention:
        if shape.dim not in self._tiles:
            self._tiles[shape.dim] = TileOps(shape.dim, self._device)
        return PagedAttention(shape, spans, tables.to(self._device), self._tiles[shape.dim])

    def copy_page(self, storage: Tensor, source: int, target: int, slots: int) -> None:
        storage[target, :, :, :slots] = storage[source, :, :, :slots]

    def _norm_rule(self, width: int) -> RowRule:
        if width not in self._norm_rules:
            sample = random_rows(MOST_ROWS, width, self._device)[0]
            self._norm_rules[width] = choose_rule(_mean_square, sample)
        return self._norm_rules[width]


def rounded_operands(x: Tensor) -> Tensor:
    """`x [rows, n]` as the products of `Activations` "int8" take it: codes times scales, in float32.

    Where a group's largest number is not finite, all of its group become NaN.
    """
    rows, width = x.shape
    groups = F.pad(x.to(torch.float32), (0, -width % _GROUP)).view(rows, -1, _GROUP)
    most = groups.abs().amax(dim=-1, keepdim=True)
    top = torch.full_like(most, 127)  # a number over a tensor would be rounded twice
    scale, inverse = (torch.where(most < _TINY, 0, value) for value in (most / top, top / most))
    return ((groups * inverse).round() * scale).view(rows, -1)[:, :width]


def _mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
