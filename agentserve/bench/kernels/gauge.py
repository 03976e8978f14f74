"""The machine's rates, measured again and again in little time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentserve.bench.kernels.timing import Rates
from agentserve.bench.limits import ProductPeak, ReadPeak, dot_rate, dot_row, product_row, read_row
from agentserve.bench.report import Row
from kernels.ops import Ops


class MachineGauge:
    """`timing.Gauge` of this machine, with the backend's own threads and products in `dtype`: each rate is
    the best of three tries."""

    def __init__(self, ops: Ops, dtype: torch.dtype, nbytes: int) -> None:
        self._read = ReadPeak(ops, nbytes)
        self._float = ProductPeak(ops, dtype)
        self._int8 = ProductPeak(ops, dtype, int8=True)

    def rates(self) -> Rates:
        return Rates(self._read.rate(), self._float.rate(), self._int8.rate())


def machine_rows(ops: Ops, dtype: torch.dtype, seen: Sequence[Rates]) -> list[Row]:
    """What the gauge has seen in a whole run (medians), and rates that are measured once."""
    products = {dtype: [rates.float_ops for rates in seen], torch.int8: [rates.int8_ops for rates in seen]}
    for other in (torch.bfloat16, torch.float32):
        if other not in products:
            products[other] = [ProductPeak(ops, other).rate(runs=10)]
    kinds = (torch.bfloat16, torch.int8, torch.float32)
    dots = {kind: dot_rate(ops, kind) for kind in kinds}
    return [
        read_row([rates.read for rates in seen]),
        *(product_row(kind, products[kind]) for kind in kinds),
        *(dot_row(kind, rate) for kind, rate in dots.items() if rate),
    ]
