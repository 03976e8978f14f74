"""Attention alone: all layers of one step, queries made up, KV from the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from agentserve.bench.kernels.cases import Case
from agentserve.bench.kernels.costs import Demand
from agentserve.bench.kernels.scene import Part, Scene
from agentserve.bench.kernels.sizes import Sizes
from agentserve.bench.kernels.subject import Variant
from agentserve.bench.kernels.timing import Run, Stopwatch
from agentserve.bench.report import Row
from agentserve.models.decoder import Decoder
from kernels.ops import Attention, AttentionShape, Span


def attention_run(decoder: Decoder, scene: Scene, parts: Sequence[Part]) -> Run:
    """All layers' attention of a step of `parts`. Laying the step out is not timed: once per step, it is
    part of what `Steps.overhead` measures."""
    calls = layer_calls(decoder, scene, parts)

    def run() -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - began

    return run


def layer_calls(decoder: Decoder, scene: Scene, parts: Sequence[Part]) -> list[Callable[[], object]]:
    """One call per layer, group by group."""
    config, pool = scene.config, scene.pool
    spans, rows = [], 0
    for part in parts:
        spans.append(Span(rows, part.count, part.start))
        rows += part.count
    widest = max(len(part.pages) for part in parts)
    tables = torch.zeros(len(parts), widest, dtype=torch.int64)
    for number, part in enumerate(parts):
        tables[number, : len(part.pages)] = torch.tensor(part.pages, dtype=torch.int64)
    q = torch.randn(rows, config.heads, config.head_dim).to(decoder.dtype)
    calls: list[Callable[[], object]] = []
    for storage, group in zip(pool.storages, pool.groups, strict=True):
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.page_size, group.window)
        attention = decoder.ops.attention(shape, spans, tables)
        for index in range(len(group.layers)):
            calls.append(_call(attention, q, storage[:, index]))
    return calls


def _call(attention: Attention, q: torch.Tensor, kv: torch.Tensor) -> Callable[[], object]:
    return lambda: attention(q, kv)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionAlone:
    """Measures attention of one variant: all use the same. Times are of all layers."""

    scene: Scene
    variant: Variant
    watch: Stopwatch

    def cases(self, sizes: Sizes) -> Iterator[Case]:
        """Decoding, every number of rows at every context; then chunks of one context."""
        costs, scene = self.variant.costs, self.scene
        for context in sizes.contexts:
            for rows in sizes.attended:
                name, demand = f"{rows} x {context:,} tokens", costs.attention_step([context] * rows)
                fits = scene.fits(rows, context + 1)
                parts = scene.decode(rows, context) if fits else []
                yield Case("attention", name, partial(self.row, parts, name, demand), fits)
        for start, count in sizes.chunks:
            name, demand = f"{count:,} tokens from {start:,} on", costs.attention_chunk(start, count)
            part = Part(start, count, scene.tables(1, start + count)[0])
            yield Case("attention", name, partial(self.row, [part], name, demand))

    def row(self, parts: Sequence[Part], name: str, demand: Demand) -> list[Row]:
        run = attention_run(self.variant.decoder, self.scene, parts)
        return [self.watch.alone(run).row("attention", name, demand)]
