"""Steps of the Triton backend that begin while their KV is on its way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.triton.ops import TritonOps
from kernels.triton.recorder import EagerRecorder
from tests.beside_rig import Beside
from tests.late_streams import LateStreams
from tests.parity.harness import CPU
from tests.triton.test_executor import tiny
from tiering.stores.device_copies import DeviceCopies
from tiering.stores.packing import KernelPacking
from tiering.stores.streams import Queue


def test_a_chunk_waits_layer_by_layer() -> None:
    beside = Beside("qwen2-windows", TritonOps(CPU), made=tiny("qwen2-windows"), last=2)
    assert beside.on_its_way()
    asked: list[tuple[int, int]] = []
    wait = beside.copies.wait
    beside.copies.wait = lambda *at: (asked.append(at), wait(*at))  # type: ignore[method-assign, assignment]
    assert torch.equal(beside.prefill(), beside.expected)
    groups = beside.engine.config.layer_groups()
    places = {
        number: (at, group.layers.index(number)) for at, group in enumerate(groups) for number in group.layers
    }
    assert asked == [places[number] for number in range(len(places))]


def test_a_recorded_step_waits_for_everything_before_it_runs() -> None:
    beside = Beside("llama", TritonOps(CPU, EagerRecorder), made=tiny("llama"), last=1)
    beside.engine.executor.prepare(1)
    assert beside.on_its_way(), "what is recorded waits for nothing"
    assert torch.equal(beside.prefill(), beside.expected)
    assert beside.engine.decoder.runs.replayed == 1


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_without_waiting_neither_has_its_kv() -> None:
    deaf = frozenset({(Queue.COMPUTE, Queue.IN)})
    for last in (1, 2):
        beside = Beside("llama", TritonOps(CPU, EagerRecorder), deaf, made=tiny("llama"), last=last)
        beside.engine.executor.prepare(1)
        assert "not finite" in beside.attempt().error


def test_small_pages_are_gathered_and_scattered_by_the_kernels() -> None:
    groups = [
        torch.randint(0, 256, (5, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        for size in (64, 48)
    ]
    before = [group.clone() for group in groups]
    streams = LateStreams()
    copies = DeviceCopies(groups, [[0, 2], [1]], streams, KernelPacking())
    slab = np.zeros((3, 112), dtype=np.uint8)
    streams.pin(slab)
    for row, pages in enumerate([(4, 0), (1, 3), (2, 2)]):
        copies.read(pages, slab[2 - row])
    copies.settle()
    assert slab[1].tolist() == [*before[0][1].tolist(), *before[1][3].tolist()]
    for row, pages in enumerate([(0, 0), (3, 1)]):
        copies.write(pages, slab[row])
    copies.settle()
    streams.finish()
    assert torch.equal(groups[0], before[0][[2, 1, 2, 1, 4]])
    assert torch.equal(groups[1], before[1][[2, 3, 2, 3, 4]])
