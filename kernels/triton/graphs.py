"""Decode steps that were recorded before they come: a step is padded to a bucket, and its kernels run again
over the same memory without being launched one by one.

A bucket is a number of rows and a length of context. Rows beyond the step's own are padding: they write no
KV, and nobody reads what comes out of them. Nothing that a row computes depends on its company
(`kernels.ops`), so a step has the same bits in every bucket, and outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import Attention, AttentionShape, GroupPages, Hidden, StepGroup, StepRuns
from kernels.triton.recorder import Recorder, Work
from kernels.triton.step_attention import StepAttention

MOST_ROWS = 256  # of a bucket: beyond it, launching kernels takes less time than running them
SHORT = 2048  # tokens of the shortest context that buckets tell apart
LONGER = 4  # and each is so many times as long as the one before

NO_SLOT = -1  # a row with it writes nothing


class DecodeAttention(Attention, Protocol):
    """Attention of a decode step whose contents lie in fixed buffers."""

    def fill(self, positions: Sequence[int], tables: Tensor) -> None:
        """Make it that of rows at `positions` with `tables [rows, pages]`; the rows behind are padding."""
        ...


Compute = Callable[[Tensor, Tensor, Sequence[StepGroup]], Hidden]
"""A step: tokens, positions, groups (`kernels.ops.StepDecoder.forward`)."""

LayOut = Callable[[int, int, AttentionShape, torch.device, torch.dtype], DecodeAttention]
"""Rows, pages per row, the group's attention, the device, the dtype of its pages."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """What is recorded: every number of rows with every length of context (tokens), both ascending."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def up_to(cls, rows: int, context: int) -> Buckets:
        """For steps of so many rows, `MOST_ROWS` at most, in contexts of so many tokens."""
        counts = [1]
        while counts[-1] < min(rows, MOST_ROWS):
            counts.append(counts[-1] * 2)
        lengths = [min(SHORT, context)]
        while lengths[-1] < context:
            lengths.append(min(lengths[-1] * LONGER, context))
        return cls(tuple(counts), tuple(lengths))

    def holding(self, rows: int, context: int) -> tuple[int, int] | None:
        """The smallest bucket for a step; None where there is none."""
        count = next((count for count in self.rows if count >= rows), None)
        length = next((length for length in self.contexts if length >= context), None)
        return None if count is None or length is None else (count, length)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded, for how long, and the device memory that it keeps."""

    buckets: Buckets
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        rows, contexts = self.buckets.rows, self.buckets.contexts
        return (
            f"{len(rows) * len(contexts)} decode steps of up to {rows[-1]} rows and {contexts[-1]} tokens "
            f"recorded in {self.seconds:.1f} s, {self.nbytes / 2**20:.0f} MiB"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """One KV group of a recorded step: `kernels.ops.StepGroup` over fixed buffers."""

    storage: Tensor
    slots: Tensor
    attention: DecodeAttention


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    groups: tuple[_Group, ...]
    replay: Work


class DecodeGraphs:
    """The recorded steps of one decoder over one pool. What is not for them is left to the caller."""

    def __init__(
        self,
        compute: Compute,
        pages: Sequence[GroupPages],
        buckets: Buckets,
        *,
        recorder: Recorder,
        lay_out: LayOut,
        hidden: tuple[int, torch.dtype],
    ) -> None:
        """Records every bucket: the largest first, so that the others find their memory taken already.

        hidden: width and dtype of what `compute` returns.
        """
        self._compute = compute
        self._pages = tuple(pages)
        self._buckets = buckets
        self.runs = StepRuns()
        device, most = pages[0].storage.device, buckets.rows[-1]
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = [torch.full((most,), NO_SLOT, dtype=torch.int64, device=device) for _ in pages]
        self._out = Hidden(
            torch.zeros((most, hidden[0]), dtype=hidden[1], device=device),
            torch.zeros(most, dtype=torch.bool, device=device),
        )
        self._filled = 0  # rows that hold something else than padding
        began = time.perf_counter()
        self._recorded = {
            (rows, context): self._record(rows, context, recorder, lay_out)
            for rows in reversed(buckets.rows)
            for context in reversed(buckets.contexts)
        }
        self.recorded = Recorded(buckets, time.perf_counter() - began, recorder.nbytes)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        groups: Sequence[StepGroup],
        before: Callable[[], None] | None = None,
    ) -> Hidden | None:
        """A step out of its bucket; None where it has none. What is returned is the caller's own.

        before: called before it runs, and only if it does."""
        plans = [group.attention for group in groups]
        laid = [plan for plan in plans if isinstance(plan, StepAttention)]
        if len(laid) < len(plans) or not all(plan.decodes for plan in laid):
            self.runs.launched += 1
            return None
        at = [span.position for span in laid[0].spans]
        place = self._buckets.holding(len(at), max(at) + 1)
        if place is None or not self._same_pages(groups):
            self.runs.missed += 1
            return None
        self.runs.replayed += 1
        bucket, rows = self._recorded[place], len(at)
        self._put(tokens, positions, groups)
        for held, plan in zip(bucket.groups, laid, strict=True):
            held.attention.fill(at, plan.tables)
        if before is not None:
            before()
        bucket.replay()
        return Hidden(self._out.rows[:rows].clone(), self._out.finite[:rows].clone())

    def _same_pages(self, groups: Sequence[StepGroup]) -> bool:
        return all(
            group.storage.data_ptr() == held.storage.data_ptr() and group.storage.shape == held.storage.shape
            for group, held in zip(groups, self._pages, strict=True)
        )

    def _put(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> None:
        """The step's rows into the buffers, and padding over what the last step left behind them."""
        rows = tokens.shape[0]
        self._tokens[:rows].copy_(tokens)
        self._positions[:rows].copy_(positions)
        for held, group in zip(self._slots, groups, strict=True):
            held[:rows].copy_(group.slots)
        if rows < self._filled:
            self._tokens[rows : self._filled].zero_()
            self._positions[rows : self._filled].zero_()
            for held in self._slots:
                held[rows : self._filled].fill_(NO_SLOT)
        self._filled = rows

    def _record(self, rows: int, context: int, recorder: Recorder, lay_out: LayOut) -> _Bucket:
        """Nothing but padding runs while it is recorded."""
        groups = tuple(
            _Group(held.storage, slots[:rows], self._laid_out(rows, context, held, lay_out))
            for held, slots in zip(self._pages, self._slots, strict=True)
        )
        tokens, positions = self._tokens[:rows], self._positions[:rows]
        out_rows, out_finite = self._out.rows[:rows], self._out.finite[:rows]

        def work() -> None:
            found = self._compute(tokens, positions, groups)
            out_rows.copy_(found.rows)
            out_finite.copy_(found.finite)

        return _Bucket(groups, recorder.record(work))

    @staticmethod
    def _laid_out(rows: int, context: int, pages: GroupPages, lay_out: LayOut) -> DecodeAttention:
        device = pages.storage.device
        made = lay_out(rows, -(-context // pages.shape.slots), pages.shape, device, pages.storage.dtype)
        made.fill([], torch.zeros((0, 1), dtype=torch.int64, device=device))
        return made
