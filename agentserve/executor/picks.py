"""Which rows' tokens are found where the logits are, and which rows' logits come to the host.

The host adds up float64 numbers, a device units of its own (`kernels.triton.sampling`), so near an edge
between two tokens they may choose differently. A row's way therefore follows from its request and its
position alone, never from what else is in the step: a turn that is computed again goes the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentserve.core.plan import SampleSpec
from agentserve.executor.penalties import has_penalties
from kernels.ops import Draw, Drawing, Logits


def needs_logits(spec: SampleSpec) -> bool:
    """Whether the host has to see the logits, or change them, before there is a token."""
    sampling = spec.sampling
    return (
        sampling.logprobs is not None
        or bool(sampling.logit_bias)
        or sampling.grammar is not None
        or has_penalties(sampling)
        or spec.length - spec.prompt < sampling.min_tokens
    )


class Picks:
    """Finds tokens without logits on the host: the best one, and with `drawing` a drawn one."""

    def __init__(self, drawing: Drawing | None) -> None:
        self._drawing = drawing

    def __call__(self, logits: Logits, specs: Sequence[SampleSpec]) -> list[int | None]:
        """A token per row of `logits`, None for rows that the host must sample. What folds say of a token
        (stop strings, reasoning that has to end) is not looked at."""
        ways = [None if needs_logits(spec) else spec.sampling.temperature > 0.0 for spec in specs]
        drawn = [row for row, way in enumerate(ways) if way]
        found: list[int] = logits.best.tolist()
        if drawn and self._drawing is not None:
            tokens = self._draw(logits, drawn, specs, self._drawing)
            for row, token in zip(drawn, tokens.tolist(), strict=True):
                found[row] = token
        return [
            None if way is None or (way and self._drawing is None) else token
            for token, way in zip(found, ways, strict=True)
        ]

    @staticmethod
    def _draw(logits: Logits, rows: list[int], specs: Sequence[SampleSpec], drawing: Drawing) -> torch.Tensor:
        """Tokens for `rows`."""
        draws = [_draw_of(specs[row]) for row in rows]
        if len(rows) == len(specs):
            return drawing(logits.values, draws)
        at = torch.tensor(rows, dtype=torch.int64, device=logits.values.device)
        return drawing(logits.values[at], draws)


def _draw_of(spec: SampleSpec) -> Draw:
    sampling = spec.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=spec.length,
    )
