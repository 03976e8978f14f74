"""One step's attention as the executor asks for it, laid out when it is first run.

A decode step that was recorded brings a layout of its own and needs only what is said here, so no work is
done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionShape, Span

LayOut = Callable[[AttentionShape, Sequence[Span], Tensor, torch.dtype], Attention]


class StepAttention:
    """`kernels.ops.Attention` that is laid out by its first call. `tables [spans, pages]` int64."""

    def __init__(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor, lay_out: LayOut) -> None:
        self.shape = shape
        self.spans = spans
        self.tables = tables
        self._lay_out = lay_out
        self._laid: Attention | None = None

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token in this step, rows in the order of the tables."""
        return all(span.rows == 1 and span.row == row for row, span in enumerate(self.spans))

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        if self._laid is None:
            self._laid = self._lay_out(self.shape, self.spans, self.tables, kv.dtype)
        return self._laid(q, kv)
