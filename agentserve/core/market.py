"""What the tiers are worth to whom: the market that a policy is shown, and the order in which blocks go.

Reckoned at most once per entry of the core's log, so that asking often costs little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger, Stage
from agentserve.core.line import arrival, exchanged
from agentserve.core.nodes import Node
from agentserve.core.pages import COPIED
from agentserve.core.pressure import Verdict
from agentserve.core.session import Session
from agentserve.core.victims import Way
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Choice, Decision, Market, Policy, Prices, Residency
from tiering.types import DiskEntry, Move, Tier, TierFault

STALE = 1.0  # seconds for which a session's residency serves to rank it
EXAMINED = 16  # waiting sessions that the market is reckoned from


class PriceBook(Protocol):
    """Prices, learned from what moving and computing took. Deterministic."""

    def prices(self) -> Prices: ...

    def moved(self, move: Move, blocks: int, seconds: float) -> None: ...

    def stepped(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """chunks: (start, tokens) of each."""
        ...

    def predicted(self, prefill: tuple[float, float, float]) -> None:
        """Computing costs this: (fixed, per token, per pair); whoever says so knows better than steps do."""
        ...


class TierSetup(msgspec.Struct, frozen=True):
    """What the tiers below a core are built from: values, kept in its log."""

    policy: str
    host_slots: int
    disk_bytes: int
    block_bytes: int
    prices: Prices
    entries: tuple[DiskEntry, ...] = ()
    staging: bool = False  # host slots are for the way to the disk only
    peers: bool = False  # there are other workers on this machine, whose disks may be asked
    faults: tuple[TierFault, ...] = ()  # what was found wrong when the disk was opened
    disk_error: str = ""  # why there is no disk, where there should be one


class TierParts(msgspec.Struct, frozen=True):
    """A setup and the objects it names."""

    setup: TierSetup
    policy: Policy
    book: PriceBook


class Queues(Protocol):
    """The scheduler's queues, to look at."""

    running: list[Session]
    waiting: list[Session]

    @property
    def spoken_for(self) -> int:
        """Blocks that running sessions still need for their input."""
        ...


class Valuation:
    def __init__(self, parts: TierParts, kv: KVManager, manager: TierManager, queues: Queues) -> None:
        self.ledger = Ledger(kv.page_size, self._worth)
        self._policy = parts.policy
        self._book = parts.book
        self._kv = kv
        self._manager = manager
        self._queues = queues
        self._now = 0.0
        self._market: Market | None = None
        self._worths: dict[tuple[SessionId, Tier], float] = {}

    def at(self, now: float) -> None:
        """The time of an entry of the log. Who changes something says so by `changed`."""
        if now != self._now:
            self._now = now
            self.changed()

    def changed(self) -> None:
        self._market = None
        self._worths.clear()

    def sync(self) -> None:
        """Pass on what the owners of the books have noted for each other."""
        manager, ledger = self._manager, self.ledger
        for key in ledger.adopted:
            if ledger.owned(key):
                manager.touch(key)
        for key in ledger.orphaned:
            if not ledger.owned(key):
                manager.neglect(key)
        for key in manager.lost:
            if not manager.copied(key):
                self._kv.unmark(key, COPIED)
        ledger.adopted.clear()
        ledger.orphaned.clear()
        manager.lost.clear()
        self.changed()

    # --- the market ------------------------------------------------------------------------

    def market(self) -> Market:
        """The tiers as they are now."""
        if self._market is None:
            self._market = self._reckon()
        return self._market

    def _reckon(self) -> Market:
        kv, manager, queues, prices = self._kv, self._manager, self._queues, self._book.prices()
        demand, queue = 0, 0.0
        for session in queues.waiting[:EXAMINED]:
            have = kv.cached_tokens(session.namespace, session.tokens)
            demand += -(-(len(session.tokens) - have) // kv.page_size)
            queue += prices.recompute(have, len(session.tokens) - have)
        return Market(
            now=self._now,
            device=min(pool.pages for pool in kv.pools),
            device_free=self.without_loss,
            demand=demand,
            waiting=len(queues.waiting),
            queue=queue,
            host=manager.host_slots,
            host_free=manager.host_free,
            disk=manager.disk_capacity,
            disk_free=manager.disk_free,
            parked=self._parked,
            prices=prices,
        )

    @property
    def _parked(self) -> int:
        """Sessions at rest: those that are known and in no queue. Not counted: there may be thousands."""
        return len(self.ledger.known) - len(self._queues.running) - len(self._queues.waiting)

    def check(self) -> None:
        """Raise AssertionError if the count of sessions at rest is wrong."""
        resting = sum(known.stage is Stage.RESTING for known in self.ledger.known.values())
        assert self._parked == resting, f"{resting} sessions are at rest, not {self._parked}"

    @property
    def without_loss(self) -> int:
        """Blocks to be had without losing anything: free, or idle with a mark."""
        return min(pool.free for pool in self._kv.pools) + self._kv.pools[0].spare

    def room_without_loss(self, promised: int) -> int:
        """Of these, blocks that nobody else counts on. promised: brought for turns that wait."""
        return self.without_loss - promised - self._queues.spoken_for

    def measure(self, known: Known) -> Residency:
        """Where the full blocks of a session are."""
        kv, blocks = self._kv, len(known.tokens) // self._kv.page_size
        device = len(kv.matched(known.namespace, known.tokens, len(known.tokens))[0])
        keys = self.ledger.keys(known, blocks)
        known.residency = self._manager.residency(keys[:blocks], device)
        known.measured = self._now
        return known.residency

    def under_pressure(self, known: Known, verdict: Verdict) -> Decision:
        """What becomes of the KV of a turn that was preempted, as its price says. Where the host is short of
        slots its copies go on to the disk, so that they can leave without loss, too."""
        if verdict.way is not Way.SWAP:
            return Decision(Choice.HOLD, math.inf, "pressure: cheaper to compute again", verdict.seconds)
        manager, residency = self._manager, self.measure(known)
        short = manager.disk_bytes > 0 and residency.device - residency.copied > manager.host_free
        choice = Choice.DISK if manager.staging or short else Choice.HOST
        return Decision(choice, math.inf, "pressure: cheaper to move out", verdict.seconds)

    def ranked(self, waiting: Sequence[Session]) -> list[Session]:
        """Waiting turns as they came; those of one tenant by priority, then as the policy says."""
        if len(waiting) < 2:
            return list(waiting)
        market = self.market()

        def place(session: Session) -> tuple[float, ...]:
            turn = session.running_turn
            return (turn.rank[0], *self._policy.rank(session.id, turn.arrived, market))

        return exchanged(sorted(waiting, key=arrival), sorted(waiting, key=place))

    # --- worth -----------------------------------------------------------------------------

    def _worth(self, known: Known, tier: Tier) -> float:
        """What a block of a session at rest, or on disk of a running one, is worth in `tier`."""
        if known.stage is Stage.RESTING and not known.told:
            return math.inf  # its turn has just ended: what that means is heard in a moment
        worth = self._worths.get((known.id, tier))
        if worth is None:
            if self._now - known.measured > STALE:
                self.measure(known)
            worth = self._policy.worth(known.id, tier, known.residency, self.market())
            self._worths[known.id, tier] = worth
        return worth

    def order(self, node: Node) -> tuple[int, float]:
        """(grade, worth) of the last block of a leaf, for the eviction queue. A tail goes as what it hangs
        on goes: it keeps that from going first."""
        if node.tail:
            assert node.parent is not None
            node = node.parent
            if node.parent is None:
                return 0, 0.0  # less than a page of KV in all
        key, page = node.keys[-1], node.pages[0][-1]
        wanted = self.ledger.wanted(key)
        if wanted is not None:
            return 2, -wanted  # who is last in line is served last
        if self._kv.pools[0].marks(page) and not self.ledger.kept(key):
            return 0, 0.0
        return 1, self.ledger.best(key, node.start + node.blocks - 1, Tier.DEVICE)
