"""Steps of the Triton backend that begin while their KV is on its way."""

from __future__ import annotations

import torch

from kernels.triton.ops import TritonOps
from kernels.triton.recorder import EagerRecorder
from tests.beside_rig import Beside
from tests.parity.harness import CPU
from tests.triton.test_executor import tiny
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


def test_without_waiting_neither_has_its_kv() -> None:
    deaf = frozenset({(Queue.COMPUTE, Queue.IN)})
    for last in (1, 2):
        beside = Beside("llama", TritonOps(CPU, EagerRecorder), deaf, made=tiny("llama"), last=last)
        beside.engine.executor.prepare(1)
        assert "not finite" in beside.attempt().error
