"""How fast KV moves between device pages, host slab and disk, beside what copying and LMDB allow.

Transfers are those of the server: the mover, its threads, verification. A round measures a limit and
what it limits one after the other; the order changes from round to round.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import numpy as np

from agentserve.bench.tiers.cold import drop_from_memory, not_cold, read_so_far
from agentserve.bench.tiers.findings import Findings, Limit, rate_row
from agentserve.bench.tiers.scene import GB, NAMESPACE, PAGE_SIZE, Scene
from agentserve.clock import WallClock
from tiering.stores.descents import read_tree
from tiering.stores.disk import DiskStore, block_footprint
from tiering.stores.disk_format import PLAIN, ZSTD, value_bytes
from tiering.stores.mover import STEP_BYTES, Mover
from tiering.types import Move

MEMCPY, LMDB = "memcpy, one thread", "LMDB alone"
COLD = "fetch, cold: disk to device, verified"


@dataclass(frozen=True)
class Sizes:
    block_bytes: int = 368_640  # of SmolLM2-135M in bf16
    blocks: int = 256  # 4,096 tokens
    rounds: int = 3
    compressed: bool = False


def measure(sizes: Sizes, folder: Path, progress: Callable[[str], None]) -> Findings:
    """Rows in GB/s of KV. `folder` is ours. Raises OSError if something cannot be moved."""
    found = Findings()
    scene = Scene(sizes.blocks, sizes.block_bytes)
    progress("copies in memory")
    copying = _copies(scene, sizes.rounds, found)
    progress("disk")
    _disk(scene, sizes, folder, copying, found)
    size = f"{sizes.blocks} blocks of {sizes.block_bytes:,} bytes ({scene.nbytes / 1e6:,.0f} MB)"
    found.notes.append(f"moves: {size}, medians of {sizes.rounds}; one thread")
    return found


# --- memory --------------------------------------------------------------------------------------


def _copies(scene: Scene, rounds: int, found: Findings) -> Limit:
    """Returns memcpy's rate."""
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
    limit = Limit.of(runs["memcpy"], "memcpy")
    found.rows += [
        rate_row("memory", MEMCPY, runs["memcpy"]),
        rate_row("memory", "save: device to host", runs["save"], limit),
        rate_row("memory", "save into slots never used before", [first], limit),
        rate_row("memory", "load: host to device", runs["load"], limit, "70 % of memcpy"),
    ]
    return limit


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


def _disk(scene: Scene, sizes: Sizes, folder: Path, copying: Limit, found: Findings) -> None:
    runs, unused = _DiskRuns(), _DiskRuns()
    # The first round is not counted: it makes the system find memory for files of this size.
    reasons = [_disk_round(scene, sizes, folder / "first", unused, True)]
    for number in range(sizes.rounds):
        reasons.append(_disk_round(scene, sizes, folder / str(number), runs, number % 2 == 0))
    found.rows += [
        rate_row("disk", "write: host to disk, not synced", runs.write, Limit.of(runs.raw_write, LMDB)),
        rate_row("disk", "fetch, warm: disk to device, verified", runs.warm, copying, "4 GB/s"),
    ]
    why_not_cold = next(filter(None, reasons), "")
    if why_not_cold:
        found.skipped["cold fetch"] = why_not_cold
        return
    limit = Limit.of(runs.raw_cold, LMDB)
    found.rows += [
        rate_row("disk", f"{LMDB}, cold: every page of the same values touched", runs.raw_cold),
        rate_row("disk", COLD, runs.cold, limit, f"85 % of {LMDB}"),
    ]
    paired = [ours / raw for ours, raw in zip(runs.cold, runs.raw_cold, strict=True)]
    found.notes.append(f"cold fetch beside LMDB, round by round: median {statistics.median(paired):.0%}")


def _disk_round(scene: Scene, sizes: Sizes, folder: Path, runs: _DiskRuns, first: bool) -> str:
    """Writes and reads with and without us; `first`: we go first. Returns why cold is not cold."""
    folder.mkdir()
    ours, raw = folder / "ours", folder / "raw"
    if first:
        runs.write.append(_write(scene, sizes, ours))
    runs.raw_write.append(_raw_write(scene, sizes, raw))
    if not first:
        runs.write.append(_write(scene, sizes, ours))
    shutil.rmtree(raw)
    drop_from_memory(ours / "data.mdb")
    _raw_read(scene, ours)  # not counted: below this machine, what is read first may be read slower
    reasons = []
    for mine in (first, not first):
        reasons.append(drop_from_memory(ours / "data.mdb"))
        before = read_so_far()
        if mine:
            runs.cold += _fetches(scene, sizes, ours, 1)
        else:
            runs.raw_cold.append(_raw_read(scene, ours))
        reasons.append(not_cold(before, read_so_far(), scene.nbytes))
    runs.warm += _fetches(scene, sizes, ours, 2)[1:]
    shutil.rmtree(folder)
    return next(filter(None, reasons), "")


def _store(sizes: Sizes, folder: Path) -> DiskStore:
    room = sizes.blocks * block_footprint(sizes.block_bytes, PAGE_SIZE)
    codec = ZSTD if sizes.compressed else PLAIN
    return DiskStore(folder, NAMESPACE, room + room // 8 + (8 << 20), sizes.block_bytes, codec=codec)


def _write(scene: Scene, sizes: Sizes, folder: Path) -> float:
    (rate,) = _through_mover(scene, sizes, folder, [Move.WRITE])
    return rate


def _fetches(scene: Scene, sizes: Sizes, folder: Path, times: int) -> list[float]:
    return _through_mover(scene, sizes, folder, [Move.FETCH] * times)


def _through_mover(scene: Scene, sizes: Sizes, folder: Path, moves: Sequence[Move]) -> list[float]:
    store = _store(sizes, folder)
    mover = Mover(scene.pages, scene.host, store, WallClock())
    try:
        return [scene.rate(mover, move) for move in moves]
    finally:
        if mover.close():
            store.close()


def _raw_write(scene: Scene, sizes: Sizes, folder: Path) -> float:
    """LMDB itself: values of the same size under the same keys, as many in a transaction."""
    value = bytes(value_bytes(4 * PAGE_SIZE, sizes.block_bytes))
    step = max(1, STEP_BYTES // sizes.block_bytes)
    room = 2 * sizes.blocks * block_footprint(sizes.block_bytes, PAGE_SIZE) + (8 << 20)

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
    """LMDB itself: every page of every value touched, in the same order, nothing checked or copied. The
    tree's own pages are in memory before, as they are when our store has been opened."""

    def read() -> None:
        with handle.begin(db=blocks, buffers=True) as txn:
            for block in scene.blocks:
                int(np.frombuffer(txn.get(block.key, b""), dtype=np.uint8)[::4096].sum())

    read_tree(folder, b"blocks", b"index")
    with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3) as handle:
        blocks = handle.open_db(b"blocks", create=False)
        return scene.nbytes / _seconds(read) / GB
