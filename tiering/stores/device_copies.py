"""Copies between host memory and the pages of an accelerator, on queues of their own (`streams`).

**What is promised.** A block that is read is in its host memory, and one that comes from unpinned memory is
in its pages, when `settle` returns. A block that comes from a pinned host slot is *under way*: its copies
are enqueued, layer by layer, and whoever orders transfers may take them as done; but only once a step has
called `begin`, and where it is known how long loads take. Before, it is waited for. So a restore is answered,
and the step that needs it begins, while its later layers still cross.

**Why nobody sees half of it**, whatever becomes of the transfer or its session meanwhile:

- a step says which pages it touches (`begin`) and, before it touches a layer of them, its queue follows the
  mark of that layer in each load under way into one of these pages (`wait`). This holds for reading and for
  writing, so a page that was given up and taken by another session is not overwritten by what was meant
  for the first one;
- all that is written into pages from outside goes through one queue, in order: of two loads into a page the
  later one wins, and steps follow both;
- copies follow the mark that was set when the last step ended (`end`), also one that raised, so that kernels
  of a failed step are through with pages that have been freed since. The step that runs need not be
  followed: nobody orders a transfer of pages that it writes;
- reading pages into a host slot follows every load under way into one of these pages, or out of this slot.
  Nothing else writes slots; a slot's bytes may be read (by the disk) at any time;
- what was taken back is not answered before its `settle`, so what it had enqueued is under way like anything
  else. What could not be enqueued whole is waited for before it is reported as failed.

A device that fails a copy that was enqueued fails all that follows (a CUDA context does not recover), the
marks' own questions first: then `begin` raises, no step runs, and nobody computes with torn pages.
`drain` waits for what is under way; host memory must stay until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiering.stores.buffers import Bytes
from tiering.stores.layer_parts import LayerParts, Run, cut
from tiering.stores.packing import Packing
from tiering.stores.streams import Mark, Queue, Streams, address, adjoining, joined

PACK_BELOW = 64 << 10  # bytes of a block: smaller ones are packed
PACKED_BYTES = 4 << 20  # that cross in one copy
LANDING_BYTES = 8 << 20  # pinned memory, for bytes that are not
AHEAD_BYTES = 128 << 20  # under way at most: what is urgent waits for no more
FADE = 0.9  # what a load counts, against the one after it, in what loads take
LOOK_SECONDS = 0.001  # between two looks whether all is through, when closing


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks that are under way into their pages."""

    pages: tuple[frozenset[int], ...]  # by group
    slots: frozenset[int]  # addresses of their host memory
    nbytes: int
    began: Mark
    marks: list[Mark]  # one per part
    followed: int = 0  # parts that the compute queue follows already

    def touches(self, pages: Sequence[frozenset[int]]) -> bool:
        return any(not mine.isdisjoint(others) for mine, others in zip(self.pages, pages, strict=True))


@dataclass(slots=True, eq=False)
class _Block:
    pages: tuple[int, ...]
    host: Bytes


@dataclass(eq=False)  # slots would be shared by all threads
class _Batch(threading.local):
    """What a thread has asked for since its last `settle`."""

    reads: list[_Block] = field(default_factory=list)
    loads: list[_Block] = field(default_factory=list)  # from pinned memory
    landed: list[_Block] = field(default_factory=list)  # from rows of `landing`
    landing: Bytes | None = None
    failed: Exception | None = None  # of what was enqueued before `settle` was called


class DeviceCopies:
    """The mover's side: `read`, `write`, `settle`, `drain`, on any of its threads. The worker's side, on its
    thread: `begin`, `expecting`, `wait`, `wait_all`, `end` (`kernels.ops.Arrivals`)."""

    def __init__(
        self,
        groups: Sequence[Tensor],
        layers: Sequence[Sequence[int]],
        streams: Streams,
        packing: Packing,
        *,
        pack_below: int = PACK_BELOW,
        part_bytes: int | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """groups: the pages of each, `[pages, bytes]` uint8, one page after the other in memory. layers: each
        group's layers, by number."""
        self._groups = groups
        self._streams = streams
        self._packing = packing
        sizes = [group.shape[1] for group in groups]
        self.block_bytes = sum(sizes)
        self._starts = [sum(sizes[:at]) for at in range(len(sizes))]
        self._packs = self.block_bytes < pack_below
        least = self.block_bytes if self._packs else part_bytes
        self._cut: LayerParts = cut(sizes, layers) if least is None else cut(sizes, layers, least)
        self._ahead = ahead_bytes
        rows = max(1, PACKED_BYTES // self.block_bytes) if self._packs else 0
        device = groups[0].device
        self._staged = {
            queue: torch.empty((rows, self.block_bytes), dtype=torch.uint8, device=device)
            for queue in (Queue.IN, Queue.OUT)
        }
        self._landing_rows = max(1, LANDING_BYTES // self.block_bytes)
        self._batch = _Batch()
        self._enqueuing = {queue: threading.Lock() for queue in (Queue.IN, Queue.OUT)}
        self._lock = threading.Lock()  # of all below
        self._loads: list[_Load] = []  # under way, in order
        self._stepped = streams.mark(Queue.COMPUTE)
        self._moved = self._seconds = 0.0  # bytes of loads and what they took, older ones counting less
        self._broken = ""
        self._told = False  # steps say which pages they touch: before, loads are waited for
        self._awaited: list[_Load] = []  # the worker's thread alone

    # --- the mover's threads -------------------------------------------------------------------

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        """Ask for a block. It is there after `settle`."""
        self._check(pages)
        if self._batch.loads or self._batch.landed:
            self._enqueue()
        self._batch.reads.append(_Block(tuple(pages), into))

    def write(self, pages: Sequence[int], source: Bytes) -> None:
        """Ask for a block's pages to be written. A source that is not pinned is read before this returns."""
        self._check(pages)
        batch = self._batch
        if self._streams.pinned(source):
            batch.loads.append(_Block(tuple(pages), source))
            return
        if batch.landing is None:
            batch.landing = self._streams.host_memory(self._landing_rows, self.block_bytes)
        if len(batch.landed) == self._landing_rows:
            self._enqueue()
        row: Bytes = batch.landing[len(batch.landed)]
        np.copyto(row, source)
        batch.landed.append(_Block(tuple(pages), row))

    def settle(self) -> float:
        """Enqueue what this thread has asked for, and wait as far as is promised. Returns the seconds that
        loads take which are under way now, as loads before them took. Raises what the device raises; then
        nothing that was asked for may be believed."""
        seconds, batch = self._enqueue(), self._batch
        failed, batch.failed = batch.failed, None
        if failed is not None:
            raise failed
        return seconds

    def _enqueue(self) -> float:
        """What `settle` does, without saying yet that it failed: that is of blocks asked for before."""
        batch = self._batch
        reads, landed, loads = batch.reads, batch.landed, batch.loads
        batch.reads, batch.landed, batch.loads = [], [], []
        try:
            if reads:
                self._save(reads)
            if landed:
                self._send(landed).marks[-1].wait()
            return self._load(loads) if loads else 0.0
        except Exception as error:
            batch.failed = batch.failed or error
            return 0.0

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is under way; False if that takes longer, or the device has failed."""
        end = time.monotonic() + timeout
        while True:
            try:
                if not self._under_way():
                    return True
            except Exception:  # it will answer nothing else any more
                return False
            if time.monotonic() >= end:
                return False
            time.sleep(LOOK_SECONDS)

    def _check(self, pages: Sequence[int]) -> None:
        for group, page in zip(self._groups, pages, strict=True):
            if not 0 <= page < group.shape[0]:
                raise IndexError(f"page {page} of {group.shape[0]}")

    def _save(self, blocks: list[_Block]) -> None:
        streams = self._streams
        pages, slots = _pages(blocks), _slots(blocks)
        with self._enqueuing[Queue.OUT]:
            try:
                for load in self._under_way():
                    if load.touches(pages) or not load.slots.isdisjoint(slots):
                        streams.follow(Queue.OUT, load.marks[-1])
                streams.follow(Queue.OUT, self._stepped)
                if self._packs:
                    for part in self._staging(blocks):
                        streams.run(Queue.OUT, self._packed_out(part))
                else:
                    for block in blocks:
                        streams.run(Queue.OUT, self._copy_out(block))
                mark = streams.mark(Queue.OUT)
            except BaseException:
                self._give_up(Queue.OUT)
                raise
        mark.wait()

    def _load(self, blocks: list[_Block]) -> float:
        nbytes = len(blocks) * self.block_bytes
        while (ahead := self._under_way()) and sum(load.nbytes for load in ahead) + nbytes > self._ahead:
            ahead[0].marks[-1].wait()
        load = self._send(blocks)
        with self._lock:
            self._loads.append(load)
        if not (self._seconds and self._told):  # what loads take is not known before one has been waited for
            load.marks[-1].wait()
            self._under_way()
            return 0.0
        return nbytes * self._seconds / self._moved

    def _send(self, blocks: list[_Block]) -> _Load:
        """Enqueue the copies of blocks into their pages, part by part."""
        streams, marks = self._streams, list[Mark]()
        with self._enqueuing[Queue.IN]:
            try:
                streams.follow(Queue.IN, self._stepped)
                began = streams.mark(Queue.IN)
                if self._packs:
                    for staged in self._staging(blocks):
                        streams.run(Queue.IN, self._packed_in(staged))
                    marks.append(streams.mark(Queue.IN))
                else:
                    for part in self._cut.parts:
                        for block in blocks:
                            streams.run(Queue.IN, self._copy_in(block, part))
                        marks.append(streams.mark(Queue.IN))
            except BaseException:
                self._give_up(Queue.IN)
                raise
        return _Load(_pages(blocks), _slots(blocks), len(blocks) * self.block_bytes, began, marks)

    def _give_up(self, queue: Queue) -> None:
        """Something could not be enqueued: what was before it ends before anybody hears of that."""
        try:
            self._streams.mark(queue).wait()
        except Exception as error:
            self._broken = " ".join(str(error).split()) or type(error).__name__

    def _under_way(self) -> list[_Load]:
        """Loads that are not through; what the others took is noted."""
        with self._lock:
            while self._loads and self._loads[0].marks[-1].passed:
                load = self._loads.pop(0)
                seconds = load.marks[-1].seconds_since(load.began)
                if seconds > 0:
                    self._moved = FADE * self._moved + load.nbytes
                    self._seconds = FADE * self._seconds + seconds
            return list(self._loads)

    # --- what is enqueued ----------------------------------------------------------------------

    def _copy_in(self, block: _Block, part: Sequence[Run]) -> Callable[[], None]:
        def work() -> None:
            host = torch.from_numpy(block.host)
            for run in part:
                target = self._groups[run.group][block.pages[run.group], run.start : run.end]
                target.copy_(host[run.at : run.at + run.end - run.start], non_blocking=True)

        return work

    def _copy_out(self, block: _Block) -> Callable[[], None]:
        def work() -> None:
            host = torch.from_numpy(block.host)
            for group, page, start in zip(self._groups, block.pages, self._starts, strict=True):
                host[start : start + group.shape[1]].copy_(group[page], non_blocking=True)

        return work

    def _staging(self, blocks: list[_Block]) -> list[list[_Block]]:
        """As many as are packed at once, in the order of their host memory: what adjoins goes together."""
        rows = self._staged[Queue.IN].shape[0]
        inorder = sorted(blocks, key=lambda block: address(block.host))
        return [inorder[at : at + rows] for at in range(0, len(inorder), rows)]

    def _packed_in(self, blocks: list[_Block]) -> Callable[[], None]:
        def work() -> None:
            staged = self._staged[Queue.IN][: len(blocks)]
            self._cross(blocks, staged, inward=True)
            for number, ids in enumerate(self._ids(blocks)):
                group, start = self._groups[number], self._starts[number]
                source = staged[:, start : start + group.shape[1]].contiguous()
                self._packing.scatter(group, ids, source)

        return work

    def _packed_out(self, blocks: list[_Block]) -> Callable[[], None]:
        def work() -> None:
            staged = self._staged[Queue.OUT][: len(blocks)]
            for number, ids in enumerate(self._ids(blocks)):
                group, start = self._groups[number], self._starts[number]
                if len(self._groups) == 1:
                    self._packing.gather(group, ids, staged)
                    continue
                out = torch.empty((len(blocks), group.shape[1]), dtype=torch.uint8, device=group.device)
                self._packing.gather(group, ids, out)
                staged[:, start : start + group.shape[1]].copy_(out)
            self._cross(blocks, staged, inward=False)

        return work

    def _ids(self, blocks: list[_Block]) -> list[Tensor]:
        """Each group's pages, on the device."""
        table = torch.tensor([block.pages for block in blocks], dtype=torch.int64)
        moved = table.to(self._groups[0].device, non_blocking=True)  # CUDA reads what is not pinned at once
        return [column.contiguous() for column in moved.unbind(dim=1)]

    def _cross(self, blocks: list[_Block], staged: Tensor, *, inward: bool) -> None:
        """Between staged rows and host memory: one copy for what adjoins there."""
        first = 0
        flat = staged.view(-1)
        while first < len(blocks):
            last = first
            while last + 1 < len(blocks) and adjoining(blocks[last].host, blocks[last + 1].host):
                last += 1
            host = torch.from_numpy(joined([block.host for block in blocks[first : last + 1]]))
            device = flat[first * self.block_bytes : (last + 1) * self.block_bytes]
            target, source = (device, host) if inward else (host, device)
            target.copy_(source, non_blocking=True)
            first = last + 1

    # --- the worker's thread -------------------------------------------------------------------

    def begin(self, pages: Callable[[], Sequence[Sequence[int] | NDArray[np.int32]]]) -> None:
        """A step begins that touches these pages of each group; asked for only where loads are under way.
        Raises RuntimeError where the device has failed."""
        if self._broken:
            raise RuntimeError(f"copies of KV have failed: {self._broken}")
        self._awaited = []
        self._told = True
        if self._loads and (loads := [load for load in self._under_way() if load.followed < len(load.marks)]):
            touched = [_among(of, loads, group) for group, of in enumerate(pages())]
            self._awaited = [load for load in loads if load.touches(touched)]

    @property
    def expecting(self) -> bool:
        return bool(self._awaited)

    def wait(self, group: int, index: int) -> None:
        self._follow(self._cut.part_of[group][index])

    def wait_all(self) -> None:
        self._follow(len(self._cut.parts) - 1)
        self._awaited = []

    def end(self) -> None:
        """The step is over, however it ended."""
        self._awaited = []
        self._stepped = self._streams.mark(Queue.COMPUTE)

    def _follow(self, part: int) -> None:
        for load in self._awaited:
            if load.followed <= part:
                self._streams.follow(Queue.COMPUTE, load.marks[part])
                load.followed = part + 1


def _pages(blocks: Sequence[_Block]) -> tuple[frozenset[int], ...]:
    return tuple(map(frozenset, zip(*(block.pages for block in blocks), strict=True)))


def _among(pages: Sequence[int] | NDArray[np.int32], loads: Sequence[_Load], group: int) -> frozenset[int]:
    """Those of a step's pages, which may be tens of thousands, that loads are under way into."""
    ids = np.asarray(pages, dtype=np.int64)
    loaded = np.array(sorted({page for load in loads for page in load.pages[group]}), dtype=np.int64)
    return frozenset(ids[np.isin(ids, loaded)].tolist())


def _slots(blocks: Sequence[_Block]) -> frozenset[int]:
    return frozenset(address(block.host) for block in blocks)
