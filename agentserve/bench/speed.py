"""How fast the model runs: decode and prefill through core and executor, beside the machine's limits.

Limits as in DESIGN section 10: a decode step must at least read all weights and the KV of its
contexts once; a prefill must at least do its products at the machine's peak.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentserve.bench.limits import product_peak, read_bandwidth
from agentserve.bench.report import Row
from agentserve.executor.runner import TorchExecutor
from agentserve.messages import Close, ResetPrefixCache, Submit, pack_tokens
from agentserve.models.decoder import Decoder
from agentserve.models.load import DTYPES
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine
from agentserve.types import Sampling, SessionId, TurnId

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


def measure(spec: WorkerSpec, runs: int = 3, steps: int = 10) -> list[Row]:
    """Rows for every decode and prefill size."""
    built = build_engine(spec)
    assert isinstance(built.executor, TorchExecutor)
    decoder = built.executor.decoder
    costs = Costs.of(decoder, built)
    bandwidth, peak = read_bandwidth(), product_peak(DTYPES[spec.dtype], decoder.ops)
    rows = [
        Row("memory read", bandwidth / 1e9, "GB/s", higher_is_better=True),
        Row(f"{spec.dtype} matrix product", peak / 1e9, "GFLOP/s", higher_is_better=True),
    ]
    for sessions, context in DECODE:
        limit = (costs.weight_bytes + sessions * context * costs.kv_bytes) / bandwidth * 1e3
        times = [1e3 * statistics.median(_decode(built, sessions, context, steps)) for _ in range(runs)]
        name = f"decode, {sessions} x {context} tokens"
        rows.append(Row(name, statistics.median(times), "ms/step", limit, "memory", runs=tuple(times)))
    for length in PREFILL:
        flops = length * (costs.linear_flops + costs.attention_flops * length / 2)
        rates = [length / _prefill(built, length) for _ in range(runs)]
        name = f"prefill, {length} tokens"
        row = Row(
            name,
            statistics.median(rates),
            "tokens/s",
            length / (flops / peak),
            "products",
            True,
            tuple(rates),
        )
        rows.append(row)
    return rows


def _prompts(sessions: int, length: int) -> Iterator[array[int]]:
    for number in range(sessions):
        yield array("i", [(number * 7919 + position * 31) % 40_000 + 100 for position in range(length)])


def _submit(built: BuiltEngine, prompts: Sequence[array[int]], tokens: int) -> list[SessionId]:
    built.core.handle(ResetPrefixCache(0), 0.0)
    names = [SessionId(f"bench-{number}") for number in range(len(prompts))]
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for name, prompt in zip(names, prompts, strict=True):
        built.core.handle(Submit(name, TurnId(1), pack_tokens(prompt), sampling), 0.0)
    return names


def _step(built: BuiltEngine) -> tuple[int, int, float]:
    """One step: its chunks, its tokens, its seconds."""
    began = time.perf_counter()
    plan = built.core.begin_step(began)
    if plan is None:
        raise RuntimeError("the pool is too small for this benchmark: give more with --device-kv")
    built.core.finish_step(built.executor.run(plan), time.perf_counter())
    return len(plan.chunks), plan.tokens, time.perf_counter() - began


def _close(built: BuiltEngine, names: Sequence[SessionId]) -> None:
    for name in names:
        built.core.handle(Close(name), 0.0)
    built.core.take_events()


def _decode(built: BuiltEngine, sessions: int, context: int, steps: int) -> list[float]:
    names = _submit(built, list(_prompts(sessions, context)), context)
    times: list[float] = []
    while len(times) < steps:
        chunks, tokens, seconds = _step(built)
        if chunks == tokens == sessions:
            times.append(seconds)
    _close(built, names)
    return times


def _prefill(built: BuiltEngine, length: int) -> float:
    names = _submit(built, list(_prompts(1, length)), 1)
    began = time.perf_counter()
    while built.core.has_work:
        _step(built)
    seconds = time.perf_counter() - began
    _close(built, names)
    return seconds
