"""The machine's rates, measured again and again in little time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from agentserve.bench.kernels.timing import Rates
from agentserve.bench.limits import ProductPeak, dot_rate, reader
from agentserve.bench.report import Row
from kernels.ops import Ops

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8"}


class MachineGauge:
    """`timing.Gauge` of this machine, with the backend's own threads and products in `dtype`."""

    def __init__(self, ops: Ops, dtype: torch.dtype, nbytes: int) -> None:
        self._nbytes = nbytes
        self._read = reader(ops, nbytes)
        self._float = ProductPeak(ops, dtype)
        self.int8_missing = ""
        self._int8: ProductPeak | None = None
        try:
            self._int8 = ProductPeak(ops, dtype, int8=True)
        except (ValueError, NotImplementedError) as error:
            self.int8_missing = f"not available in this backend: {error}".rstrip(": ")

    def rates(self) -> Rates:
        began = time.perf_counter()
        self._read()
        read = self._nbytes / (time.perf_counter() - began)
        return Rates(read, self._float.rate(), self._int8.rate() if self._int8 else 0.0)


def machine_rows(ops: Ops, dtype: torch.dtype, seen: Sequence[Rates]) -> list[Row]:
    """What the gauge has seen in a whole run (medians), and rates that are measured once."""
    found = [_row("memory read", [rates.read for rates in seen], "GB/s")]
    own = DTYPE_NAMES[dtype]
    products = {own: [rates.float_ops for rates in seen]}
    if any(rates.int8_ops for rates in seen):
        products["int8"] = [rates.int8_ops for rates in seen]
    for name, other in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if name not in products:
            products[name] = [ProductPeak(ops, other).rate(runs=10)]
    for name in ("bf16", "int8", "fp32"):
        if name in products:
            found.append(_row(f"{name} matrix product, operands in cache", products[name], "GFLOP/s"))
    for kind in (torch.bfloat16, torch.int8, torch.float32):
        rate = dot_rate(ops, kind)
        if rate:
            found.append(_row(f"{DTYPE_NAMES[kind]} dot instruction alone", [rate], "GFLOP/s"))
    return found


def _row(name: str, rates: Sequence[float], unit: str) -> Row:
    runs = tuple(rate / 1e9 for rate in rates)
    return Row(name, statistics.median(runs), unit, higher_is_better=True, runs=runs, group="machine")
