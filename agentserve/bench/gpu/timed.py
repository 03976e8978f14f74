"""How long kernels take, beside what the device can do and what torch's own do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.limits import MEMORY, products
from agentserve.bench.gpu.rowwise import EPS
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.report import Row
from kernels.ops import Attention, AttentionShape, Ops, Span
from kernels.triton import sampling

Limits = dict[str, float]
"""What `limits.measure` found, by name: bytes or operations per second."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is timed: `nbytes` are moved and `operations` done at least."""

    group: str
    name: str
    nbytes: float
    operations: float = 0.0


class Watch:
    """Times runs, and puts them beside the limits: the longer of memory and products in `dtype`."""

    def __init__(self, on: Device, limits: Limits, dtype: torch.dtype) -> None:
        self._on, self._limits, self._dtype = on, limits, dtype

    def row(self, work: Work, run: Callable[[], object], variant: str = "ours") -> Row:
        runs = tuple(1e6 * seconds for seconds in self._on.seconds(run))
        least = {
            MEMORY: 1e6 * work.nbytes / self._limits[MEMORY],
            products(self._dtype): 1e6 * work.operations / self._limits[products(self._dtype)],
        }
        name_of = max(least, key=lambda each: least[each])
        return Row(
            work.name, statistics.median(runs), "us", least[name_of], name_of, runs=runs, group=work.group,
            variant=variant,
        )  # fmt: skip


def rows(on: Device, sizes: Sizes, ops: Ops, limits: Limits) -> Iterator[Row]:
    """In the first dtype alone."""
    dtype = sizes.dtypes[0]
    watch = Watch(on, limits, dtype)
    yield from _small(watch, on, sizes, ops, dtype)
    yield from _products(watch, on, sizes, ops, dtype)
    yield from _attention(watch, on, sizes, ops, dtype)


def _small(watch: Watch, on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    size = dtype.itemsize
    for count in sizes.product_rows:
        x = torch.randn(count, sizes.hidden, device=on.device).to(dtype)
        residual, weight = x.clone(), x[0].clone()
        gate = torch.randn(count, 2 * sizes.inner, device=on.device).to(dtype)
        logits = torch.randn(min(count, 256), sizes.vocab, device=on.device)
        group, said = "small operations", f"{count} rows"
        yield watch.row(
            Work(group, f"add_rms_norm, {said}", 4 * x.numel() * size),
            partial(ops.add_rms_norm, x, residual, weight, EPS),
        )
        yield watch.row(
            Work(group, f"silu_mul, {said}", 1.5 * gate.numel() * size), partial(ops.silu_mul, gate)
        )
        yield watch.row(
            Work(group, f"greedy choice, {len(logits)} rows", logits.numel() * 4),
            partial(sampling.best_of, logits),
        )


def _products(watch: Watch, on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    shapes = {
        "qkv": ((sizes.heads + 2 * sizes.kv_heads) * sizes.dim, sizes.hidden),
        "gate_up": (2 * sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
    }
    for name, (out, width) in shapes.items():
        weight = torch.randn(out, width, device=on.device).to(dtype)
        linear = ops.linear(weight)
        for count in sizes.product_rows:
            x = torch.randn(count, width, device=on.device).to(dtype)
            nbytes = (weight.numel() + count * (width + out)) * dtype.itemsize
            runs: dict[str, Callable[[], Tensor]] = {
                "ours": partial(linear, x),
                "torch": partial(F.linear, x, weight),
            }
            for variant, run in runs.items():
                work = Work("products", f"{name}, {count} rows", nbytes, 2 * count * out * width)
                yield watch.row(work, run, variant)


def _attention(watch: Watch, on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    asked = [(count, context, 1) for count, context in sizes.decode]
    for count, context, last in [*asked, *((1, tokens, tokens) for tokens in sizes.prefill)]:
        q, kv, attention = _laid_out(on, sizes, ops, dtype, (count, context, last))
        pairs = count * (context if last == 1 else last * (last + 1) // 2)
        work = Work(
            "attention",
            f"{'decode' if last == 1 else 'prefill'}, {count} x {context} tokens",
            2 * count * context * sizes.kv_heads * sizes.dim * dtype.itemsize,
            4 * sizes.heads * sizes.dim * pairs,
        )
        yield watch.row(work, partial(attention, q, kv))
        shape = (count, sizes.kv_heads, context, sizes.dim)
        k, v = (torch.randn(shape, device=on.device).to(dtype) for _ in range(2))
        queries = q.view(count, last, sizes.heads, sizes.dim).transpose(1, 2).contiguous()
        causal = last > 1
        yield watch.row(
            work,
            partial(F.scaled_dot_product_attention, queries, k, v, is_causal=causal, enable_gqa=True),
            "torch SDPA, no pages",
        )


def _laid_out(
    on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype, load: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Attention]:
    """Queries, pages and the attention of (sequences, tokens of each, how many of its last ones ask)."""
    count, context, asked = load
    width = -(-context // sizes.slots)
    pages = (count * width, 2, sizes.slots, sizes.kv_heads, sizes.dim)
    kv = torch.randn(pages, device=on.device).to(dtype)
    tables = torch.randperm(count * width).view(count, width)
    spans = [Span(row * asked, asked, context - asked) for row in range(count)]
    q = torch.randn(count * asked, sizes.heads, sizes.dim, device=on.device).to(dtype)
    shape = AttentionShape(sizes.heads, sizes.kv_heads, sizes.dim, sizes.slots)
    return q, kv, ops.attention(shape, spans, tables)
