"""How fast the model runs: decode and prefill through core and executor, beside the machine's limits.

Limits: a decode step must at least read all weights and the KV of its
contexts once; a prefill must at least do its products at the machine's peak.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from agentserve.bench.drive import Drive
from agentserve.bench.limits import ProductPeak, ReadPeak, product_row, read_row
from agentserve.bench.report import Row
from agentserve.executor.runner import TorchExecutor
from agentserve.messages import Hello
from agentserve.models.decoder import Decoder
from agentserve.server.workers.worker_main import BuiltEngine

DECODE = ((1, 64), (1, 3500), (8, 64), (8, 2000))  # (sessions, context)
PREFILL = (400, 2000, 3500)


@dataclass(frozen=True, slots=True)
class Costs:
    """What one token of the model costs at least."""

    weight_bytes: int
    kv_bytes: int  # per token of context
    linear_flops: int  # per token
    attention_flops: int  # per token and token of context

    @classmethod
    def of(cls, decoder: Decoder, built: BuiltEngine) -> Costs:
        config = decoder.config
        head = config.vocab_size * config.hidden_size
        inside = built.hello.parameters - head * (1 if config.tie_embeddings else 2)
        return cls(
            weight_bytes=decoder.step_bytes,
            kv_bytes=sum(group.page_bytes for group in built.groups) // built.hello.page_size,
            linear_flops=2 * inside,  # the head runs for sampled rows only
            attention_flops=4 * config.layers * config.heads * config.head_dim,
        )


def measure(built: BuiltEngine, runs: int = 3, steps: int = 10) -> list[Row]:
    """Rows for every decode and prefill size. ValueError where the KV pool is too small for them."""
    assert isinstance(built.executor, TorchExecutor)
    decoder = built.executor.decoder
    costs, drive = Costs.of(decoder, built), Drive(built)
    bandwidth = ReadPeak(decoder.ops).rate(seconds=1.0)
    peak = linear_peak = ProductPeak(decoder.ops, decoder.dtype).rate(seconds=1.0)
    rows = [read_row([bandwidth]), product_row(decoder.dtype, [peak])]
    if built.hello.activations == "int8":
        linear_peak = ProductPeak(decoder.ops, decoder.dtype, int8=True).rate(seconds=1.0)
        rows.append(product_row(torch.int8, [linear_peak]))
    for sessions, context in DECODE:
        limit = (costs.weight_bytes + sessions * context * costs.kv_bytes) / bandwidth * 1e3
        prompts = _prompts(sessions, context)
        times = [1e3 * statistics.median(drive.decode(prompts, steps)) for _ in range(runs)]
        name = f"decode, {sessions} x {context} tokens"
        rows.append(Row(name, statistics.median(times), "ms/step", limit, "memory", runs=tuple(times)))
    for length in PREFILL:
        least = costs.linear_flops / linear_peak + costs.attention_flops * length / 2 / peak  # per token
        rates = [length / drive.prefill(_prompts(1, length)) for _ in range(runs)]
        name = f"prefill, {length} tokens"
        rows.append(
            Row(name, statistics.median(rates), "tokens/s", 1 / least, "products", True, tuple(rates))
        )
    return rows


def kept(hello: Hello) -> str:
    """In which numbers all of that was computed."""
    return (
        f"{hello.dtype}, weights {hello.weights}, activations {hello.activations}, KV {hello.kv_dtype}, "
        f"{hello.backend} kernels"
    )


def _prompts(sessions: int, length: int) -> list[list[int]]:
    return [
        [(number * 7919 + position * 31) % 40_000 + 100 for position in range(length)]
        for number in range(sessions)
    ]
