"""The tier manager: which block is in which host slot or on disk, and what is being moved.

Owner of host slots, of the index of the disk, and of transfers in flight. It writes orders; whoever
moves bytes answers each once. Between the two the slots and disk entries that a transfer names are
pinned. It knows keys, not sessions: who shares a block and what it is worth it asks its `Ranking`.

A copy counts once it is whole: a block that is being saved or written is nowhere yet. Blocks that
nobody owns go first, the least recently used first; then those of the least worth, and only for the
sake of something worth more. The host keeps within its slots and the disk within its bytes, blocks on
their way there included. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from tiering.copies import FIRST, Copies, Copy, Elsewhere, Nobody, Ranking, Standing
from tiering.flights import LANES, MOST_BLOCKS, Flights
from tiering.health import DiskHealth
from tiering.policy.base import Residency
from tiering.types import Block, DiskEntry, Move, Tier, Transfer, TransferDone

AHEAD = 8  # transfers that a lane's saves or writes may have waiting
HEADER_BYTES = 256  # what a block takes on disk besides its KV, at most
DISK_PAUSE = 5.0  # seconds without writes after a transfer of which nothing reached the disk


class TierManager:
    """Not thread-safe; deterministic: the same calls give the same orders."""

    def __init__(
        self,
        host_slots: int,
        disk_bytes: int,
        block_bytes: int,
        entries: Iterable[DiskEntry] = (),
        *,
        staging: bool = False,
    ) -> None:
        """entries: what is on disk already. staging: host slots are for the way to the disk only, and free
        again when a block is there."""
        if host_slots < 0 or disk_bytes < 0 or block_bytes < 1:
            raise ValueError("tiers: slots and bytes must not be negative, and a block has bytes")
        self.host_slots, self.disk_bytes, self.block_bytes = host_slots, disk_bytes, block_bytes
        self.staging = staging
        self.ranking: Ranking = Nobody()
        self.disk_used = 0
        self.health = DiskHealth()
        self.lost: list[bytes] = []  # keys that have no copy below any more; emptied by the reader
        self.moved: dict[Move, tuple[int, float]] = {}  # blocks and seconds
        self.failed: dict[Move, int] = {}
        self.evicted: dict[Tier, int] = {Tier.HOST: 0, Tier.DISK: 0}
        self._free = list(range(host_slots - 1, -1, -1))
        self._host = Copies(Tier.HOST)
        self._disk = Copies(Tier.DISK)
        self._peers = Elsewhere()
        self._dropping: dict[bytes, int] = {}  # key -> bytes: gone for us, not yet by the disk
        self.flights = Flights()
        self._paused_until = -math.inf
        for entry in entries:
            if entry.key not in self._disk and disk_bytes > 0:
                self._disk[entry.key] = Copy(nbytes=entry.nbytes, ready=True)
                self.disk_used += entry.nbytes
        self._told = self.disk_used  # what was there at start may be more than is allowed now
        self._make_disk_room(0, FIRST)

    # --- where blocks are ------------------------------------------------------------------

    def source(self, key: bytes) -> Move | None:
        """How the block is brought fastest from below the device; None: it is nowhere."""
        if self._host.has(key):
            return Move.LOAD
        if self._disk.has(key):
            return Move.FETCH
        return Move.BORROW if key in self._peers else None

    def where(self, key: bytes) -> Tier | None:
        """The fastest tier below the device that has the block whole; another worker's disk is a disk."""
        source = self.source(key)
        return LANES[source] if source is not None else None

    def has(self, key: bytes, tier: Tier, *, arriving: bool = False) -> bool:
        """Is the block in `tier`, or, with `arriving`, on its way there?"""
        return (self._host if tier is Tier.HOST else self._disk).has(key, arriving=arriving)

    def copied(self, key: bytes) -> bool:
        """Whether there is a copy of our own. A peer's may go at any time."""
        return self._host.has(key) or self._disk.has(key)

    def run(self, keys: Iterable[bytes]) -> list[Tier]:
        """Where the leading keys are, as far as they are to be had below without a gap."""
        host, disk = self._host, self._disk  # asked for every block of every waiting turn, in every step
        found: list[Tier] = []
        for key in keys:
            copy = host.get(key)
            if copy is not None and copy.ready:
                found.append(Tier.HOST)
                continue
            copy = disk.get(key)
            if (copy is None or not copy.ready) and key not in self._peers:
                break
            found.append(Tier.DISK)
        return found

    def residency(self, keys: Sequence[bytes], device: int) -> Residency:
        """Where blocks are, of which the first `device` are on the device."""
        host = disk = copied = 0
        if not self.empty:
            for index, key in enumerate(keys):
                if index < device:
                    copied += self.copied(key)
                    continue
                tier = self.where(key)
                host += tier is Tier.HOST
                disk += tier is Tier.DISK
        return Residency(device, host, disk, len(keys) - device - host - disk, copied)

    @property
    def save_room(self) -> int:
        """Blocks that may still be ordered to be saved: more would only wait."""
        return AHEAD * MOST_BLOCKS - self.flights.blocks(Move.SAVE)

    @property
    def write_room(self) -> int:
        """The same of writes. At most half of a host tier is pinned by them, however slow the disk is."""
        slots = self.host_slots if self.staging else max(self.host_slots, 2) // 2
        return min(AHEAD * MOST_BLOCKS, slots) - self.flights.blocks(Move.WRITE)

    @property
    def empty(self) -> bool:
        """Whether nothing is below, as far as is known."""
        return not self._host and not self._disk and not self._peers

    @property
    def host_free(self) -> int:
        return len(self._free)

    @property
    def host_used(self) -> int:
        return self.host_slots - len(self._free)

    @property
    def disk_blocks(self) -> int:
        return len(self._disk)

    @property
    def disk_capacity(self) -> int:
        return self.disk_bytes // (self.block_bytes + HEADER_BYTES)

    @property
    def disk_free(self) -> int:
        return max(0, self.disk_bytes - self.disk_used) // (self.block_bytes + HEADER_BYTES)

    @property
    def moving(self) -> int:
        """Blocks in transfers now."""
        return self.flights.blocks()

    # --- orders ----------------------------------------------------------------------------

    def save(self, blocks: Sequence[Block], standing: Standing) -> int:
        """Copy device blocks to the host, in order, making room by what stands below `standing`.
        Returns how many of the leading blocks are there or on their way."""
        fresh = [block for block in blocks if block.key not in self._host]
        self._make_host_room(len(fresh), FIRST if self.staging else standing)
        taken: list[Block] = []
        count = 0
        for block in blocks:
            copy = self._host.get(block.key)
            if copy is None:
                if not self._free:
                    break
                copy = self._host[block.key] = Copy(slot=self._free.pop(), pins=1)
                taken.append(Block(block.key, block.parent, block.tokens, block.pages, copy.slot))
            count += 1
        self.flights.order(Move.SAVE, taken)
        return count

    def restore(self, blocks: Sequence[Block], *, urgent: bool) -> list[Transfer]:
        """Bring blocks back into their pages, each from the fastest place that has it (all must be there)."""
        ordered: list[Transfer] = []
        batch: list[Block] = []
        last = Move.LOAD
        for block in blocks:
            move = self.source(block.key)
            if move is None:
                raise ValueError("a block to restore is nowhere")
            if move is not last:
                ordered += self.flights.order(last, batch, urgent=urgent)
                batch = []
            last = move
            slot = -1
            if move is not Move.BORROW:
                copies = self._host if move is Move.LOAD else self._disk
                copies[block.key].pins += 1
                copies.move_to_end(block.key)
                slot = copies[block.key].slot
            batch.append(Block(block.key, block.parent, block.tokens, block.pages, slot))
        return ordered + self.flights.order(last, batch, urgent=urgent)

    def probe(self, keys: Sequence[bytes]) -> Transfer:
        """Ask which of the leading blocks other workers of this machine have. keys: at least one."""
        (transfer,) = self.flights.order(Move.PROBE, [Block(key, b"", b"") for key in keys], urgent=True)
        return transfer

    def write(self, blocks: Sequence[Block], standing: Standing, now: float) -> int:
        """Copy blocks from the host to the disk, in order. Returns how many of the leading ones are there
        or on their way."""
        if now < self._paused_until or not self.disk_bytes:
            return 0
        nbytes = self.block_bytes + HEADER_BYTES
        fresh = [block for block in blocks if block.key not in self._disk]
        self._make_disk_room(len(fresh) * nbytes, standing)
        room = self.write_room
        taken: list[Block] = []
        count = 0
        for block in blocks:
            if block.key not in self._disk:
                source = self._host.get(block.key)
                if source is None or not source.ready or block.key in self._dropping:
                    break
                if self.disk_used + nbytes > self.disk_bytes:
                    break
                if len(taken) >= room:
                    break
                source.pins += 1
                self._disk[block.key] = Copy(nbytes=nbytes, pins=1)
                self.disk_used += nbytes
                taken.append(Block(block.key, block.parent, block.tokens, slot=source.slot))
            count += 1
        self.flights.order(Move.WRITE, taken)
        return count

    # --- what became of them ---------------------------------------------------------------

    def finished(self, done: TransferDone, now: float) -> Transfer | None:
        """A transfer has ended: unpin what it named, keep what arrived, forget what was found bad.
        None if it is not known (any more): then nothing moves."""
        if (transfer := self.flights.land(done.id)) is None:
            self.health.hear(done)
            return None
        ok = done.moved(len(transfer.blocks))
        for block, good in zip(transfer.blocks, ok, strict=True):
            self._settle(transfer.move, block, good, cancelled=done.cancelled)
        self.health.note(done.faults)
        if not done.cancelled and transfer.move is not Move.PROBE:
            blocks, seconds = self.moved.get(transfer.move, (0, 0.0))
            self.moved[transfer.move] = (blocks + sum(ok), seconds + max(0.0, done.seconds))
            self.failed[transfer.move] = self.failed.get(transfer.move, 0) + len(ok) - sum(ok)
            own_disk = LANES[transfer.move] is Tier.DISK and transfer.move is not Move.BORROW
            if own_disk and self.health.judge(transfer.move, any(ok), done):
                self._paused_until = now + DISK_PAUSE
        return transfer

    def _settle(self, move: Move, block: Block, good: bool, *, cancelled: bool) -> None:
        key = block.key
        match move:
            case Move.SAVE:
                copy = self._host[key]
                copy.pins -= 1
                copy.ready = good
                if not good:
                    self._forget_host(key)
            case Move.WRITE:
                self._settle_write(key, good)
            case Move.LOAD | Move.FETCH:
                self._settle_load(key, self._host if move is Move.LOAD else self._disk, good or cancelled)
            case Move.PROBE | Move.BORROW:
                if not cancelled:
                    self._peers.said(key, good)
            case Move.DROP:
                nbytes = self._dropping.pop(key)
                if good:
                    self.disk_used -= nbytes
                else:
                    self._still_on_disk(key, nbytes)

    def _settle_write(self, key: bytes, good: bool) -> None:
        source = self._host[key]
        source.pins -= 1
        if not source.ready and not source.pins:  # found bad by a load meanwhile
            self._forget_host(key)
        copy = self._disk[key]
        copy.pins -= 1
        copy.ready = good
        if not good:
            self._forget_disk(key)
        self._unstage(key)

    def _settle_load(self, key: bytes, copies: Copies, sound: bool) -> None:
        copy = copies[key]
        copy.pins -= 1
        if not sound:
            copy.ready = False  # nobody else begins to read it; the last reader frees it
        if not copy.ready and not copy.pins:
            (self._forget_host if copies is self._host else self._forget_disk)(key)
        if not copy.ready and not self.copied(key):
            self.lost.append(key)
        self._unstage(key)

    def _unstage(self, key: bytes) -> None:
        """A block that has passed through the staging area leaves it."""
        copy = self._host.get(key)
        if self.staging and copy is not None and copy.ready and not copy.pins and self._disk.has(key):
            self._forget_host(key)

    def _still_on_disk(self, key: bytes, nbytes: int) -> None:
        """It was not dropped, for all we know. It is dropped again when room is needed."""
        self._disk[key] = Copy(nbytes=nbytes, ready=True)
        if not self.ranking.owned(key):
            self._disk.neglect(key)

    @property
    def disk_back(self) -> float:
        """When writes are tried again after a failure; in the past: they are ordered now."""
        return self._paused_until

    # --- room ------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """The block is somebody's."""
        self._host.touch(key)
        self._disk.touch(key)

    def neglect(self, key: bytes) -> None:
        """The block is nobody's any more: it goes first."""
        self._host.neglect(key)
        self._disk.neglect(key)

    def clear(self) -> None:
        """Forget every block that no transfer needs now."""
        for key in [key for key, copy in self._host.items() if not copy.pins]:
            self._forget_host(key)
            self._note_loss(key)
        self._drop([key for key, copy in self._disk.items() if not copy.pins])
        self._peers.clear()

    def _make_host_room(self, slots: int, below: Standing) -> None:
        lacking = slots - len(self._free)
        if lacking <= 0:
            return
        gone = list(islice(self._host.victims(self.ranking, below, self._disk), lacking))
        for key in gone:
            self._forget_host(key)
            self._note_loss(key)
        self.evicted[Tier.HOST] += len(gone)

    def _make_disk_room(self, nbytes: int, below: Standing) -> None:
        used = self.disk_used - sum(self._dropping.values())
        if used + nbytes <= self.disk_bytes:
            return
        gone: list[bytes] = []
        for key in self._disk.victims(self.ranking, below):
            gone.append(key)
            used -= self._disk[key].nbytes
            if used + nbytes <= self.disk_bytes:
                break
        self.evicted[Tier.DISK] += len(gone)
        self._drop(gone)

    def _drop(self, keys: Sequence[bytes]) -> None:
        """The room is there when the disk says so: writes wait for that."""
        for key in keys:
            self._dropping[key] = self._disk.pop(key).nbytes
            self._note_loss(key)
        self.flights.order(Move.DROP, [Block(key, b"", b"") for key in keys])

    def _note_loss(self, key: bytes) -> None:
        if not self.copied(key):
            self.lost.append(key)

    def _forget_host(self, key: bytes) -> None:
        self._free.append(self._host.pop(key).slot)

    def _forget_disk(self, key: bytes) -> None:
        self.disk_used -= self._disk.pop(key).nbytes

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        slots = [copy.slot for copy in self._host.values()] + self._free
        assert sorted(slots) == list(range(self.host_slots)), "a host slot is lost or used twice"
        nbytes = sum(copy.nbytes for copy in self._disk.values()) + sum(self._dropping.values())
        assert self.disk_used == nbytes, "disk bytes differ"
        assert self.disk_used <= max(self.disk_bytes, self._told), "more on disk than its budget"
        assert not self._dropping.keys() & self._disk.keys(), "a block is both on disk and dropped"
        self.flights.check()
        pins: dict[tuple[Tier, bytes], int] = {}
        for transfer in self.flights:
            for block in transfer.blocks:
                if transfer.move in (Move.SAVE, Move.LOAD, Move.WRITE):
                    assert self._host[block.key].slot == block.slot, "a transfer names another slot"
                    pins[Tier.HOST, block.key] = pins.get((Tier.HOST, block.key), 0) + 1
                if transfer.move in (Move.WRITE, Move.FETCH):
                    pins[Tier.DISK, block.key] = pins.get((Tier.DISK, block.key), 0) + 1
        for copies in (self._host, self._disk):
            for key, copy in copies.items():
                assert copy.pins == pins.get((copies.tier, key), 0), f"{copies.tier.value}: pins differ"
                assert copy.ready or copy.pins, f"{copies.tier.value}: a block is on no way here"
