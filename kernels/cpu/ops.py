"""`kernels.ops.Ops` on the compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import Matrix
from kernels.cpu.attention import CpuAttention, pages_of
from kernels.cpu.checks import check, check_dtype
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.library import KV_TYPES, PAIRS, TYPES, Library, address
from kernels.cpu.packed import PackedMatrix
from kernels.ops import (
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

_PACKING = 1
"""Raise it when Python changes what panels hold (`packed.py`, `block_panels.py`, `columns.py`, `decoder.py`)
in a way that may show in a result's bits; the sources in `csrc/` count by themselves."""


class CpuLinear:
    """A product with packed weights; keeps no reference to the original ones."""

    def __init__(self, library: Library, packed: PackedMatrix) -> None:
        self._library = library
        self._packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        packed = self._packed
        check("operands", x, (None, packed.width), packed.dtype)
        x = F.pad(x, (0, -packed.width % PAIRS[packed.dtype])).contiguous()
        out = torch.empty(x.shape[0], packed.out, dtype=packed.dtype)
        self._library.linear(
            TYPES[packed.dtype],
            packed.reference,
            x.data_ptr(),
            x.shape[1],
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
        return f"{self.name} {self._library.built.digest[:32]} packing-{_PACKING}"

    def linear(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activations: Activations = "float",
    ) -> Linear:
        dtype = operand_dtype(weight, dtype, activations)
        packed = PackedMatrix(self._library, weight, bias, dtype=dtype, activations=activations)
        return CpuLinear(self._library, packed)

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        return frozenset(KV_TYPES) if dtype in TYPES else frozenset()

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        return CpuDecoder(self._library, parts) if CpuDecoder.fits(parts) else None

    def drawing(self) -> Drawing | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        check("heads", x, (None, None, None), None)
        rows, heads, dim = x.shape
        for name, angles in (("cosines", cos), ("sines", sin)):
            check(name, angles, (rows, dim // 2), torch.float32)
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
        check("gates and ups", gate_up, (None, None), None)
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
        pages = pages_of(kv)
        check("slots", slots, (None,), torch.int64)
        check_dtype("keys", k)
        for name, x in (("keys", k), ("values", v)):
            check(name, x, (slots.shape[0], pages.kv_heads, pages.dim), k.dtype)
        k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k, v))
        slots = slots.contiguous()
        self._library.write_kv(
            TYPES[k.dtype],
            ctypes.byref(pages),
            slots.data_ptr(),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k.shape[0],
        )

    def attention(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor) -> Attention:
        return CpuAttention(self._library, shape, spans, tables)

    def copy_page(self, storage: Tensor, source: int, target: int, slots: int) -> None:
        pages, per_page = storage.shape[0], storage.shape[3]
        if not (0 <= source < pages and 0 <= target < pages and 0 <= slots <= per_page):
            raise ValueError(
                f"no copy of {slots} slots of page {source} to {target} among {pages} of {per_page}"
            )
        self._library.copy_page(
            ctypes.byref(pages_of(storage[:, 0])),
            storage.stride(1),
            storage.shape[1],
            source,
            target,
            slots,
        )

    def read(self, data: Tensor) -> int:
        """Read all of `data` (contiguous, whole 32-bit lanes) as fast as these threads can; the lanes' sum
        modulo 2^32. For benchmarks: what reading memory costs at least."""
        found: int = self._library.read(
            data.data_ptr(), data.numel() * data.itemsize // 4 * 4, torch.get_num_threads()
        )
        return found

    def repeat_dots(self, dtype: torch.dtype, rounds: int) -> float:
        """Run the dot instruction for operands of `dtype` (int8 too) on registers alone; operations done,
        two per product, 0 where the machine has no such instruction. For benchmarks."""
        kind = 2 if dtype == torch.int8 else TYPES[dtype]
        found: float = self._library.repeat_dots(kind, rounds, torch.get_num_threads())
        return found

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        check_dtype("operands", x)
        check("norm weights", weight, (width,), weight.dtype)
        if residual is not None:
            check("the residual", residual, tuple(x.shape), x.dtype)
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        wide = weight.to(torch.float32).contiguous()
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
