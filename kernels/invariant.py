"""How many rows at a time an operation is given, so that a row's bits do not depend on its company.

Libraries pick their inner loops by the number of rows, and with them the order of additions.
Which counts agree differs by dtype, shape, library and machine, so it is measured, once per shape,
when a model is loaded. (Seen on one machine: float32 products agree for multiples of 4 rows;
bfloat16 ones for all counts but 1, and at some shapes for that too.) Rules are tried from the
fastest; the last one holds by construction.

Plain random numbers are a poor probe: rounding to bfloat16 hides nearly every difference in order.
`cancelling` makes operands whose exact product is 0, so that only the order's own rounding is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Largest multiple that a rule pads to: callers that pad to it themselves avoid a copy."""

MOST_ROWS = 512
_ALIGNMENT = 64  # bytes, what torch gives a new tensor
_COUNTS = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 112, 128, 129, 192, 255, 256, 384, 511, 512)
_OFFSETS = (0, 5, 16, 33, 1, 100, 250)

RowFunction = Callable[[Tensor], Tensor]
"""Maps `[..., rows, n]` to `[..., rows, m]`, each row by itself."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """How rows (second last dimension) are grouped for a call.

    They are filled up to a multiple of `multiple`, and given `multiple` at a time if `fixed`, else
    all together up to `limit`, the most for which the rule was seen to hold.
    """

    multiple: int
    fixed: bool
    limit: int

    def apply(self, function: RowFunction, x: Tensor) -> Tensor:
        """`function(x)` under this rule."""
        rows = x.shape[-2]
        if rows <= self.limit and not self.fixed:
            return self._call(function, x)
        parts = torch.split(x, self.multiple if self.fixed else self.limit, dim=-2)
        return torch.cat([self._call(function, part) for part in parts], dim=-2)

    def _call(self, function: RowFunction, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        missing = -rows % self.multiple
        if not missing:
            # Libraries also look at alignment: a view into the middle of a tensor is another case.
            aligned = x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0
            return function(x if aligned else x.clone(memory_format=torch.contiguous_format))
        return function(F.pad(x, (0, 0, 0, missing)))[..., :rows, :]


def choose_rule(function: RowFunction, sample: Tensor) -> RowRule:
    """The fastest rule under which the rows of `sample [..., rows, n]` come out alike in all company."""
    limit = sample.shape[-2]
    for multiple, fixed in ((1, False), (4, False), (BLOCK, False), (BLOCK, True)):
        rule = RowRule(multiple, fixed, limit)
        if _holds(function, sample, rule):
            return rule
    return RowRule(1, True, limit)


def random_rows(rows: int, n: int, device: torch.device, batch: int = 1) -> Tensor:
    """Normal float32 values `[batch, rows, n]` to choose a rule with; the same every time."""
    return torch.randn((batch, rows, n), generator=torch.Generator().manual_seed(n)).to(device)


def cancelling(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, batch: int = 1
) -> tuple[Tensor, Tensor]:
    """`x [batch, rows, n]` and `weight [batch, out, n]` with `x @ weight.T` exactly 0; shape: (rows, n, out).

    Each product has a partner of opposite sign somewhere else along n; what a machine returns is
    the rounding of its own order of additions. All rows of one matrix are equal, so that any two
    may be compared. The same values every time.
    """
    rows, n, out = shape
    generator = torch.Generator().manual_seed(n)
    order = torch.randperm(n // 2 * 2, generator=generator)
    half_x = torch.randn(batch, 1, n // 2, generator=generator).to(dtype)
    half_w = torch.randn(batch, out, n // 2, generator=generator).to(dtype)
    x, weight = torch.zeros(batch, 1, n, dtype=dtype), torch.zeros(batch, out, n, dtype=dtype)
    x[..., order] = torch.cat((half_x, -half_x), dim=-1)
    weight[..., order] = torch.cat((half_w, half_w), dim=-1)
    return x.repeat(1, rows, 1).to(device), weight.to(device)


def _holds(function: RowFunction, sample: Tensor, rule: RowRule) -> bool:
    rows = sample.shape[-2]
    together = rule.apply(function, sample.clone())
    for turn, count in enumerate(count for count in _COUNTS if count <= rows):
        start = min(_OFFSETS[turn % len(_OFFSETS)], rows - count)
        part = sample[..., start : start + count, :].clone()
        if not torch.equal(rule.apply(function, part), together[..., start : start + count, :]):
            return False
    return True
