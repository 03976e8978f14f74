"""How many rows at a time an operation is given, so that a row's bits do not depend on its company.

Libraries pick their inner loops by the number of rows, and with them the order of additions.
Which counts agree differs by dtype, shape, library and machine (seen on one: most bfloat16
products agree for all counts, float32 ones for multiples of 4), so it is measured, once per shape,
when a model is loaded. Rules are tried from the fastest; the last one holds by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
MOST_ROWS = 512
_COUNTS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 112, 128, 129, 192, 255, 256, 384, 511, 512)
_OFFSETS = (0, 5, 16, 33, 1, 100, 250)

RowFunction = Callable[[Tensor], Tensor]
"""Maps `[..., rows, n]` to `[..., rows, m]`, each row by itself."""


class Grouping(Enum):
    """How rows are grouped for a call."""

    WHOLE = "whole"  # as they come
    PADDED = "padded"  # filled up to a multiple of BLOCK
    BLOCKS = "blocks"  # BLOCK at a time
    SINGLE = "single"  # one at a time


@dataclass(frozen=True, slots=True)
class RowRule:
    """A grouping, and the most rows of one call for which it was seen to hold."""

    grouping: Grouping
    limit: int

    def apply(self, function: RowFunction, x: Tensor) -> Tensor:
        """`function(x)`, the rows (second last dimension of x) given to it by this rule."""
        rows = x.shape[-2]
        if rows <= self.limit:
            return _apply(function, x, self.grouping)
        slabs = torch.split(x, self.limit, dim=-2)
        return torch.cat([_apply(function, slab, self.grouping) for slab in slabs], dim=-2)


def choose_rule(function: RowFunction, sample: Tensor) -> RowRule:
    """The fastest rule under which the rows of `sample [..., rows, n]` come out alike in all company."""
    limit = sample.shape[-2]
    for grouping in (Grouping.WHOLE, Grouping.PADDED, Grouping.BLOCKS):
        if _holds(function, sample, grouping):
            return RowRule(grouping, limit)
    return RowRule(Grouping.SINGLE, limit)


def probe_sample(rows: int, n: int, dtype: torch.dtype, device: torch.device, batch: int = 0) -> Tensor:
    """Normal values `[rows, n]` (`[batch, rows, n]`) to choose a rule with; the same every time."""
    shape = (batch, rows, n) if batch else (rows, n)
    return torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(device=device, dtype=dtype)


def _apply(function: RowFunction, x: Tensor, grouping: Grouping) -> Tensor:
    rows = x.shape[-2]
    match grouping:
        case Grouping.WHOLE:
            return function(x)
        case Grouping.PADDED:
            return function(_padded(x))[..., :rows, :]
        case Grouping.BLOCKS:
            blocks = torch.split(_padded(x), BLOCK, dim=-2)
            return torch.cat([function(block.contiguous()) for block in blocks], dim=-2)[..., :rows, :]
        case Grouping.SINGLE:
            return torch.cat([function(row.contiguous()) for row in torch.split(x, 1, dim=-2)], dim=-2)


def _holds(function: RowFunction, sample: Tensor, grouping: Grouping) -> bool:
    rows = sample.shape[-2]
    together = _apply(function, sample, grouping)
    for turn, count in enumerate(count for count in _COUNTS if count <= rows):
        start = min(_OFFSETS[turn % len(_OFFSETS)], rows - count)
        part = sample[..., start : start + count, :].contiguous()
        if not torch.equal(_apply(function, part, grouping), together[..., start : start + count, :]):
            return False
    return True


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-2] % BLOCK
    return F.pad(x, (0, 0, 0, missing)) if missing else x
