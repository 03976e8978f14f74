"""What it takes to have a victim's KV again: by computing, from below, or on another worker.

All in seconds and by the one price book (`tiering/prices.py`), which parking, restores and admission use as
well; without tiers by the step's cost model, where there is one, else by what steps were seen to take.
Nothing is ordered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from agentserve.core.cost import StepCost
from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger
from agentserve.core.restore import best_cut
from agentserve.core.session import Session
from tiering.manager import TierManager
from tiering.policy.base import Prices
from tiering.prices import PriceBook, starting_prices
from tiering.types import Tier


class Quotes(Protocol):
    """Of a running turn of which the blocks from `first` on go."""

    def recompute(self, session: Session, first: int) -> float:
        """What has a copy below is brought if that is quicker; the rest is computed."""
        ...

    def swap(self, session: Session, first: int, most: float) -> float | None:
        """All of it gets copies below; out and in again. None: no room, or it takes `most` or more."""
        ...

    def elsewhere(self, session: Session) -> float:
        """Another worker reads what is on this one's disk if that is quicker, and computes the rest."""
        ...

    def stepped(self, read: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step took so long. read: (start, tokens) of the prompts in it."""
        ...


class ComputedQuotes:
    """There is nothing below: what goes is computed."""

    def __init__(self, page_size: int, cost: Callable[[], StepCost]) -> None:
        self._size = page_size
        self._cost = cost
        self._seen = PriceBook(starting_prices(1, page_size))

    def stepped(self, read: Sequence[tuple[int, int]], seconds: float) -> None:
        if read and not self._cost().known:
            self._seen.stepped(read, seconds)

    def recompute(self, session: Session, first: int) -> float:
        start = first * self._size
        return self._seconds(start, session.computed - start)

    def swap(self, session: Session, first: int, most: float) -> float | None:
        return None

    def elsewhere(self, session: Session) -> float:
        return self._seconds(0, len(session.tokens))

    def _seconds(self, start: int, tokens: int) -> float:
        cost = self._cost()
        if not cost.known:
            return self._seen.prices().recompute(start, tokens)
        return cost.step([(start, tokens)]) if tokens > 0 else 0.0


class TierQuotes:
    """By the book that the tiers keep."""

    def __init__(
        self,
        kv: KVManager,
        manager: TierManager,
        ledger: Ledger,
        prices: Callable[[], Prices],
        *,
        peers: bool,
    ) -> None:
        """peers: other workers of this machine read this one's disk."""
        self._kv = kv
        self._manager = manager
        self._ledger = ledger
        self._prices = prices
        self._peers = peers

    def recompute(self, session: Session, first: int) -> float:
        prices, size = self._prices(), self._kv.page_size
        known, full = self._ledger.known[session.id], session.computed // size
        below = self._manager.run(islice(self._ledger.keys(known, full), first, full))
        flights = self._manager.flights
        host = flights.queue(prices, Tier.HOST, urgent=True)
        disk = flights.queue(prices, Tier.DISK, urgent=True)
        count, gain = best_cut(prices, first, below, size, (host, disk))
        start = (first + count) * size
        brought = prices.recompute(first * size, count * size) - gain
        return brought + prices.recompute(start, session.computed - start)

    def swap(self, session: Session, first: int, most: float) -> float | None:
        manager, prices, size = self._manager, self._prices(), self._kv.page_size
        full = session.computed // size
        if first >= full or not manager.host_slots:
            return None
        flights, back = manager.flights, full - first
        rest = prices.recompute(full * size, session.computed - full * size)
        out = flights.queue(prices, Tier.HOST)
        if manager.staging:
            if not manager.disk_bytes:
                return None
            queue = flights.queue(prices, Tier.DISK, urgent=True)
            rest += queue + prices.seconds(prices.fetch, back)
            out += flights.queue(prices, Tier.DISK)
        else:
            rest += flights.queue(prices, Tier.HOST, urgent=True) + prices.seconds(prices.load, back)
        bare = self._bare(self._ledger.known[session.id], full, most - rest - out)
        if bare > (manager.disk_capacity if manager.staging else manager.host_slots):
            return None
        total = rest + out + self._out(prices, bare)
        return total if total < most else None

    def stepped(self, read: Sequence[tuple[int, int]], seconds: float) -> None:
        """The tiers tell their book themselves."""

    def _bare(self, known: Known, full: int, most: float) -> int:
        """Blocks without a copy below; no longer counted once moving them takes `most` seconds."""
        prices, bare = self._prices(), 0
        for key in islice(self._ledger.keys(known, full), full):
            if not self._manager.copied(key):
                bare += 1
                if self._out(prices, bare) >= most:
                    break
        return bare

    def _out(self, prices: Prices, blocks: int) -> float:
        out = prices.seconds(prices.save, blocks)
        return out + prices.seconds(prices.write, blocks) if self._manager.staging else out

    def elsewhere(self, session: Session) -> float:
        prices, size = self._prices(), self._kv.page_size
        tokens, found = len(session.tokens), 0
        computed = prices.recompute(0, tokens)
        if not self._peers:
            return computed
        for key in islice(
            self._ledger.keys(self._ledger.known[session.id], (tokens - 1) // size), tokens // size
        ):
            if not self._manager.has(key, Tier.DISK):
                break
            found += 1
        read = prices.seconds(prices.fetch, found)
        return min(computed, read + prices.recompute(found * size, tokens - found * size))
