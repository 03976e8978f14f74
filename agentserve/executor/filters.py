"""From candidate logits to one drawn token: temperature, top-k, top-p, min-p, in that order.

The order and the treatment of ties are those of Hugging Face's logits warpers: top-k keeps all
that tie with the k-th; top-p works on what top-k left, renormalised, and keeps the token that
crosses the threshold. numpy on one thread, in fp64: a row's result depends on neither its batch
mates nor the number of threads. The vocabulary is sorted as a whole only where top-p keeps most
of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentserve.types import Sampling

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_FIRST_WIDTH = 64
_WIDEN = 16


def _threshold(values: npt.NDArray[np.floating], k: int) -> float:
    """The k-th largest of `values`, 1 <= k <= len(values)."""
    cut = len(values) - k
    return float(np.partition(values, cut)[cut])


def nucleus(weights: Floats, top_p: float) -> Indices:
    """Indices, ascending, of the smallest set of largest `weights` that reaches `top_p` of their sum.

    Equal weights are taken in index order. At least one index is returned.
    """
    total = len(weights)
    goal = top_p * float(weights.sum())
    width = min(_FIRST_WIDTH, total)
    while True:
        # Only values are sorted: they are what a full sort would begin with, whatever the ties.
        largest = weights if width == total else np.partition(weights, total - width)[total - width :]
        descending = np.sort(largest)[::-1]
        reached = np.cumsum(descending)
        if width == total or reached[-1] >= goal:
            break
        width = min(width * _WIDEN, total)
    count = min(int(np.searchsorted(reached, goal, side="left")) + 1, width)
    last = descending[count - 1]
    above = np.flatnonzero(weights > last)
    ties = np.flatnonzero(weights == last)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))


def draw(values: npt.NDArray[np.float32], sampling: Sampling, u: float) -> int:
    """Index into `values` (fp32 logits of the candidates, -inf allowed) of the token that `u` picks.

    `u` in [0, 1) inverts the cumulative distribution in index order. `sampling.temperature` > 0.
    """
    peak = float(values.max())
    if peak == -np.inf:  # nothing is likely: every candidate is as good as any other
        return int(u * len(values))
    kept: Indices | None = None
    if 0 < sampling.top_k < len(values):
        kept = np.flatnonzero(values >= _threshold(values, sampling.top_k))
        values = values[kept]
    weights: Floats = values.astype(np.float64)
    weights -= peak
    weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        inside = nucleus(weights, sampling.top_p)
        weights = weights[inside]
        kept = inside if kept is None else kept[inside]
    if sampling.min_p > 0.0:
        # The best weight is exp(0) = 1, so min_p is the threshold itself.
        weights = np.where(weights >= min(sampling.min_p, 1.0), weights, 0.0)
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, u * float(sums[-1]), side="right"))
    return index if kept is None else int(kept[index])
