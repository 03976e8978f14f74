"""KV pages of every dtype for tests: what they must keep, and attention over it in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionShape, Ops, Span, kv_width
from tests.cpu_builds import normal

STEPS = [torch.float32, torch.bfloat16]
KV_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8]


def poison(storage: Tensor) -> None:
    """Every number NaN; in int8 every scale (all bits set)."""
    storage.fill_(-1 if storage.dtype == torch.int8 else float("nan"))


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that pages of `dtype` stand for, float64, computed with numpy."""
    if dtype != torch.int8:
        return x.to(dtype).double()
    wide = x.float().numpy()
    scale = np.abs(wide).max(axis=-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.rint(wide / scale).astype(np.float64) * scale.astype(np.float64))


def naive(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None = None) -> Tensor:
    """Attention of rows at `position ..` over keys at 0 .., in float64: `[rows, heads * dim]`."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    at = torch.arange(position, position + rows)[:, None]
    keys = torch.arange(k.shape[0])[None]
    seen = (keys <= at) & (keys > at - (window or k.shape[0]))
    out = torch.empty(rows, heads, dim, dtype=torch.double)
    for head in range(heads):
        scores = q[:, head].double() @ k[:, head // group].double().T / dim**0.5
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=1)
        out[:, head] = weights @ v[:, head // group].double()
    return out.view(rows, -1)


class Step:
    """Sequences of `(start, rows)` in one poisoned pool, pages in a shuffled order, and queries for them.

    `k` and `v` are as the step had them, one pair per sequence.
    """

    def __init__(
        self,
        ops: Ops,
        step: torch.dtype,
        kv: torch.dtype,
        shape: AttentionShape,
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self.ops, self.shape, self.sizes = ops, shape, sizes
        slots, heads = shape.slots, shape.kv_heads
        counts = [-(-(start + rows) // slots) for start, rows in sizes]
        pages = 1 + sum(counts)
        self.kv = torch.empty((pages, 2, slots, heads, kv_width(shape.dim, kv)), dtype=kv)
        poison(self.kv)
        free = random.Random(pages).sample(range(1, pages), pages - 1)
        self.tables = torch.zeros(len(sizes), max(counts), dtype=torch.int64)
        self.k, self.v, self.spans = [], [], []
        row = 0
        for number, (start, rows) in enumerate(sizes):
            for index in range(counts[number]):
                self.tables[number, index] = free.pop()
            k, v = normal(2, start + rows, heads, shape.dim, seed=number).to(step)
            self.write(number, 0, k, v)
            if shape.window is not None:  # pages behind the window are released: page 0 is nobody's
                self.tables[number, : max(0, start - shape.window + 1) // slots] = 0
            self.k.append(k)
            self.v.append(v)
            self.spans.append(Span(row, rows, start))
            row += rows
        self.q = normal(row, shape.heads, shape.dim, seed=99).to(step)

    def write(self, number: int, first: int, k: Tensor, v: Tensor) -> None:
        """K and V of sequence `number` at positions `first ..`."""
        at = torch.arange(first, first + k.shape[0])
        slots = self.shape.slots
        self.ops.write_kv(self.kv, self.tables[number, at // slots] * slots + at % slots, k, v)

    def run(self) -> Tensor:
        return self.ops.attention(self.shape, self.spans, self.tables)(self.q, self.kv)

    def exact(self, kv: torch.dtype, factor: float = 1.0) -> Tensor:
        """Float64 attention over K and V as pages of `kv` keep them, these times `factor`."""
        return torch.cat(
            [
                naive(
                    self.q[s.row : s.row + s.rows],
                    kept(k, kv) * factor,
                    kept(v, kv) * factor,
                    s.position,
                    self.shape.window,
                )
                for s, k, v in zip(self.spans, self.k, self.v, strict=True)
            ]
        )
