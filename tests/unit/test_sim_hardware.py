"""Machines as cost models: the files that come with the package, and what is derived from them."""

from __future__ import annotations

import pytest

from agentserve.core.cost import pairs
from agentserve.sim.hardware import HardwareError, hardware_named, hardware_names

CPU, GPU = "cpu-smollm2", "h200-llama-8b"


def test_both_machines_are_there_and_say_how_they_were_measured() -> None:
    assert hardware_names() == (CPU, GPU, "tiny")
    for name in hardware_names():
        hardware = hardware_named(name)
        assert hardware.name == name
        assert len(hardware.how) >= 4 or hardware.how[0].startswith("made up")
        assert hardware.block_bytes == hardware.kv_token_bytes * hardware.page_size
        assert hardware.trace.context_limit < hardware.pool_tokens / 2


def test_an_unknown_machine_is_one_line_with_the_known_ones() -> None:
    with pytest.raises(HardwareError, match=f"{CPU}, {GPU}") as caught:
        hardware_named("../cpu-smollm2")
    assert "\n" not in str(caught.value)


def test_the_cpu_predicts_what_was_measured() -> None:
    """Best of sixteen runs on the machine that the file names, in milliseconds."""
    hardware = hardware_named(CPU)
    assert hardware.pages == 1456
    assert hardware.step([(0, 512)]) * 1e3 == pytest.approx(182.3, rel=0.08)
    assert hardware.step([(0, 64)]) * 1e3 == pytest.approx(24.9, rel=0.08)
    assert hardware.step([(64, 1)] * 8) * 1e3 == pytest.approx(6.2, rel=0.08)
    assert hardware.step([(8128, 64)]) * 1e3 == pytest.approx(73.6, rel=0.08)


def test_the_gpu_keeps_to_its_data_sheet() -> None:
    hardware = hardware_named(GPU)
    weights = 2 * 8.03e9
    assert weights / 4.8e12 < hardware.fixed < 2 * weights / 4.8e12
    assert 2 * 8.03e9 / 989e12 < hardware.per_token < 3 * 2 * 8.03e9 / 989e12
    assert hardware.kv_token_bytes == 32 * 8 * 128 * 2 * 2
    assert hardware.kv_token_bytes / 4.8e12 < hardware.per_read
    assert hardware.load_rate < 64e9
    assert hardware.fetch_rate < 14e9


@pytest.mark.parametrize("name", [CPU, GPU])
def test_prices_are_the_machines_own(name: str) -> None:
    hardware = hardware_named(name)
    prices = hardware.prices()
    for blocks in (1, 100):
        size = blocks * hardware.block_bytes
        assert prices.seconds(prices.load, blocks) == pytest.approx(
            hardware.copy_latency + size / hardware.load_rate
        )
        assert prices.seconds(prices.fetch, blocks) == pytest.approx(
            hardware.disk_latency + size / hardware.fetch_rate
        )
    chunk = hardware.max_batched_tokens
    steps = sum(hardware.step([(start, chunk)]) for start in range(0, 4 * chunk, chunk))
    assert prices.recompute(0, 4 * chunk) == pytest.approx(steps, rel=0.02)


@pytest.mark.parametrize(("name", "host", "disk"), [(CPU, 100, 10), (GPU, 10, 1.2)])
def test_loading_is_cheaper_than_computing_but_a_disk_before_a_gpu_hardly(
    name: str, host: float, disk: float
) -> None:
    """What a shoot-out of tiers is about: how many times dearer computing a context is."""
    prices = hardware_named(name).prices()
    compute = prices.recompute(0, 100 * prices.page_size)
    assert compute > host * prices.seconds(prices.load, 100)
    assert 3 * disk * prices.seconds(prices.fetch, 100) > compute > disk * prices.seconds(prices.fetch, 100)


def test_the_core_predicts_steps_as_the_machine_takes_them() -> None:
    hardware = hardware_named(GPU)
    chunks = [(1000, 1), (0, 500)]
    rows = hardware.fixed + 2 * hardware.per_row + 501 * hardware.per_token
    attended = hardware.per_context * (1001 + pairs(0, 500)) + hardware.per_read * (1001 + 500)
    assert hardware.step_cost().step(chunks) == pytest.approx(rows + attended)
    assert hardware.step(chunks) == hardware.step_cost().step(chunks)
    assert pairs(0, 500) == 125_250
