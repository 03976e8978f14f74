"""A mover that moves fingerprints: host slots and disk blocks for the simulation, with faults by seed.

It works like the real one: one lane for host copies and one for the disk, urgent orders first, each
answered once. And it is unkind where the real one may be: pages that are being loaded hold garbage
until the load has ended, and stay garbage if it fails; pages that are being saved must be the same
at its end as at its beginning. Whoever frees, reads or writes a page too early is found by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from agentserve.sim.executor import WrongKV
from tiering.policy.base import Prices
from tiering.types import Block, Change, Move, Transfer, TransferDone, Word

Rows = tuple[npt.NDArray[np.uint64], ...]


class FixedPrices:
    """A price book that learns nothing."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices

    def prices(self) -> Prices:
        return self._prices

    def moved(self, move: Move, blocks: int, seconds: float) -> None:
        """Prices are fixed."""

    def stepped(self, chunks: object, seconds: float) -> None:
        """Prices are fixed."""

    def predicted(self, prefill: tuple[float, float, float]) -> None:
        """Prices are fixed."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Shares, in [0, 1], of what goes wrong."""

    seed: int = 0
    bad: float = 0.0  # of blocks: not moved, or found damaged
    late: float = 0.0  # of transfers: these take `slower` times as long
    slower: float = 1000.0
    cancelled: float = 0.0  # of transfers: taken back before they begin


@dataclass(slots=True)
class _Job:
    transfer: Transfer
    began: float
    ends: float
    cancelled: bool
    seen: list[Rows] = field(default_factory=list)  # SAVE: what the pages held when it began
    moved: int | None = None  # blocks moved when it was taken back under way; None: it was not


@dataclass(slots=True)
class _Lane:
    queue: list[Transfer] = field(default_factory=list)
    job: _Job | None = None


class SimMover:
    def __init__(
        self, memory: Rows, prices: Prices, faults: Faults | None = None, peers: Sequence[SimMover] = ()
    ) -> None:
        """memory: per KV group, the executor's slots as (pages, page_size) fingerprints.
        peers: of the other workers of the machine; their disks can be read."""
        self._memory = memory
        self._faults = faults or Faults()
        self._rng = np.random.default_rng(self._faults.seed)
        self._costs = {
            Move.SAVE: prices.save,
            Move.LOAD: prices.load,
            Move.WRITE: prices.write,
            Move.FETCH: prices.fetch,
            Move.DROP: (0.0, 0.0),
            Move.PROBE: (prices.fetch[0], 0.0),
            Move.BORROW: prices.fetch,
        }
        self._prices = prices
        self._peers = peers
        self._host: dict[int, tuple[bytes, Rows]] = {}
        self._disk: dict[bytes, tuple[bytes, bytes, Rows]] = {}
        self._lanes = (_Lane(), _Lane())
        self._taken_back: list[TransferDone] = []

    @property
    def pending(self) -> int:
        flying = sum(len(lane.queue) + (lane.job is not None) for lane in self._lanes)
        return flying + len(self._taken_back)

    def submit(self, transfer: Transfer, now: float) -> None:
        lane = self._lanes[transfer.move not in (Move.SAVE, Move.LOAD)]
        lane.queue.append(transfer)
        if lane.job is None:
            self._begin(lane, now)

    def change(self, change: Change, now: float) -> None:
        """Hurry a transfer, or take it back: whole if it waits, else at the end of the block it is at."""
        for lane in self._lanes:
            job = lane.job
            if job is not None and job.transfer.id == change.id and change.word is Word.CANCEL:
                self._cut(job, now)
            for at, transfer in enumerate(lane.queue):
                if transfer.id != change.id:
                    continue
                del lane.queue[at]
                if change.word is Word.HURRY:
                    lane.queue.append(msgspec.structs.replace(transfer, urgent=True))
                else:
                    nothing = (False,) * len(transfer.blocks)
                    self._taken_back.append(TransferDone(transfer.id, nothing, 0.0, "", True))
                break

    def _cut(self, job: _Job, now: float) -> None:
        blocks = len(job.transfer.blocks)
        if job.cancelled or job.moved is not None or job.ends <= now or not blocks:
            return
        each = (job.ends - job.began) / blocks
        moved = min(blocks, int((now - job.began) / each) + 1)
        if moved < blocks:
            job.moved = moved
            job.ends = min(job.ends, job.began + moved * each)

    def next_done(self) -> float | None:
        """When the next transfer ends; None: nothing is in flight."""
        if self._taken_back:
            return 0.0
        return min((lane.job.ends for lane in self._lanes if lane.job is not None), default=None)

    def poll(self, now: float) -> list[TransferDone]:
        """Transfers that have ended by `now`, in the order of their ends within a lane."""
        done, self._taken_back = self._taken_back, []
        for lane in self._lanes:
            while lane.job is not None and lane.job.ends <= now:
                job = lane.job
                done.append(self._end(job))
                lane.job = None
                self._begin(lane, job.ends)
        return done

    def _begin(self, lane: _Lane, now: float) -> None:
        if not lane.queue:
            return
        at = next((i for i, transfer in enumerate(lane.queue) if transfer.urgent), 0)
        transfer = lane.queue.pop(at)
        seconds = self._prices.seconds(self._costs[transfer.move], len(transfer.blocks))
        if self._rng.random() < self._faults.late:
            seconds *= self._faults.slower
        cancelled = bool(self._rng.random() < self._faults.cancelled)
        lane.job = job = _Job(transfer, now, now + (0.0 if cancelled else seconds), cancelled)
        if cancelled:
            return
        if transfer.move is Move.SAVE:
            job.seen = [self._read(block) for block in transfer.blocks]
        elif transfer.move in (Move.LOAD, Move.FETCH, Move.BORROW):
            for block in transfer.blocks:
                self._write_pages(block, None)

    def _end(self, job: _Job) -> TransferDone:
        transfer = job.transfer
        if job.cancelled:
            return TransferDone(transfer.id, (False,) * len(transfer.blocks), 0.0, "cancelled", True)
        count = len(transfer.blocks) if job.moved is None else job.moved
        if job.moved is not None and transfer.move not in (Move.SAVE, Move.WRITE, Move.DROP):
            return TransferDone(transfer.id, (False,) * len(transfer.blocks), job.ends - job.began, "", True)
        ok = tuple(index < count and self._move(job, index) for index in range(len(transfer.blocks)))
        error = "" if all(ok) else "a block was not moved"
        return TransferDone(transfer.id, ok, job.ends - job.began, error)

    def _move(self, job: _Job, index: int) -> bool:
        block, move = job.transfer.blocks[index], job.transfer.move
        good = not self._rng.random() < self._faults.bad
        match move:
            case Move.SAVE:
                rows = self._read(block)
                if not _same(rows, job.seen[index]):
                    raise WrongKV(f"transfer {job.transfer.id}: a page changed while it was saved")
                self._host.pop(block.slot, None)
                if good:
                    self._host[block.slot] = (block.key, rows)
            case Move.WRITE:
                held = self._in_host(block)
                good = good and held is not None
                if good and held is not None:
                    self._disk[block.key] = (block.parent, block.tokens, held)
            case Move.PROBE:
                good = good and self._lent(block) is not None
            case Move.DROP:
                good = True
                self._disk.pop(block.key, None)
            case Move.LOAD | Move.FETCH | Move.BORROW:
                good = self._bring(move, block, good)
        return good

    def _bring(self, move: Move, block: Block, good: bool) -> bool:
        """Fill a block's pages from below; a bad copy of our own is deleted."""
        match move:
            case Move.LOAD:
                rows = self._in_host(block)
            case Move.FETCH:
                rows = _verified(self._disk.get(block.key), block)
            case _:
                rows = self._lent(block)
        if good and rows is not None:
            self._write_pages(block, rows)
            return True
        if move is Move.LOAD:
            self._host.pop(block.slot, None)
        elif move is Move.FETCH:
            self._disk.pop(block.key, None)
        return False

    def _lent(self, block: Block) -> Rows | None:
        """What a peer has of it on disk. A question names no tokens, and is answered by the key alone."""
        held = next((peer._disk[block.key] for peer in self._peers if block.key in peer._disk), None)
        return held[2] if held is not None and not block.tokens else _verified(held, block)

    def _in_host(self, block: Block) -> Rows | None:
        """What a slot has; None if it was found bad before."""
        found = self._host.get(block.slot)
        if found is None:
            return None
        key, rows = found
        if key != block.key:
            raise WrongKV(f"host slot {block.slot} has another block than a transfer says")
        return rows

    def _read(self, block: Block) -> Rows:
        return tuple(slots[page].copy() for slots, page in zip(self._memory, block.pages, strict=True))

    def _write_pages(self, block: Block, rows: Rows | None) -> None:
        for group, (slots, page) in enumerate(zip(self._memory, block.pages, strict=True)):
            garbage = self._rng.integers(0, 1 << 63, slots.shape[1], dtype=np.uint64)
            slots[page] = garbage if rows is None else rows[group]


def _verified(held: tuple[bytes, bytes, Rows] | None, block: Block) -> Rows | None:
    return held[2] if held is not None and held[:2] == (block.parent, block.tokens) else None


def _same(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
