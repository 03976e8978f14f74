"""How much longer a turn is likely to write: what its tenant's turns have written so far says it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from itertools import accumulate

REMEMBERED = 64  # lengths per tenant, the latest
TENANTS = 1024  # whose lengths are known; who ended a turn longest ago is forgotten first
ENOUGH = 4  # turns that went on from here: fewer say nothing
FIRST = 16.0  # tokens that a turn of which nothing is known is taken to write


class Lengths:
    """Tokens that turns wrote. Each tenant's own: what one's turns do says nothing of another's."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, deque[int]] = OrderedDict()
        self._sums: dict[str, tuple[list[int], list[int]]] = {}  # sorted, and the sums from each on

    def ended(self, tenant: str, written: int) -> None:
        """A turn came to its end by itself or by its limit."""
        lengths = self._lengths.pop(tenant, None) or deque(maxlen=REMEMBERED)
        lengths.append(written)
        self._lengths[tenant] = lengths
        self._sums.pop(tenant, None)
        if len(self._lengths) > TENANTS:
            forgotten, _ = self._lengths.popitem(last=False)
            self._sums.pop(forgotten, None)

    def left(self, tenant: str, written: int, most: int) -> float:
        """Tokens that a turn which has written so many will still write: at least 1, at most `most`.

        The mean of what turns that were as long wrote further; where too few were, as much again as so far
        (the longer something has lasted, the longer it will)."""
        expected = max(float(written), FIRST)
        if tenant in self._lengths:
            ordered, sums = self._sums.get(tenant) or self._sort(tenant)
            first = bisect_right(ordered, written)
            count = len(ordered) - first
            if count >= ENOUGH:
                expected = sums[first] / count - written
        return min(max(expected, 1.0), float(max(most, 1)))

    def _sort(self, tenant: str) -> tuple[list[int], list[int]]:
        ordered = sorted(self._lengths[tenant])
        sums = list(accumulate(reversed(ordered)))[::-1]
        self._sums[tenant] = ordered, sums
        return ordered, sums
