"""Measuring the machine itself: what is read and computed is what it says."""

from __future__ import annotations

import pytest
import torch

from agentserve.bench.limits import ProductPeak, ReadPeak, dot_rate, product_row, read_row, reader
from kernels.cpu import cpu_ops
from kernels.cpu.isa import available
from kernels.cpu.ops import CpuOps
from kernels.memory import huge_bytes
from kernels.reference import ReferenceOps
from tests.cpu_builds import builds

CPU = torch.device("cpu")


ops = builds()


@pytest.mark.parametrize("nbytes", [4, 512, 516, 1 << 20, (1 << 20) + 508, 3 << 20, (5 << 20) + 4])
def test_every_lane_is_read_once(ops: CpuOps, nbytes: int) -> None:
    data = huge_bytes(nbytes)
    data.random_(0, 256, generator=torch.Generator().manual_seed(nbytes))
    lanes = data.view(torch.int32).sum(dtype=torch.int64).item()
    assert ops.read(data) == lanes % 2**32
    data.view(torch.int32)[-1] += 1
    assert ops.read(data) == (lanes + 1) % 2**32, "the last one too"


def test_dots_are_counted_per_thread_round_and_lane(ops: CpuOps) -> None:
    threads = torch.get_num_threads()
    once = ops.repeat_dots(torch.float32, 10)
    assert once > 0
    assert once % (threads * 10 * 2) == 0
    assert ops.repeat_dots(torch.float32, 30) == 3 * once
    assert ops.repeat_dots(torch.bfloat16, 10) == 2 * once, "two products per lane"
    assert ops.repeat_dots(torch.int8, 10) in (0, 4 * once), "four, where there are such instructions"


def test_rates_come_from_backends_with_and_without_a_probe() -> None:
    reference = ReferenceOps(CPU)
    assert dot_rate(reference, torch.float32) == 0.0
    assert reader(reference, 1 << 16)() is not None
    best = next(available())
    assert dot_rate(cpu_ops([best]), torch.float32, seconds=0.0, rounds=100) > 0
    assert ProductPeak(reference, torch.float32, seconds=0.0).rate(runs=1) > 0


def test_eight_bit_products_of_the_reference_are_measured_too() -> None:
    assert ProductPeak(ReferenceOps(CPU), torch.bfloat16, int8=True, seconds=0.0).rate(runs=1) > 0


def test_reading_takes_the_backends_own_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    best = cpu_ops([next(available())])
    seen: list[int] = []
    monkeypatch.setattr(CpuOps, "read", lambda self, data: seen.append(data.numel()) or 0)
    reader(best, 4096)()
    assert seen == [4096]
    seen.clear()
    assert ReadPeak(best, 1 << 20).rate(runs=3) > 0
    assert seen == [1 << 20] * 3


def test_a_rate_is_that_of_the_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (0.0, *(0.0, 4.0), *(4.0, 6.0), *(6.0, 9.0), 9.0)  # the beginning, each run's two ends, the end
    seconds = iter(times)
    monkeypatch.setattr("agentserve.bench.limits.time.perf_counter", lambda: next(seconds))
    assert ReadPeak(ReferenceOps(CPU), 800).rate(runs=3) == 400
    assert read_row([4e9, 2e9, 3e9]).value == 3.0
    row = product_row(torch.bfloat16, [4e9, 2e9])
    assert (row.name, row.value) == ("bf16 matrix product, operands in cache", 3.0)


def test_a_torch_without_integer_products_leaves_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(codes: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not on this machine")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert ProductPeak(ReferenceOps(CPU), torch.bfloat16, int8=True, seconds=0.0).rate(runs=1) > 0
