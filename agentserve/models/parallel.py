"""What a decoder asks of the ranks that compute it together, and its products over them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.ops import Linear


class Ranks(Protocol):
    """A tensor-parallel group, as one of its ranks sees it. All ranks make the same calls in the same order.

    **Batch invariance** holds here too: a row of a sum depends on that row of the summands alone.
    """

    @property
    def rank(self) -> int:
        """This one's number, from 0."""
        ...

    @property
    def degree(self) -> int:
        """How many there are."""
        ...

    def summed(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' `[rows, n]`, bit for bit the same on all of them: added up in float32 in the
        order of the ranks, rounded once."""
        ...

    def joined(self, columns: Tensor, width: int) -> Tensor:
        """On the first rank all `[rows, width]`, each rank's `columns` (`Shard.tokens`) beside the others';
        on the others their own."""
        ...


class SummedLinear:
    """A product whose columns the ranks share: each one's is a summand."""

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.summed(self._linear(x))


class JoinedLinear:
    """A product whose rows, `width` in all, the ranks share: each one's are some columns of the result."""

    def __init__(self, linear: Linear, ranks: Ranks, width: int) -> None:
        self._linear = linear
        self._ranks = ranks
        self._width = width

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.joined(self._linear(x), self._width)
