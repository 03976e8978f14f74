"""Pages with a sequence's KV at random places, and attention over them by Triton and by the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import AttentionShape, Span, kv_width
from kernels.reference import ReferenceOps
from kernels.triton.attention_plan import TritonAttention
from kernels.triton.launch import Choice

SMALL = Choice({"BLOCK_M": 16, "TILE": 16, "SEGMENT": 32})
"""Tiles for a slow interpreter: a few dozen tokens have several segments."""
WIDE = Choice({"BLOCK_M": 16, "TILE": 32, "SEGMENT": 64})
"""Tiles of more than one page of 16 slots."""
LAYERS = 2
_REFERENCE = ReferenceOps(torch.device("cpu"))


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One layer's pages; what nobody wrote is NaN (in int8: codes of 127 with a scale that is NaN)."""

    kv: Tensor
    free: list[int]  # taken from its end

    @classmethod
    def of(cls, shape: AttentionShape, dtype: torch.dtype, pages: int = 48, seed: int = 0) -> Pool:
        width = kv_width(shape.dim, dtype)
        storage = torch.zeros((pages, LAYERS, 2, shape.slots, shape.kv_heads, width), dtype=dtype)
        if dtype == torch.int8:
            storage.fill_(-1)  # four bytes of -1 are a NaN
        else:
            storage.fill_(torch.nan)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
        return cls(storage[:, 1], order)

    def sequence(
        self, shape: AttentionShape, tokens: int, *, seed: int, step: torch.dtype, behind: Sequence[int] = ()
    ) -> list[int]:
        """Pages of a sequence of so many tokens; `behind`: whole pages of another that it goes on from."""
        table = list(behind)
        while len(table) * shape.slots < tokens:
            table.append(self.free.pop())
        drawn = torch.Generator().manual_seed(seed)
        known = len(behind) * shape.slots
        at = torch.arange(known, tokens)
        slots = torch.tensor(table)[at // shape.slots] * shape.slots + at % shape.slots
        k, v = torch.randn(2, tokens - known, shape.kv_heads, shape.dim, generator=drawn).to(step)
        _REFERENCE.write_kv(self.kv, slots, k, v)
        return table


def tables_of(tables: Sequence[Sequence[int]]) -> Tensor:
    most = max(map(len, tables))
    return torch.tensor([[*table, *[0] * (most - len(table))] for table in tables], dtype=torch.int64)


def queries(shape: AttentionShape, rows: int, step: torch.dtype, seed: int = 7) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(rows, shape.heads, shape.dim, generator=drawn).to(step)


def run(
    shape: AttentionShape,
    spans: Sequence[Span],
    tables: Sequence[Sequence[int]],
    q: Tensor,
    kv: Tensor,
    choice: Choice = SMALL,
) -> Tensor:
    return TritonAttention(shape, spans, tables_of(tables), choice=choice)(q, kv)


def expected(
    shape: AttentionShape, spans: Sequence[Span], tables: Sequence[Sequence[int]], q: Tensor, kv: Tensor
) -> Tensor:
    """By the reference, in float32."""
    per_tile = 128 // shape.slots  # it reads whole tiles
    padded = [[*table, *[table[-1]] * (-len(table) % per_tile)] for table in tables]
    return _REFERENCE.attention(shape, spans, tables_of(padded))(q.to(torch.float32), kv)
