"""Weights in the panels that the products read, in memory of their own."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import PAIRS, PANEL, TYPES, Library, Matrix
from kernels.memory import huge_bytes

_LINE = 64  # bytes of a cache line


class Arena:
    """One run of memory, handed out piece by piece."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = huge_bytes(nbytes)
        self._next = 0

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` bytes, at the start of a cache line."""
        start = self._next
        if start + nbytes > self._bytes.shape[0]:
            raise ValueError(f"arena is full: {nbytes} bytes wanted, {self._bytes.shape[0] - start} left")
        self._next += padded(nbytes)
        return self._bytes[start : start + nbytes]


def padded(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def panel_count(out: int, pair_halves: bool = False) -> int:
    if pair_halves:
        return -(-(out // 2) // (PANEL // 2))
    return -(-out // PANEL)


def packed_bytes(weight: Tensor, pair_halves: bool = False) -> int:
    """Bytes of the panels of `weight [out, in]`."""
    out, width = weight.shape
    return panel_count(out, pair_halves) * PANEL * 4 * -(-width // PAIRS[weight.dtype])


class PackedMatrix:
    """`weight [out, in]` in panels; `pair_halves` puts each output of the first half beside its
    partner of the second. Holds no reference to `weight` itself."""

    def __init__(
        self,
        library: Library,
        weight: Tensor,
        bias: Tensor | None = None,
        pair_halves: bool = False,
        arena: Arena | None = None,
    ) -> None:
        if weight.dtype not in TYPES:
            raise ValueError(f"weights must be bfloat16 or float32, not {weight.dtype}")
        self.out, self.width = weight.shape
        self.dtype = weight.dtype
        self.steps = -(-self.width // PAIRS[weight.dtype])
        size = packed_bytes(weight, pair_halves)
        self._panels = arena.take(size) if arena else torch.empty(size, dtype=torch.uint8)
        count = panel_count(self.out, pair_halves)
        library.pack(
            TYPES[weight.dtype],
            weight.contiguous().data_ptr(),
            self.out,
            self.width,
            pair_halves,
            self._panels.data_ptr(),
            torch.get_num_threads(),
        )
        self._bias = None if bias is None else _padded_bias(bias, count, pair_halves)
        self.matrix = Matrix(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.out,
            self.steps,
            count,
        )
        self.reference = ctypes.byref(self.matrix)


def _padded_bias(bias: Tensor, panels: int, pair_halves: bool) -> Tensor:
    """Float32, one per panel column."""
    if not pair_halves:
        found = torch.zeros(panels * PANEL)
        found[: bias.shape[0]] = bias
        return found
    inner = bias.shape[0] // 2
    halves = torch.zeros(2, panels * PANEL // 2)
    halves[:, :inner] = bias.view(2, inner)
    return halves.view(2, panels, PANEL // 2).transpose(0, 1).reshape(-1).contiguous()
