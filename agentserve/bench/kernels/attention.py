"""Attention alone: all layers of one step, queries made up, KV from the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

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


def measure(scene: Scene, variant: Variant, watch: Stopwatch, sizes: Sizes) -> tuple[list[Row], list[str]]:
    """Rows for decoding and for chunks, and the names of those that the pool is too small for."""
    found: list[Row] = []
    missing: list[str] = []
    for context in sizes.contexts:
        for rows in sizes.attended:
            name = f"decode, {rows} x {context:,} tokens, all layers"
            if not scene.fits(rows, context + 1):
                missing.append(f"attention: {name}")
                continue
            timed = watch.alone(attention_run(variant.decoder, scene, scene.decode(rows, context)))
            found.append(timed.row("attention", name, variant.costs.attention_step([context] * rows)))
    for start, count in sizes.chunks:
        part = Part(start, count, scene.tables(1, start + count)[0])
        timed = watch.alone(attention_run(variant.decoder, scene, [part]))
        name = f"{count:,} tokens from {start:,} on, all layers"
        found.append(timed.row("attention", name, variant.costs.attention_chunk(start, count)))
    return found, missing
