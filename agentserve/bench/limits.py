"""What the machine itself can do: the rates that bound every step of a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from agentserve.bench.report import Row
from agentserve.executor.pool import KV_DTYPES
from kernels.blocks import FORMATS, BlockMatrix, BlockRows
from kernels.memory import huge_bytes
from kernels.ops import Activations, Linear, Ops

DTYPE_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}
READ_BYTES = 256 << 20  # more than any cache holds
CACHED = ((252, 1024, 512), (504, 1024, 1024))  # (rows, in, out): operands in L2, or not far from it


@runtime_checkable
class Probe(Protocol):
    """A backend that can show what its machine does at most."""

    def read(self, data: Tensor) -> int:
        """Read all of `data` once, as fast as possible."""
        ...

    def repeat_dots(self, dtype: torch.dtype, rounds: int) -> float:
        """Do nothing but dot instructions; how many operations that were, 0 without such instructions."""
        ...


def _fastest(function: Callable[[], object], seconds: float, least: int = 1) -> float:
    """Shortest of the runs that fit in `seconds`: the machine's limit, not its average."""
    shortest, runs, until = float("inf"), 0, time.perf_counter() + seconds
    while runs < least or time.perf_counter() < until:
        began = time.perf_counter()
        function()
        shortest, runs = min(shortest, time.perf_counter() - began), runs + 1
    return shortest


def reader(ops: object, nbytes: int) -> Callable[[], object]:
    """A function that reads that much memory once with all kernel threads: the backend's own where it has
    one, or torch's sum, which is some percent slower."""
    data = huge_bytes(nbytes // 8 * 8).fill_(1)
    if isinstance(ops, Probe):
        probe = ops
        return lambda: probe.read(data)
    return data.view(torch.int64).sum


class ReadPeak:
    """Reading memory once with all kernel threads; to be measured again and again."""

    def __init__(self, ops: Ops, nbytes: int = READ_BYTES) -> None:
        self._nbytes = nbytes
        self._run = reader(ops, nbytes)

    def rate(self, runs: int = 3, seconds: float = 0.0) -> float:
        """Bytes per second: the best of at least `runs` reads, and of those that fit in `seconds`."""
        return self._nbytes / _fastest(self._run, seconds, least=runs)


class ProductPeak:
    """The fastest matrix product that can be found here, ours or torch's, its operands in the caches; to be
    measured again and again. `int8`: ours with Q8_0 weights and 8-bit activations, torch's from 8-bit
    codes to 32-bit sums."""

    def __init__(self, ops: Ops, dtype: torch.dtype, int8: bool = False, seconds: float = 0.1) -> None:
        candidates = [_cached(ops, dtype, int8, shape) for shape in CACHED]
        candidates += [_torch_int8(shape) if int8 else _torch(dtype, shape) for shape in CACHED]
        self._operations, self._run = max(
            candidates, key=lambda found: found[0] / _fastest(found[1], seconds, least=3)
        )

    def rate(self, runs: int = 3, seconds: float = 0.0) -> float:
        """Operations per second, two per product and sum: the best of at least `runs` runs, and of those
        that fit in `seconds`."""
        return self._operations / _fastest(self._run, seconds, least=runs)


def read_row(rates: Sequence[float]) -> Row:
    """What `ReadPeak` found, in every benchmark's words; the median counts."""
    return _row("memory read", rates, "GB/s")


def product_row(dtype: torch.dtype, rates: Sequence[float]) -> Row:
    """What `ProductPeak` found."""
    return _row(f"{DTYPE_NAMES[dtype]} matrix product, operands in cache", rates, "GFLOP/s")


def dot_row(dtype: torch.dtype, rate: float) -> Row:
    """What `dot_rate` found."""
    return _row(f"{DTYPE_NAMES[dtype]} dot instruction alone", [rate], "GFLOP/s")


def _row(name: str, rates: Sequence[float], unit: str) -> Row:
    runs = tuple(rate / 1e9 for rate in rates)
    return Row(name, statistics.median(runs), unit, higher_is_better=True, runs=runs, group="machine")


def _cached(ops: Ops, dtype: torch.dtype, int8: bool, shape: tuple[int, int, int]) -> _Product:
    rows, width, out = shape
    activations: Activations = "int8" if int8 else "float"
    product: Linear = (
        ops.linear(_blocks(out, width), dtype=dtype, activations=activations)
        if int8
        else ops.linear(torch.randn(out, width).to(dtype))
    )
    x = torch.randn(rows, width).to(dtype)
    return 2 * rows * width * out, lambda: product(x)


def _torch(dtype: torch.dtype, shape: tuple[int, int, int]) -> _Product:
    rows, width, out = shape
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(out, width).to(dtype)
    return 2 * rows * width * out, lambda: F.linear(x, weight)


def _torch_int8(shape: tuple[int, int, int]) -> _Product:
    """Not part of torch's promised interface: where it is missing it counts as no operations."""
    rows, width, out = shape
    codes, columns = _codes(rows, width), _codes(out, width).t()
    try:
        torch._int_mm(codes, columns)
    except (AttributeError, RuntimeError):
        return 0, lambda: None
    return 2 * rows * width * out, lambda: torch._int_mm(codes, columns)


def _codes(rows: int, width: int) -> Tensor:
    return torch.randint(-127, 128, (rows, width), dtype=torch.int8)


_Product = tuple[int, Callable[[], object]]


def _blocks(out: int, width: int) -> BlockMatrix:
    """Q8_0 blocks (a float16 scale, 32 signed bytes) of random codes, all scales 1/64."""
    form = FORMATS["Q8_0"]
    data = torch.randint(0, 256, (out, width // form.weights, form.nbytes), dtype=torch.uint8)
    data[:, :, :2] = torch.tensor([1 / 64], dtype=torch.float16).view(torch.uint8)
    return BlockMatrix((BlockRows(form, data.view(out, -1)),), width)


def dot_rate(ops: object, dtype: torch.dtype, seconds: float = 0.1, rounds: int = 100_000) -> float:
    """Operations per second of the dot instruction alone, nothing loaded; 0 where the backend cannot tell."""
    if not isinstance(ops, Probe):
        return 0.0
    probe = ops
    operations = probe.repeat_dots(dtype, rounds)
    return operations and operations / _fastest(lambda: probe.repeat_dots(dtype, rounds), seconds)
