"""What one forward pass reads besides the weights. The executor builds it from a plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.ops import Attention


@dataclass(frozen=True, slots=True, eq=False)
class PagedGroup:
    """One KV group's part of a batch."""

    storage: Tensor  # [pages, layers of the group, 2, slots, kv_heads, kv_width]
    slots: Tensor  # [rows] int64: where each row's K and V go
    attention: Attention


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Flat token rows of any number of sequences. `groups` follow `DecoderConfig.layer_groups()`."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    groups: tuple[PagedGroup, ...]
