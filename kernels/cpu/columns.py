"""Which output stands in which column of packed panels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import PANEL


def panel_count(out: int, pair_halves: bool = False) -> int:
    """Panels of `out` outputs; `pair_halves`: each output of the first half beside one of the second."""
    return -(-out // 2 // (PANEL // 2)) if pair_halves else -(-out // PANEL)


def columns(out: int, pair_halves: bool = False) -> Tensor:
    """`[panels * PANEL]` int64: the output that a column holds, -1 where it holds none."""
    if not pair_halves:
        at = torch.arange(panel_count(out) * PANEL)
        return torch.where(at < out, at, -1)
    inner, half = out // 2, PANEL // 2
    at = torch.arange(panel_count(out, True) * half).view(-1, 1, half)
    at = torch.where(at < inner, at, -1).expand(-1, 2, half)
    return torch.where(at < 0, -1, at + torch.tensor([0, inner]).view(1, 2, 1)).reshape(-1)


def in_columns(values: Tensor, order: Tensor) -> Tensor:
    """`values[order]`, 0 where a column holds no output."""
    return torch.where(order < 0, 0, values[order.clamp(min=0)]).contiguous()
