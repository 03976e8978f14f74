"""`kernels.ops.Ops` on the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import Matrix, expand
from kernels.cpu.attention import CpuAttention, pages_of
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.library import KV_TYPES, PAIRS, TYPES, Library, address
from kernels.cpu.packed import PackedMatrix
from kernels.ops import (
    Activations,
    Attention,
    AttentionShape,
    DecoderParts,
    Linear,
    Span,
    StepDecoder,
)


class CpuLinear:
    """A product with packed weights; keeps no reference to the original ones."""

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._packed = PackedMatrix(library, weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        packed = self._packed
        x = F.pad(x, (0, -packed.width % PAIRS[packed.dtype])).contiguous()
        out = torch.empty(x.shape[0], packed.out, dtype=packed.dtype)
        self._library.linear(
            TYPES[packed.dtype],
            packed.reference,
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class CpuOps:
    """Every operation in C++ on torch's own threads, bfloat16 and float32.

    KV pages have a layout of their own (`csrc/pages.h`): only these operations may read them.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    @property
    def name(self) -> str:
        return self._library.built.isa.name

    @property
    def numerics(self) -> str:
        """Threads and torch are no part of it: they decide no bits and no layout."""
        return f"{self.name} {self._library.built.digest[:32]}"

    def linear(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activations: Activations = "float",
    ) -> Linear:
        if isinstance(weight, Tensor):
            return CpuLinear(self._library, weight, bias)
        if dtype is None:
            raise ValueError("a product with block weights needs the dtype of its operands")
        return CpuLinear(self._library, expand(weight, dtype), bias)

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        return frozenset(KV_TYPES) if dtype in TYPES else frozenset()

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        if not isinstance(parts.lm_head, Tensor) or not isinstance(parts.layers[0].down, Tensor):
            return None
        return CpuDecoder(self._library, parts) if CpuDecoder.fits(parts) else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        if x.stride()[1:] != (dim, 1):
            x = x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty((rows, heads, dim), dtype=x.dtype)
        self._library.rope(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            heads,
            dim,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, inner, dtype=gate_up.dtype)
        self._library.silu_mul(
            TYPES[gate_up.dtype],
            gate_up.data_ptr(),
            rows,
            inner,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def write_kv(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
        self._library.write_kv(
            TYPES[k.dtype],
            ctypes.byref(pages_of(kv)),
            slots.contiguous().data_ptr(),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k.shape[0],
        )

    def attention(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor) -> Attention:
        return CpuAttention(self._library, shape, spans, tables)

    def copy_page(self, storage: Tensor, source: int, target: int, slots: int) -> None:
        self._library.copy_page(
            ctypes.byref(pages_of(storage[:, 0])),
            storage.stride(1),
            storage.shape[1],
            source,
            target,
            slots,
        )

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        wide = weight.to(torch.float32).contiguous()
        width = x.shape[-1]
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library.rms_norm(
            TYPES[x.dtype],
            x.data_ptr(),
            address(residual),
            wide.data_ptr(),
            x.numel() // width,
            width,
            eps,
            out.data_ptr(),
            total.data_ptr(),
            torch.get_num_threads(),
        )
        return out, total
