"""How long kernels take, beside what the device can do and what torch's own do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from agentserve.bench.gpu.device import Device
from agentserve.bench.gpu.limits import MEMORY, products
from agentserve.bench.gpu.rowwise import EPS
from agentserve.bench.gpu.sizes import Sizes
from agentserve.bench.report import Row
from kernels.ops import AttentionShape, Ops, Span
from kernels.triton import sampling

Limits = dict[str, float]
"""What `limits.measure` found, by name: bytes or operations per second."""


class Watch:
    """Times runs, and puts them beside the limits: the longer of memory and products."""

    def __init__(self, on: Device, limits: Limits) -> None:
        self._on, self._limits = on, limits

    def row(
        self, group: str, name: str, variant: str, run: Callable[[], object], dtype: torch.dtype,
        nbytes: float = 0.0, operations: float = 0.0,
    ) -> Row:  # fmt: skip
        """`nbytes` are moved and `operations` done at least."""
        runs = tuple(1e6 * seconds for seconds in self._on.seconds(run))
        least = {
            MEMORY: 1e6 * nbytes / self._limits[MEMORY],
            products(dtype): 1e6 * operations / self._limits[products(dtype)],
        }
        name_of = max(least, key=lambda each: least[each])
        return Row(
            name, statistics.median(runs), "us", least[name_of], name_of, runs=runs, group=group,
            variant=variant,
        )  # fmt: skip


def rows(on: Device, sizes: Sizes, ops: Ops, limits: Limits) -> Iterator[Row]:
    """In the first dtype alone."""
    watch, dtype = Watch(on, limits), sizes.dtypes[0]
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
        said = f"{count} rows"
        yield watch.row(
            "small operations", f"add_rms_norm, {said}", "ours",
            lambda x=x, y=residual, w=weight: ops.add_rms_norm(x, y, w, EPS), dtype, 4 * x.numel() * size,
        )  # fmt: skip
        yield watch.row(
            "small operations", f"silu_mul, {said}", "ours",
            lambda x=gate: ops.silu_mul(x), dtype, 1.5 * gate.numel() * size,
        )  # fmt: skip
        yield watch.row(
            "small operations", f"greedy choice, {len(logits)} rows", "ours",
            lambda x=logits: sampling.best_of(x), dtype, logits.numel() * 4,
        )  # fmt: skip


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
                "ours": lambda x=x, linear=linear: linear(x),
                "torch": lambda x=x, weight=weight: F.linear(x, weight),
            }
            for variant, run in runs.items():
                yield watch.row(
                    "products", f"{name}, {count} rows", variant, run, dtype, nbytes, 2 * count * out * width
                )


def _attention(watch: Watch, on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype) -> Iterator[Row]:
    for count, context in sizes.decode:
        yield from _attended(watch, on, sizes, ops, dtype, count, context, 1)
    for tokens in sizes.prefill:
        yield from _attended(watch, on, sizes, ops, dtype, 1, tokens, tokens)


def _attended(
    watch: Watch, on: Device, sizes: Sizes, ops: Ops, dtype: torch.dtype, count: int, context: int, asked: int
) -> Iterator[Row]:
    """`count` sequences of `context` tokens, the last `asked` of which ask."""
    heads, kv_heads, dim, slots = sizes.heads, sizes.kv_heads, sizes.dim, sizes.slots
    width = -(-context // slots)
    kv = torch.randn(count * width, 2, slots, kv_heads, dim, device=on.device).to(dtype)
    tables = torch.randperm(count * width).view(count, width)
    spans = [Span(row * asked, asked, context - asked) for row in range(count)]
    q = torch.randn(count * asked, heads, dim, device=on.device).to(dtype)
    attention = ops.attention(AttentionShape(heads, kv_heads, dim, slots), spans, tables)
    kind = "decode" if asked == 1 else "prefill"
    name = f"{kind}, {count} x {context} tokens"
    pairs = count * (context if asked == 1 else asked * (asked + 1) // 2)
    nbytes = 2 * count * context * kv_heads * dim * dtype.itemsize
    operations = 4 * heads * dim * pairs
    yield watch.row("attention", name, "ours", lambda: attention(q, kv), dtype, nbytes, operations)
    k, v = (torch.randn(count, kv_heads, context, dim, device=on.device).to(dtype) for _ in range(2))
    queries = q.view(count, asked, heads, dim).transpose(1, 2).contiguous()
    yield watch.row(
        "attention", name, "torch SDPA, no pages",
        lambda: F.scaled_dot_product_attention(queries, k, v, is_causal=asked > 1, enable_gqa=True),
        dtype, nbytes, operations,
    )  # fmt: skip

