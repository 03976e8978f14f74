"""How fast KV moves between device pages, host slab and disk, beside what copying and LMDB allow.

Transfers are those of the server: the mover, its threads, verification. A round measures a limit and
what it limits one after the other; the order changes from round to round.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import numpy as np
import torch

from agentserve.bench.report import Row
from agentserve.clock import WallClock
from kernels.memory import empty_pages
from tiering.keys import block_key
from tiering.stores.disk import DiskStore, block_footprint
from tiering.stores.disk_format import PLAIN, ZSTD, value_bytes
from tiering.stores.host import HostStore
from tiering.stores.mover import STEP_BYTES, Mover
from tiering.stores.pages import PoolPages
from tiering.types import Block, Move, Transfer

NAMESPACE = bytes(32)
PAGE_SIZE = 16  # tokens of a block
GB = 1e9
RESIDENT_PROBES = 64
MEMCPY, LMDB = "memcpy, one thread", "LMDB alone"
PATIENCE = 300.0  # seconds for one transfer


@dataclass(frozen=True)
class Settings:
    folder: Path  # where KV would be kept; nothing is left there
    block_bytes: int = 368_640  # of SmolLM2-135M in bf16
    blocks: int = 256  # 4,096 tokens
    rounds: int = 3
    compressed: bool = False


@dataclass
class Findings:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class Scene:
    """A pool of random bytes, a slab of its size, and the blocks in both."""

    def __init__(self, settings: Settings) -> None:
        count, size = settings.blocks, settings.block_bytes
        self.nbytes = count * size
        self.storage = empty_pages((count, size), torch.uint8, torch.device("cpu"))
        flat = self.storage.view(-1).numpy()
        flat[:] = np.random.default_rng(0).integers(0, 256, flat.size, dtype=np.uint8)
        self.pages = PoolPages([self.storage])
        self.host = HostStore(count, size)
        self.blocks = self._blocks(count)
        self._ids = 0

    @staticmethod
    def _blocks(count: int) -> tuple[Block, ...]:
        """One sequence, on pages and slots in no order, as in a pool that has been in use."""
        order = np.random.default_rng(1).permutation(count).tolist()
        blocks, parent = [], NAMESPACE
        for number, page in enumerate(order):
            tokens = np.arange(PAGE_SIZE * number, PAGE_SIZE * (number + 1), dtype="<i4").tobytes()
            key = block_key(parent, tokens)
            blocks.append(Block(key, parent, tokens, (page,), order[-1 - number]))
            parent = key
        return tuple(blocks)

    def rate(self, mover: Mover, move: Move) -> float:
        """GB/s of one transfer of all blocks. Raises OSError if not all were moved."""
        self._ids += 1
        mover.submit(Transfer(self._ids, move, self.blocks))
        if not select.select([mover.fileno()], [], [], PATIENCE)[0]:
            raise OSError(f"moving {self.nbytes} bytes ({move.value}) took more than {PATIENCE:.0f} s")
        (done,) = mover.poll()
        if not all(done.ok):
            raise OSError(f"{move.value}: {done.error}")
        return self.nbytes / done.seconds / GB


def measure(settings: Settings, progress: Callable[[str], None]) -> Findings:
    """Rows in GB/s of KV. Raises OSError or ValueError if the folder cannot be used."""
    if not settings.folder.is_dir():
        raise ValueError(f"no folder {settings.folder}")
    found = Findings()
    scene = Scene(settings)
    folder = Path(tempfile.mkdtemp(prefix="bench-tiers-", dir=settings.folder))
    try:
        progress("copies in memory")
        _copies(scene, settings.rounds, found)
        progress("disk")
        _disk(scene, settings, folder, found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = f"{settings.blocks} blocks of {settings.block_bytes:,} bytes ({scene.nbytes / 1e6:,.0f} MB)"
    found.notes.insert(0, f"{size}, medians of {settings.rounds}; one thread")
    return found


# --- memory --------------------------------------------------------------------------------------


def _copies(scene: Scene, rounds: int, found: Findings) -> None:
    mover = Mover(scene.pages, scene.host, None, WallClock())
    try:
        first = scene.rate(mover, Move.SAVE)
        source = scene.storage.view(-1).numpy()
        target = np.zeros_like(source)
        runs: dict[str, list[float]] = {"memcpy": [], "save": [], "load": []}
        for _ in range(rounds):
            runs["memcpy"].append(scene.nbytes / _seconds(lambda: np.copyto(target, source)) / GB)
            runs["save"].append(scene.rate(mover, Move.SAVE))
            runs["load"].append(scene.rate(mover, Move.LOAD))
    finally:
        mover.close()
    limit = _limit(runs["memcpy"], "memcpy")
    found.rows += [
        _row("memory", MEMCPY, runs["memcpy"]),
        _row("memory", "save: device to host", runs["save"], limit),
        _row("memory", "save into slots never used before", [first], limit),
        _row("memory", "load: host to device", runs["load"], limit),
    ]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- disk ----------------------------------------------------------------------------------------


@dataclass
class _DiskRuns:
    """GB/s of the rounds: `raw` is LMDB without us."""

    write: list[float] = field(default_factory=list)
    raw_write: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    raw_cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


def _disk(scene: Scene, settings: Settings, folder: Path, found: Findings) -> None:
    runs, unused = _DiskRuns(), _DiskRuns()
    # The first round is not counted: it makes the system find memory for files of this size.
    why_not_cold = _disk_round(scene, settings, folder / "first", unused, True)
    for number in range(settings.rounds):
        why = _disk_round(scene, settings, folder / str(number), runs, number % 2 == 0)
        why_not_cold = why_not_cold or why
    memcpy = next(row for row in found.rows if row.name == MEMCPY)
    found.rows += [
        _row("disk", "write: host to disk, not synced", runs.write, _limit(runs.raw_write, LMDB)),
        _row("disk", "fetch, warm: disk to device, verified", runs.warm, _limit(memcpy.runs, "memcpy")),
    ]
    if why_not_cold:
        found.skipped["cold fetch"] = why_not_cold
        return
    found.rows.append(
        _row("disk", "fetch, cold: disk to device, verified", runs.cold, _limit(runs.raw_cold, LMDB))
    )


def _disk_round(scene: Scene, settings: Settings, folder: Path, runs: _DiskRuns, first: bool) -> str:
    """Writes and reads with and without us; `first`: we go first. Returns why cold is not cold."""
    folder.mkdir()
    ours, raw = folder / "ours", folder / "raw"
    if first:
        runs.write.append(_write(scene, settings, ours))
    runs.raw_write.append(_raw_write(scene, settings, raw))
    if not first:
        runs.write.append(_write(scene, settings, ours))
    shutil.rmtree(raw)
    warm_here = ""
    for mine in (first, not first):
        warm_here = warm_here or _drop_from_memory(ours / "data.mdb")
        if mine:
            cold, warm = _reads(scene, settings, ours)
            runs.cold.append(cold)
            runs.warm.append(warm)
        else:
            runs.raw_cold.append(_raw_read(scene, ours))
    shutil.rmtree(folder)
    return warm_here


def _store(settings: Settings, folder: Path) -> DiskStore:
    room = settings.blocks * block_footprint(settings.block_bytes, PAGE_SIZE)
    codec = ZSTD if settings.compressed else PLAIN
    return DiskStore(folder, NAMESPACE, room + room // 8 + (8 << 20), settings.block_bytes, codec=codec)


def _write(scene: Scene, settings: Settings, folder: Path) -> float:
    store = _store(settings, folder)
    mover = Mover(scene.pages, scene.host, store, WallClock())
    try:
        return scene.rate(mover, Move.WRITE)
    finally:
        if mover.close():
            store.close()


def _reads(scene: Scene, settings: Settings, folder: Path) -> tuple[float, float]:
    """Twice in a row, through the mover."""
    store = _store(settings, folder)
    mover = Mover(scene.pages, scene.host, store, WallClock())
    try:
        return scene.rate(mover, Move.FETCH), scene.rate(mover, Move.FETCH)
    finally:
        if mover.close():
            store.close()


def _raw_write(scene: Scene, settings: Settings, folder: Path) -> float:
    """LMDB itself: values of the same size under the same keys, as many in a transaction."""
    value = bytes(value_bytes(4 * PAGE_SIZE, settings.block_bytes))
    step = max(1, STEP_BYTES // settings.block_bytes)
    room = 2 * settings.blocks * block_footprint(settings.block_bytes, PAGE_SIZE) + (8 << 20)

    def write() -> None:
        for start in range(0, len(scene.blocks), step):
            with handle.begin(write=True) as txn:
                for block in scene.blocks[start : start + step]:
                    txn.put(block.key, value)

    with lmdb.open(str(folder), map_size=room, sync=False, metasync=False, meminit=False) as handle:
        with ThreadPoolExecutor(1) as threads:  # as the mover's: the allocator treats the main thread apart
            seconds = threads.submit(_seconds, write).result()
        handle.sync(True)  # not while something else is measured
    return scene.nbytes / seconds / GB


def _raw_read(scene: Scene, folder: Path) -> float:
    """LMDB itself: every page of every value touched, in the same order."""

    def read() -> None:
        with handle.begin(db=blocks, buffers=True) as txn:
            for block in scene.blocks:
                int(np.frombuffer(txn.get(block.key, b""), dtype=np.uint8)[::4096].sum())

    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3) as handle:
        blocks = handle.open_db(b"blocks", create=False)
        return scene.nbytes / _seconds(read) / GB


def _drop_from_memory(path: Path) -> str:
    """Have the system forget a file's pages. Returns why that cannot be relied on, else ""."""
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _still_in_memory(file.fileno(), path.stat().st_size)


def _still_in_memory(descriptor: int, size: int) -> str:
    """Asks for pages all over the file, without waiting for the medium."""
    if not hasattr(os, "RWF_NOWAIT"):
        return "this system does not tell what is in memory"
    there = 0
    for probe in range(RESIDENT_PROBES):
        try:
            at = probe * size // RESIDENT_PROBES
            there += os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return "this file system does not tell what is in memory"
    if there > RESIDENT_PROBES // 8:
        return f"{there} of {RESIDENT_PROBES} pages stay in memory"
    return ""


def _limit(runs: Sequence[float], name: str) -> tuple[float, str]:
    return statistics.median(runs), name


def _row(group: str, name: str, runs: Sequence[float], limit: tuple[float, str] | None = None) -> Row:
    value, of = limit or (None, "")
    return Row(name, statistics.median(runs), "GB/s", value, of, True, tuple(runs), group)
