"""How long a decoder is inside its backend's calls: what is left of a step is the time outside kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

from torch import Tensor

from kernels.ops import (
    Arrivals,
    DecoderParts,
    GroupPages,
    Hidden,
    Logits,
    Ops,
    StepDecoder,
    StepGroup,
    StepRuns,
)


class KernelClock:
    """Seconds spent in clocked calls so far."""

    def __init__(self) -> None:
        self.seconds = 0.0


class ClockedStep:
    """`kernels.ops.StepDecoder` that times another one's calls."""

    def __init__(self, step: StepDecoder, clock: KernelClock) -> None:
        self._step = step
        self._clock = clock

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        began = time.perf_counter()
        hidden = self._step.forward(tokens, positions, groups)
        self._clock.seconds += time.perf_counter() - began
        return hidden

    def logits(self, hidden: Tensor) -> Logits:
        began = time.perf_counter()
        logits = self._step.logits(hidden)
        self._clock.seconds += time.perf_counter() - began
        return logits

    def prepare(self, pages: Sequence[GroupPages], rows: int) -> str:
        return self._step.prepare(pages, rows)

    def expect(self, arrivals: Arrivals) -> None:
        self._step.expect(arrivals)

    @property
    def runs(self) -> StepRuns:
        return self._step.runs


class _ClockedOps:
    """A backend whose decoders are clocked; everything else is the backend's own."""

    def __init__(self, ops: Ops, clock: KernelClock) -> None:
        self._ops = ops
        self._clock = clock

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        step = self._ops.decoder(parts)
        return None if step is None else ClockedStep(step, self._clock)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def clocked(ops: Ops, clock: KernelClock) -> Ops:
    """`ops` with whole-step decoders clocked. A backend that has none leaves the clock at 0."""
    return cast(Ops, _ClockedOps(ops, clock))
