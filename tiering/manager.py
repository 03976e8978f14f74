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

from collections.abc import Iterable, Sequence
from itertools import islice

from tiering.copies import FIRST, Copies, Copy, Nobody, Ranking, Standing
from tiering.health import DiskHealth
from tiering.policy.base import Prices, Residency
from tiering.types import Block, DiskEntry, Move, Tier, Transfer, TransferDone

MOST_BLOCKS = 32  # per transfer: an urgent one never waits for more
AHEAD = 8  # transfers that a lane's saves or writes may have waiting
HEADER_BYTES = 256  # what a block takes on disk besides its KV, at most
DISK_PAUSE = 5.0  # seconds without writes after a transfer of which nothing reached the disk

_LANES = {
    Move.SAVE: Tier.HOST,
    Move.LOAD: Tier.HOST,
    Move.WRITE: Tier.DISK,
    Move.FETCH: Tier.DISK,
    Move.DROP: Tier.DISK,
}


class TierManager:
    """Not thread-safe; deterministic: the same calls give the same orders."""

    def __init__(
        self, host_slots: int, disk_bytes: int, block_bytes: int, entries: Iterable[DiskEntry] = ()
    ) -> None:
        if host_slots < 0 or disk_bytes < 0 or block_bytes < 1:
            raise ValueError("tiers: slots and bytes must not be negative, and a block has bytes")
        self.host_slots = host_slots
        self.disk_bytes = disk_bytes
        self.block_bytes = block_bytes
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
        self._dropping: dict[bytes, int] = {}  # key -> bytes: gone for us, not yet by the disk
        self._flying: dict[int, Transfer] = {}
        self._orders: list[Transfer] = []
        self._ids = 0
        self._paused_until = 0.0
        for entry in entries:
            if entry.key not in self._disk and disk_bytes > 0:
                self._disk[entry.key] = Copy(nbytes=entry.nbytes, ready=True)
                self.disk_used += entry.nbytes
        self._told = self.disk_used  # what was there at start may be more than is allowed now
        self._make_disk_room(0, FIRST)

    # --- where blocks are ------------------------------------------------------------------

    def where(self, key: bytes) -> Tier | None:
        """The fastest tier below the device that has the block whole."""
        for copies in (self._host, self._disk):
            if copies.has(key):
                return copies.tier
        return None

    def has(self, key: bytes, tier: Tier, *, arriving: bool = False) -> bool:
        """Is the block in `tier`, or, with `arriving`, on its way there?"""
        return (self._host if tier is Tier.HOST else self._disk).has(key, arriving=arriving)

    def copied(self, key: bytes) -> bool:
        return self.where(key) is not None

    def run(self, keys: Iterable[bytes]) -> list[Tier]:
        """Where the leading keys are, as far as they are to be had below without a gap."""
        found: list[Tier] = []
        for key in keys:
            tier = self.where(key)
            if tier is None:
                break
            found.append(tier)
        return found

    def residency(self, keys: Sequence[bytes], device: int) -> Residency:
        """Where blocks are, of which the first `device` are on the device."""
        host = disk = copied = 0
        if not self.empty:
            for index, key in enumerate(keys):
                tier = self.where(key)
                if tier is None:
                    continue
                if index < device:
                    copied += 1
                elif tier is Tier.HOST:
                    host += 1
                else:
                    disk += 1
        return Residency(device, host, disk, len(keys) - device - host - disk, copied)

    @property
    def save_room(self) -> int:
        """Blocks that may still be ordered to be saved: more would only wait."""
        return AHEAD * MOST_BLOCKS - self._in_flight(Move.SAVE)

    @property
    def write_room(self) -> int:
        """The same of writes. At most half of the host is pinned by them, however slow the disk is."""
        return min(AHEAD * MOST_BLOCKS, max(self.host_slots, 2) // 2) - self._in_flight(Move.WRITE)

    def _in_flight(self, move: Move) -> int:
        return sum(len(transfer.blocks) for transfer in self._flying.values() if transfer.move is move)

    @property
    def empty(self) -> bool:
        return not self._host and not self._disk

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
        return sum(len(transfer.blocks) for transfer in self._flying.values())

    def queue(self, prices: Prices, tier: Tier, *, urgent: bool = False) -> float:
        """Seconds until a transfer ordered now would begin, in the lane of `tier`: what is urgent passes
        what is not, but for the one that may be under way."""
        costs = {
            Move.SAVE: prices.save,
            Move.LOAD: prices.load,
            Move.WRITE: prices.write,
            Move.FETCH: prices.fetch,
        }
        ahead = under_way = 0.0
        for transfer in self._flying.values():
            cost = costs.get(transfer.move)
            if cost is None or _LANES[transfer.move] is not tier:
                continue
            seconds = prices.seconds(cost, len(transfer.blocks))
            if urgent and not transfer.urgent:
                under_way = max(under_way, seconds)
            else:
                ahead += seconds
        return ahead + under_way

    # --- orders ----------------------------------------------------------------------------

    def save(self, blocks: Sequence[Block], standing: Standing) -> int:
        """Copy device blocks to the host, in order, making room by what stands below `standing`.
        Returns how many of the leading blocks are there or on their way."""
        fresh = [block for block in blocks if block.key not in self._host]
        self._make_host_room(len(fresh), standing)
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
        self._order(Move.SAVE, taken)
        return count

    def restore(self, blocks: Sequence[Block], *, urgent: bool) -> list[Transfer]:
        """Bring blocks back into their pages, each from the fastest tier that has it (all must be there)."""
        ordered: list[Transfer] = []
        batch: list[Block] = []
        last: Tier | None = None
        for block in blocks:
            tier = self.where(block.key)
            if tier is None:
                raise ValueError("a block to restore is nowhere")
            if tier is not last and batch:
                ordered += self._order(_restoring(last), batch, urgent=urgent)
                batch = []
            last = tier
            copies = self._host if tier is Tier.HOST else self._disk
            copies[block.key].pins += 1
            copies.move_to_end(block.key)
            batch.append(Block(block.key, block.parent, block.tokens, block.pages, copies[block.key].slot))
        if batch:
            ordered += self._order(_restoring(last), batch, urgent=urgent)
        return ordered

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
        self._order(Move.WRITE, taken)
        return count

    def _order(self, move: Move, blocks: Sequence[Block], *, urgent: bool = False) -> list[Transfer]:
        ordered: list[Transfer] = []
        for start in range(0, len(blocks), MOST_BLOCKS):
            self._ids += 1
            transfer = Transfer(self._ids, move, tuple(blocks[start : start + MOST_BLOCKS]), urgent)
            self._flying[transfer.id] = transfer
            ordered.append(transfer)
        self._orders += ordered
        return ordered

    def orders(self) -> list[Transfer]:
        """Transfers ordered since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    # --- what became of them ---------------------------------------------------------------

    def finished(self, done: TransferDone, now: float) -> Transfer | None:
        """A transfer has ended: unpin what it named, keep what arrived, forget what was found bad.
        None if it is not known (any more): then nothing happens."""
        transfer = self._flying.pop(done.id, None)
        if transfer is None:
            return None
        ok = [index < len(done.ok) and done.ok[index] for index in range(len(transfer.blocks))]
        for block, good in zip(transfer.blocks, ok, strict=True):
            self._settle(transfer.move, block, good, cancelled=done.cancelled)
        self.health.note(done.faults)
        if not done.cancelled:
            blocks, seconds = self.moved.get(transfer.move, (0, 0.0))
            self.moved[transfer.move] = (blocks + sum(ok), seconds + max(0.0, done.seconds))
            self.failed[transfer.move] = self.failed.get(transfer.move, 0) + len(ok) - sum(ok)
            if _LANES[transfer.move] is Tier.DISK and self.health.judge(transfer.move, any(ok), done):
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
                source = self._host[key]
                source.pins -= 1
                if not source.ready and not source.pins:  # found bad by a load meanwhile
                    self._forget_host(key)
                copy = self._disk[key]
                copy.pins -= 1
                copy.ready = good
                if not good:
                    self._forget_disk(key)
            case Move.LOAD | Move.FETCH:
                copies = self._host if move is Move.LOAD else self._disk
                copy = copies[key]
                copy.pins -= 1
                if not good and not cancelled:
                    copy.ready = False  # nobody else begins to read it; the last reader frees it
                if not copy.ready and not copy.pins:
                    (self._forget_host if move is Move.LOAD else self._forget_disk)(key)
                if not copy.ready and not self.copied(key):
                    self.lost.append(key)
            case Move.DROP:
                nbytes = self._dropping.pop(key)
                if good:
                    self.disk_used -= nbytes
                else:
                    self._still_on_disk(key, nbytes)

    def _still_on_disk(self, key: bytes, nbytes: int) -> None:
        """It was not dropped, for all we know. It is dropped again when room is needed."""
        self._disk[key] = Copy(nbytes=nbytes, ready=True)
        if not self.ranking.owned(key):
            self._disk.neglect(key)

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

    def _make_host_room(self, slots: int, below: Standing) -> None:
        lacking = slots - len(self._free)
        if lacking <= 0:
            return
        gone = list(islice(self._host.victims(self.ranking, below), lacking))
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
        self._order(Move.DROP, [Block(key, b"", b"") for key in keys])

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
        pins: dict[tuple[Tier, bytes], int] = {}
        for transfer in self._flying.values():
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


def _restoring(tier: Tier | None) -> Move:
    return Move.LOAD if tier is Tier.HOST else Move.FETCH
