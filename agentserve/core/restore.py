"""Restores: bringing blocks of a session back from below, and who waits for that.

A restore pins the block that its blocks follow and fresh pages for them; as its transfers end, what
arrived is entered into the tree in order, and when all have ended everything is unpinned. A block that
did not arrive ends the run: those behind it are freed, and their tokens are computed.

A turn waits for a restore only as long as computing the same tokens would take; then it stops waiting
and computes. A restore that nobody needs any more is taken back. Until its last answer has come it keeps
its own pages, and its session may have another restore meanwhile: an answer touches the pages of its own
order only. What had arrived before it was taken back stays, idle.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

from agentserve.core.kv import KVManager
from agentserve.core.ledger import Known, Ledger
from agentserve.core.pages import COPIED
from agentserve.messages import pack_tokens
from agentserve.types import SessionId
from tiering.manager import TierManager
from tiering.policy.base import Prices
from tiering.types import Block, Tier, TierFault, Transfer

LOAD_SHARE = 2  # loads, and saves with them, pin at most one page in so many
ATTEMPTS = 16  # restores per turn: pressure may take away what one brought


class Begun(Enum):
    """What became of an attempt to restore."""

    ORDERED = auto()
    NOTHING = auto()  # there is nothing to bring, or it does not pay
    NO_ROOM = auto()  # it would pay, but pages lack now


@dataclass(slots=True, eq=False)
class Restore:
    session: SessionId
    namespace: bytes
    keys: list[bytes]
    tokens: list[array[int]]  # of each block
    pages: list[tuple[int, ...]]
    parent: tuple[int, ...] | None
    tiers: list[Tier]
    deadline: float
    waits: bool  # a turn waits for it
    overdue: bool = False  # computing would have been faster
    transfers: list[int] = field(default_factory=list)
    arrived: list[bool | None] = field(default_factory=list)  # None: not known yet
    entered: list[tuple[int, ...]] = field(default_factory=list)
    left: int = 0  # transfers in flight


class Restores:
    def __init__(self, kv: KVManager, manager: TierManager, ledger: Ledger) -> None:
        self._kv = kv
        self._manager = manager
        self._ledger = ledger
        self._jobs: dict[SessionId, Restore] = {}  # but for those that were taken back
        self._transfers: dict[int, tuple[Restore, int]] = {}  # id -> its restore, place of its first block
        self._attempts: dict[SessionId, int] = {}  # of turns that wait for admission
        self._brought: dict[SessionId, list[Tier]] = {}  # blocks brought for them so far

    # --- who waits -------------------------------------------------------------------------

    def expect(self, session: SessionId) -> None:
        """A turn has begun to wait for admission."""
        self._attempts[session] = 0
        self._brought[session] = []

    def dismiss(self, session: SessionId) -> list[Tier]:
        """It waits no more, and what is still on its way comes too late. Returns where the blocks came
        from that were brought for it."""
        self._attempts.pop(session, None)
        self.give_up(session)
        return self._brought.pop(session, [])

    def give_up(self, session: SessionId) -> None:
        """Nobody needs what is on its way for the session: take it back."""
        job = self._jobs.pop(session, None)
        for number in job.transfers if job is not None else ():
            self._manager.flights.recall(number)

    def holds_up(self, session: SessionId, now: float) -> bool:
        """Does its turn wait for a restore?"""
        self.expire(now)
        job = self._jobs.get(session)
        return job is not None and job.waits

    def expire(self, now: float) -> None:
        """Restores that have taken too long are given up by those who wait for them, for this turn."""
        for job in [job for job in self._jobs.values() if job.deadline <= now and not job.overdue]:
            job.overdue = True
            if job.waits:
                self._attempts[job.session] = ATTEMPTS
                self.give_up(job.session)
                self._manager.health.note((TierFault.LATE,))

    @property
    def next_deadline(self) -> float | None:
        return min((job.deadline for job in self._jobs.values() if not job.overdue), default=None)

    @property
    def under_way(self) -> bool:
        """Whether a restore is likely to end soon. One that is overdue may never: a disk can hang."""
        return any(not job.overdue for job in self._jobs.values())

    @property
    def promised(self) -> int:
        """Blocks brought for turns that have not been admitted yet: idle, but not to be had."""
        return sum(len(brought) for brought in self._brought.values())

    def lies_below(self, session: SessionId, index: int) -> bool:
        """Whether full block `index` of a session at rest has a copy below the device."""
        known = self._ledger.known.get(session)
        if known is None or index >= len(known.tokens) // self._kv.page_size:
            return False
        return self._manager.where(self._ledger.key(known, index)) is not None

    def lacking(self, known: Known) -> int:
        """Tokens of the session that have KV neither on the device nor below."""
        size = self._kv.page_size
        cached = self._kv.cached_tokens(known.namespace, known.tokens)
        start, end = cached // size, len(known.tokens) // size
        below = len(self._manager.run(islice(self._ledger.keys(known, end), start, end)))
        return len(known.tokens) - max(cached, (start + below) * size)

    # --- beginning -------------------------------------------------------------------------

    def begin(
        self, known: Known, prices: Prices, now: float, room: int, *, waits: bool, waited: float = 0.0
    ) -> Begun:
        """Restore what of the session is below and cheaper to bring than to compute, in at most `room`
        pages. waits: its turn waits for it, and gets all of that or, for want of room, none yet. waited:
        seconds of its patience that asking where they are has taken."""
        kv, size = self._kv, self._kv.page_size
        if self._manager.empty or not known.tokens:  # a first turn that was rolled back leaves none
            return Begun.NOTHING
        job = self._jobs.get(known.id)
        if job is not None and (not waits or self._join(job, known, prices, now)):
            return Begun.ORDERED if job.waits else Begun.NOTHING
        if waits and self._attempts.get(known.id, ATTEMPTS) >= ATTEMPTS:
            return Begun.NOTHING
        share = min(pool.pages for pool in kv.pools) // LOAD_SHARE
        limit = (len(known.tokens) - 1) // size
        path = kv.matched(known.namespace, known.tokens, len(known.tokens) - 1)
        start = len(path[0])
        if waits:  # what it follows must stay: idle pages among `room` that are not to be had
            room -= sum(kv.pools[0].holds(page) == 0 for page in path[0])
        room = min(room, share - kv.moving)
        most = limit if waits else min(limit, start + max(room, 0))
        wanted = self._manager.run(islice(self._ledger.keys(known, most), start, most))
        if waits and room < limit - start:
            whole = self._worthwhile(prices, start, wanted, urgent=True)
            if room < whole <= share:
                return Begun.NO_ROOM
        tiers = wanted[: max(room, 0)]
        count = self._worthwhile(prices, start, tiers, urgent=waits)
        patience = prices.recompute(start * size, count * size) - waited
        if not count or patience <= 0:
            return Begun.NOTHING
        parent = tuple(pages[-1] for pages in path) if start else None
        if parent is not None:
            kv.pin(parent)  # before pages are taken: it must not be evicted for them
        fresh = kv.take_pinned(count)
        if fresh is None:
            if parent is not None:
                kv.unpin(parent)
            return Begun.NO_ROOM if waits else Begun.NOTHING
        keys = [self._ledger.key(known, start + index) for index in range(count)]
        runs = [known.tokens[(start + i) * size : (start + i + 1) * size] for i in range(count)]
        tiers = tiers[:count]
        job = Restore(known.id, known.namespace, keys, runs, fresh, parent, tiers, now + patience, waits)
        self._order(job, known.keys[start - 1] if start else known.namespace)
        return Begun.ORDERED

    def _join(self, job: Restore, known: Known, prices: Prices, now: float) -> bool:
        """A restore is under way already: a turn that has come waits for it, if it is of its tokens, and it
        goes before others. One of other tokens, or one that takes too long, is taken back."""
        if job.waits:
            return True
        last = (len(known.tokens) - 1) // self._kv.page_size
        if job.overdue or job.keys[-1] not in self._ledger.keys(known, last):
            self.give_up(job.session)
            return False
        self._attempts[job.session] += 1
        job.waits = True
        job.deadline = now + prices.recompute(0, len(job.keys) * self._kv.page_size)
        for number in job.transfers:
            self._manager.flights.hurry(number)
        return True

    def _worthwhile(self, prices: Prices, start: int, tiers: Sequence[Tier], *, urgent: bool) -> int:
        """How many of the blocks to bring: 0 if none saves any time."""
        flights = self._manager.flights
        host = flights.queue(prices, Tier.HOST, urgent=urgent)
        disk = flights.queue(prices, Tier.DISK, urgent=urgent)
        return best_cut(prices, start, tiers, self._kv.page_size, (host, disk))[0]

    def _order(self, job: Restore, before: bytes) -> None:
        """before: the key of the block that its first one follows."""
        job.arrived = [None] * len(job.keys)
        parents = [before, *job.keys[:-1]]
        blocks = [
            Block(key, parent, pack_tokens(run), pages)
            for key, parent, run, pages in zip(job.keys, parents, job.tokens, job.pages, strict=True)
        ]
        at = 0
        for transfer in self._manager.restore(blocks, urgent=job.waits):
            self._transfers[transfer.id] = (job, at)
            job.transfers.append(transfer.id)
            at += len(transfer.blocks)
            job.left += 1
        self._jobs[job.session] = job
        if job.waits:
            self._attempts[job.session] += 1

    # --- ending ----------------------------------------------------------------------------

    def finished(self, transfer: Transfer, ok: Sequence[bool]) -> None:
        """One of its transfers has ended. Other people's transfers are ignored."""
        found = self._transfers.pop(transfer.id, None)
        if found is None:
            return
        job, at = found
        job.arrived[at : at + len(transfer.blocks)] = ok
        job.left -= 1
        while len(job.entered) < len(job.keys) and job.arrived[len(job.entered)]:
            self._enter_next(job)
        if not job.left:
            self._end(job)

    def _enter_next(self, job: Restore) -> None:
        index = len(job.entered)
        before = job.entered[-1] if index else job.parent
        block = self._kv.enter(job.namespace, before, job.tokens[index], job.pages[index])
        job.entered.append(block)
        if self._manager.copied(job.keys[index]):
            self._kv.mark(job.keys[index], block, COPIED)

    def _end(self, job: Restore) -> None:
        for block in job.pages[len(job.entered) :]:
            self._kv.unpin(block)
        for block in reversed(job.entered):
            self._kv.unpin(block)
        if job.parent is not None:
            self._kv.unpin(job.parent)
        if self._jobs.get(job.session) is not job:
            return  # it was taken back: what its session does now is another matter
        del self._jobs[job.session]
        if job.session in self._brought:
            self._brought[job.session] += job.tiers[: len(job.entered)]
            if len(job.entered) < len(job.keys):
                self._attempts[job.session] = ATTEMPTS  # what failed once is computed

    def check(self) -> None:
        """Raise AssertionError if a restore hangs in the air."""
        jobs = [*self._jobs.values(), *(job for job, _ in self._transfers.values())]
        for job in jobs:
            flying = sum(1 for other, _ in self._transfers.values() if other is job)
            assert flying == job.left > 0, f"{job.session}: a restore without transfers"
            back = [self._manager.flights.recalled(at) for at in job.transfers if at in self._transfers]
            current = self._jobs.get(job.session) is job
            assert not any(back) if current else all(back), f"{job.session}: what was not taken back"


def best_cut(
    prices: Prices, start: int, tiers: Sequence[Tier], size: int, queues: tuple[float, float]
) -> tuple[int, float]:
    """How many of the blocks from block `start` on to bring, and the seconds that it saves: the cut, where
    the tier changes, that saves most time against computing the same tokens; 0 if none saves any. The two
    lanes work at the same time. tiers: where each is; size: tokens of a block; queues: of host and disk."""
    best, best_gain = 0, 0.0
    host = disk = 0
    for index, tier in enumerate(tiers):
        host += tier is Tier.HOST
        disk += tier is Tier.DISK
        count = index + 1
        if count < len(tiers) and tiers[count] is tier:
            continue
        bring = max(
            queues[0] + prices.seconds(prices.load, host) if host else 0.0,
            queues[1] + prices.seconds(prices.fetch, disk) if disk else 0.0,
        )
        gain = prices.recompute(start * size, count * size) - bring
        if gain > best_gain:
            best, best_gain = count, gain
    return best, best_gain
