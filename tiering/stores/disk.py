"""The disk store: copies of blocks in LMDB, within a budget of bytes, believed only when verified.

One thread at a time. A system or LMDB error is an answer (`error`), never an exception.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from tiering.stores.buffers import Bytes
from tiering.stores.disk_format import PLAIN, Distrust, Reader, Writer, value_bytes
from tiering.stores.environment import (
    RESERVE,
    Environment,
    StoreBusy,
    StoreError,
    adopt_environment,
    open_environment,
    orphans,
)
from tiering.stores.faults import (
    DISK_ADOPT,
    DISK_COMMIT,
    DISK_MAP,
    DISK_PAYLOAD,
    DISK_READ,
    Fault,
    no_fault,
)
from tiering.types import SHUT, Block, DiskEntry, TierFault

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE  # LMDB's pages are the system's
HEADER_ROOM = 256  # what who plans writes counts for a block besides its KV
_LMDB_HEAD = 16  # bytes of LMDB's own before a value with pages of its own
CLOSED = "the disk store is closed"
LEAST_HEADROOM = 1 << 20
HEADROOM_SHARE = 16  # one part in so many

_TREE_IS_BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError)


def footprint(value: int) -> int:
    """Bytes on disk of a value of `value` bytes."""
    return -(-(_LMDB_HEAD + value) // PAGE) * PAGE


def block_footprint(block_bytes: int, page_size: int) -> int:
    """Bytes on disk of a block that is not compressed. page_size: tokens of a page."""
    return footprint(value_bytes(4 * page_size, block_bytes))


def capacity_of(budget: int) -> int:
    """What blocks may take of `budget`. The rest is for LMDB's tree, its list of free pages and what a
    transaction writes before it frees: without it a full store could not even delete."""
    return budget - max(LEAST_HEADROOM, budget // HEADROOM_SHARE)


@dataclass(frozen=True)
class Stored:
    """Which of the blocks are on disk now, and why others are not."""

    ok: tuple[bool, ...]
    error: str = ""


class DiskStore:
    """Blocks in `folder`, which this process alone writes. The file never outgrows `budget` (save for
    RESERVE, when a reader elsewhere keeps everything that was freed and a deletion needs room).

    namespace: of the model (weights, numbers, kernels); blocks of another one are deleted at the start.
    page_size: tokens of a block. codec: how payloads are written; both kinds are read.
    Raises StoreBusy or StoreError (`environment`) if it cannot be had.

    `capacity` and `used` are bytes in the file. Who plans does not know LMDB's pages: `room` and the
    sizes of `entries` are in its terms, `block_bytes + HEADER_ROOM` for a block that is not compressed.
    Blocks that fill `room` and no more are never refused.
    """

    def __init__(
        self,
        folder: Path,
        namespace: bytes,
        budget: int,
        block_bytes: int,
        *,
        page_size: int = 16,
        codec: int = PLAIN,
        fault: Fault = no_fault,
    ) -> None:
        self.budget = budget // PAGE * PAGE
        self._full = block_footprint(block_bytes, page_size)
        self._counted = block_bytes + HEADER_ROOM
        fits = capacity_of(self.budget) // self._full
        self.capacity = fits * self._full
        self.room = fits * self._counted
        if not self.room:
            raise ValueError(f"a disk budget of {budget} bytes holds no block of {block_bytes} bytes")
        self._namespace = namespace
        self._fault = fault
        self._writer = Writer(codec)
        self._reader = Reader(block_bytes)
        self._own = open_environment(folder, namespace, self.budget)
        self._faults = list(self._own.faults)
        self._adopted: list[tuple[Environment, dict[bytes, int]]] = []
        self._sizes = _sizes(self._own)
        self._order = self._own.stock[-1].order if self._own.stock else 0
        self._condemned: dict[bytes, None] = {}  # to be deleted as soon as something can be
        self._broken = ""
        self._absent = ""  # why there is no environment; empty: there is one
        self._grown = False  # the map is larger than the budget, for the sake of a deletion
        self.used = sum(self._sizes.values())  # bytes of the capacity, own blocks

    def entries(self) -> list[DiskEntry]:
        """What there is, in the order of writing; adopted blocks first. Reads no values."""
        sizes: dict[bytes, int] = {}
        for _, theirs in self._adopted:
            sizes |= theirs
        for key, size in self._sizes.items():
            sizes.pop(key, None)
            sizes[key] = size
        return [DiskEntry(key, size * self._counted // self._full) for key, size in sizes.items()]

    def adopt(self, folder: Path) -> None:
        """Serve the blocks in `folder` too, written by a worker that is no more. They are outside the
        budget and are never added to; the folder goes when the last of them is dropped.

        Raises StoreBusy if a process has the folder, StoreError if its blocks are of no use (another
        model's, cut off, not synced): those are deleted.
        """
        environment = adopt_environment(folder, self._namespace)
        self._fault(DISK_ADOPT, None)
        self._adopted.append((environment, _sizes(environment)))

    @property
    def folders(self) -> list[Path]:
        """What is open here: its own, and those adopted."""
        return [self._own.folder, *(environment.folder for environment, _ in list(self._adopted))]

    def discarded(self) -> None:
        """A folder that was to be adopted was of no use."""
        self._faults.append(TierFault.DISCARDED)

    def take_faults(self) -> tuple[TierFault, ...]:
        """What was found wrong since the last call."""
        faults, self._faults = tuple(self._faults), []
        return faults

    # --- writing ---------------------------------------------------------------------------

    def put_many(self, blocks: Sequence[tuple[Block, Bytes]]) -> Stored:
        """Write blocks in one transaction (more, if room is scarce); those that would pass the capacity
        are refused."""
        if why_not := self._broken or self._look():
            return Stored((False,) * len(blocks), why_not)
        if self._condemned and not self._delete([key for key in self._condemned if key in self._sizes]):
            self._condemned.clear()
        for attempt in range(3):
            try:
                return self._put(blocks)
            except lmdb.MapFullError as error:
                # LMDB writes before it frees, and what a transaction frees serves the next but one.
                if len(blocks) > 1:
                    return self._put_in_halves(blocks)
                failed = self._failed("writing", error)
                if attempt == 2 or not self._make_room():
                    break
            except (lmdb.Error, OSError) as error:
                failed = self._failed("writing", error)
                break
        return Stored((False,) * len(blocks), failed)

    def _put_in_halves(self, blocks: Sequence[tuple[Block, Bytes]]) -> Stored:
        half = len(blocks) // 2
        first, second = self.put_many(blocks[:half]), self.put_many(blocks[half:])
        return Stored(first.ok + second.ok, first.error or second.error)

    def _put(self, blocks: Sequence[tuple[Block, Bytes]]) -> Stored:
        ok: list[bool] = []
        sizes: dict[bytes, int] = {}
        used, order = self.used, self._order
        if self._grown:
            self._own.handle.set_mapsize(self.budget)  # or what is in use: LMDB takes the larger
            self._grown = False
        with self._own.handle.begin(write=True) as txn:
            self._fault(DISK_MAP, None)
            for block, raw in blocks:
                value = self._writer.value(block, raw)
                size = footprint(value.nbytes)
                more = size - sizes.get(block.key, self._sizes.get(block.key, 0))
                ok.append(used + more <= self.capacity)
                if not ok[-1]:
                    continue
                self._fault(DISK_PAYLOAD, value)
                order += 1
                self._own.put(txn, block.key, value.data, order)
                sizes[block.key] = size
                used += more
            self._fault(DISK_COMMIT, None)
        for key, size in sizes.items():
            self._sizes.pop(key, None)  # the order of the dictionary is the order of writing
            self._sizes[key] = size
        self.used, self._order = used, order
        return Stored(tuple(ok), "" if all(ok) else "the disk budget is used up")

    def delete_many(self, keys: Sequence[bytes]) -> Stored:
        """Forget blocks. One that is not there counts as forgotten."""
        for environment, theirs in list(self._adopted):
            for key in keys:
                theirs.pop(key, None)
            if not theirs:
                self._disown(environment, remove=True)
        error = self._broken or self._look()
        mine = [key for key in keys if key in self._sizes]
        error = error or self._delete(mine)
        return Stored(tuple(key not in self._sizes for key in keys), error)

    def _delete(self, keys: Sequence[bytes]) -> str:
        if not keys:
            return ""
        for attempt in range(3):
            try:
                with self._own.handle.begin(write=True) as txn:
                    self._fault(DISK_MAP, None)
                    for key in keys:
                        self._own.delete(txn, key)
                    self._fault(DISK_COMMIT, None)
                break
            except lmdb.MapFullError as error:
                if attempt == 2:
                    return self._failed("deleting", error)
                if (attempt == 1 or not self._make_room()) and not self._grow():
                    return self._failed("deleting", error)
            except (lmdb.Error, OSError) as error:
                return self._failed("deleting", error)
        for key in keys:
            self.used -= self._sizes.pop(key, 0)
        return ""

    # --- reading ---------------------------------------------------------------------------

    def fetch(self, block: Block, take: Callable[[Bytes], None]) -> str:
        """Give the verified bytes of `block` to `take`; they are there until it returns.

        Returns why not, else "". Then, and when `take` raises (which passes, unless it is an OSError),
        the block is deleted: whoever wanted it forgets it, and its room must not be lost.
        """
        if why_not := self._broken or self._look():
            return why_not
        source = self._source(block.key)
        if source is None:
            return "missing on disk"
        reason = "not taken"
        try:
            reason = self._read(source, block, take)
        except (lmdb.Error, OSError) as error:
            reason = self._failed("reading", error, source)
            self._faults.append(TierFault.UNREADABLE)
        finally:
            if reason and self.delete_many([block.key]).error:
                self._condemned[block.key] = None
        return reason

    def _read(self, source: Environment, block: Block, take: Callable[[Bytes], None]) -> str:
        self._fault(DISK_READ, None)
        with source.handle.begin(db=source.blocks, buffers=True) as txn:
            value = txn.get(block.key)
            if value is None:
                verdict: Bytes | Distrust = Distrust("missing on disk", TierFault.MISSING)
            else:
                verdict = self._reader.payload(block, np.frombuffer(value, dtype=np.uint8))
            if not isinstance(verdict, Distrust):
                take(verdict)
                return ""
        self._faults.append(verdict.fault)
        return verdict.reason

    def _source(self, key: bytes) -> Environment | None:
        if key in self._sizes:
            return self._own
        return next((environment for environment, theirs in self._adopted if key in theirs), None)

    # --- its folder -----------------------------------------------------------------------

    def look(self) -> str:
        """See whether the disk is still there: why not, else ""."""
        return self._broken or self._look()

    def _look(self) -> str:
        """Where the folder was moved or deleted, all blocks are missed, and it is begun afresh in its place,
        as soon as that can be."""
        if not self._absent:
            if self._own.there:
                return ""
            log.error("KV on disk is gone: %s was moved or deleted while it was in use", self._own.folder)
            self._faults.append(TierFault.VANISHED)
            self._own.abandon()
            self._sizes, self._condemned, self.used, self._grown = {}, {}, 0, False
        folder = self._own.folder
        try:
            self._own = open_environment(folder, self._namespace, self.budget)
            self._own.clear()
        except (StoreError, lmdb.Error) as error:
            self._absent = f"{folder} is gone, and cannot be made again: {' '.join(str(error).split())}"
            return self._absent
        self._absent = ""
        self._faults += self._own.faults
        log.warning("KV on disk begins afresh in %s", folder)
        return ""

    # --- ends ------------------------------------------------------------------------------

    def close(self) -> None:
        """Write everything out and let go of the folders. Idempotent."""
        if self._broken == CLOSED:
            return
        for environment, _ in self._adopted:
            environment.close()
        if not self._own.closed:
            self._own.close()
        self._broken = CLOSED

    def _make_room(self) -> bool:
        """Take back what readers held that are no more, and let what was freed come of age. False if the
        map has no room even for that."""
        try:
            self._own.handle.reader_check()
            self._own.touch()
        except lmdb.Error:
            return False
        return True

    def _grow(self) -> bool:
        """Let the map be larger than the budget, for the sake of a deletion."""
        try:
            self._own.handle.set_mapsize(self.budget + RESERVE)
        except (lmdb.Error, OSError):
            return False
        self._grown = True
        return True

    def _disown(self, environment: Environment, remove: bool) -> None:
        self._adopted = [(other, sizes) for other, sizes in self._adopted if other is not environment]
        environment.close(remove)

    def _failed(self, doing: str, error: Exception, source: Environment | None = None) -> str:
        """What happened, in one line. A tree that cannot be trusted is not used any more."""
        source = source or self._own
        line = f"{doing} {source.folder}: {' '.join(str(error).split()) or type(error).__name__}"
        if not isinstance(error, _TREE_IS_BROKEN) or self._broken:
            return self._broken or line
        if source is self._own:
            self._broken = f"{SHUT}, which begins afresh: {line}"
            source.distrust()
        else:
            self._disown(source, remove=True)
        log.error("KV on disk is broken: %s", line)
        return line


def adopt_orphans(store: DiskStore, data_dir: Path, workers: int) -> None:
    """Have `store` serve what workers left in `data_dir` that a server of `workers` workers does not
    have. Each folder goes to the worker that asks first; what is of no use is deleted."""
    for folder in orphans(data_dir, workers):
        try:
            store.adopt(folder)
        except StoreBusy:
            continue
        except StoreError as error:
            log.warning("%s", error)
            store.discarded()


def _sizes(environment: Environment) -> dict[bytes, int]:
    return {found.key: footprint(found.length) for found in environment.stock}
