"""How well logits predict a text, and how far they are from other logits: arithmetic alone.

Probabilities are float64, in slices of few rows: a difference of rounding may be a millionth of a nat,
which float32 sums over a vocabulary would drown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor


class Divergence(msgspec.Struct, frozen=True):
    """How far predictions are from exact ones, over positions. KL is KL(exact ‖ rounded) in nats: what
    expecting the rounded distribution costs, on average, where the exact one holds."""

    kl_mean: float
    kl_p99: float  # 99th percentile of positions, interpolated between neighbours
    kl_max: float
    top1_agreement: float  # share of positions with the same most probable token
    largest_difference: float  # of two logits of one token at one position
    equal_rows: float  # share of positions whose logits have the same bits


def perplexity(surprises: Tensor) -> float:
    """The exponential of the mean of `surprises` (nats): among how many equally probable tokens a
    model would be choosing, were it surprised as much."""
    return math.exp(float(surprises.mean()))


def score(
    logits: Iterable[Tensor], tokens: Tensor, exact: Sequence[Tensor] = ()
) -> tuple[float, list[Divergence]]:
    """Perplexity of `tokens [n]` int64, and the divergence from each of `exact [n, vocab]`.

    `logits` are finite slices `[rows, vocab]` whose rows, one after the other, are n: row i is the
    prediction of token i.
    """
    surprises: list[Tensor] = []
    meters = [Meter() for _ in exact]
    row = 0
    for part in logits:
        end = row + part.shape[0]
        given = log_probabilities(part)
        surprises.append(-given.gather(-1, tokens[row:end, None])[:, 0])
        for meter, whole in zip(meters, exact, strict=True):
            meter.add(whole[row:end], part, given)
        row = end
    if row != len(tokens):
        raise ValueError(f"logits of {row} positions for {len(tokens)} tokens")
    return perplexity(torch.cat(surprises)), [meter.divergence() for meter in meters]


def log_probabilities(logits: Tensor) -> Tensor:
    """`[rows, vocab]` -> the same in float64, each row's exponentials summing to 1."""
    return torch.log_softmax(logits.to(torch.float64), dim=-1)


def kl(exact: Tensor, given: Tensor) -> Tensor:
    """`[rows]` nats: KL(exact ‖ given) of log-probabilities `[rows, vocab]` in float64."""
    # Of equal distributions rounding may make a sum of -1e-16, which no divergence is.
    return (exact.exp() * (exact - given)).sum(-1).clamp(min=0.0)


class Meter:
    """Gathers a `Divergence` over slices of positions."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._agreed = 0
        self._equal = 0
        self._largest = 0.0

    def add(self, exact: Tensor, rounded: Tensor, given: Tensor) -> None:
        """Logits `exact`, `rounded`, and the latter's `log_probabilities`; all `[rows, vocab]`."""
        equal = (exact == rounded).all(-1)
        self._equal += int(equal.sum())
        self._agreed += int((exact.argmax(-1) == rounded.argmax(-1)).sum())
        if bool(equal.all()):
            self._kl.append(torch.zeros(len(equal), dtype=torch.float64))
            return
        self._kl.append(kl(log_probabilities(exact), given))
        self._largest = max(self._largest, float((exact - rounded).abs().max()))

    def divergence(self) -> Divergence:
        """Over everything added so far, which must be something."""
        found = torch.cat(self._kl)
        return Divergence(
            kl_mean=float(found.mean()),
            kl_p99=float(found.quantile(0.99)),
            kl_max=float(found.max()),
            top1_agreement=self._agreed / len(found),
            largest_difference=self._largest,
            equal_rows=self._equal / len(found),
        )
