"""What goes wrong with disks, done to real LMDB files: never a wrong byte, never an exception."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.kv_blocks import BLOCK_BYTES, BUDGET, NAMESPACE, chain, content, fetched, has, open_store, put
from tiering.stores import environment
from tiering.stores.buffers import Bytes
from tiering.stores.disk import DiskStore
from tiering.stores.faults import DISK_COMMIT, DISK_MAP, DISK_PAYLOAD, DISK_READ, Fault
from tiering.types import TierFault

A, B, C = chain(3)


@contextmanager
def opened_by_hand(folder: Path) -> Iterator[tuple[lmdb.Transaction, lmdb._Database, lmdb._Database]]:
    """A write transaction on a store's files, and its two tables."""
    handle = lmdb.open(str(folder), max_dbs=3, map_size=2 * BUDGET)
    blocks, index = handle.open_db(b"blocks", create=False), handle.open_db(b"index", create=False)
    with handle.begin(write=True) as txn:
        yield txn, blocks, index
    handle.close()


def spoiled(folder: Path, spoil: Callable[[bytes], bytes]) -> DiskStore:
    """A store with A, B and C, in which A's value was changed behind its back."""
    store = open_store(folder)
    put(store, [A, B, C])
    store.close()
    with opened_by_hand(folder) as (txn, blocks, _):
        txn.put(A.key, spoil(txn.get(A.key, db=blocks) or b""), db=blocks)
    return open_store(folder)


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ 0x10]) + value[at + 1 :]


@pytest.mark.parametrize(
    "spoil",
    [
        *(pytest.param(flip(at), id=f"flipped-{at}") for at in (0, 17, 40, 70, 5000, -1 % BLOCK_BYTES)),
        *(pytest.param(lambda value, n=n: value[:n], id=f"truncated-{n}") for n in (0, 1, 60, 4096, 9000)),
        pytest.param(lambda value: value + b"\0", id="longer"),
        pytest.param(lambda value: bytes(len(value)), id="zeros"),
    ],
)
def test_a_spoiled_value_is_a_miss_and_is_deleted(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    store = spoiled(tmp_path, spoil)
    assert not has(store, A)
    assert store.take_faults() == (TierFault.CORRUPT,)
    assert fetched(store, A) == "missing on disk"  # deleted
    assert store.take_faults() == ()  # and counted once
    assert [entry.key for entry in store.entries()] == [B.key, C.key]
    assert all(has(store, block) for block in (B, C))
    assert put(store, [A]) == (True,)
    assert has(store, A)
    store.close()


def test_swapped_values_are_misses(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A, B, C])
    store.close()
    with opened_by_hand(tmp_path) as (txn, blocks, _):
        first, second = txn.get(A.key, db=blocks), txn.get(B.key, db=blocks)
        assert first is not None
        assert second is not None
        txn.put(A.key, second, db=blocks)
        txn.put(B.key, first, db=blocks)
    store = open_store(tmp_path)
    assert [has(store, block) for block in (A, B, C)] == [False, False, True]
    assert store.take_faults() == (TierFault.MISPLACED, TierFault.MISPLACED)
    assert [entry.key for entry in store.entries()] == [C.key]
    store.close()


def test_a_value_whose_index_is_gone_is_deleted_and_its_room_is_free(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A, B, C])
    used = store.used
    store.close()
    with opened_by_hand(tmp_path) as (txn, _, index):
        txn.delete(A.key, db=index)
    store = open_store(tmp_path)
    assert [has(store, block) for block in (A, B, C)] == [False, True, True]
    assert store.take_faults() == (TierFault.UNINDEXED,)
    assert store.used == used * 2 // 3
    store.close()
    with opened_by_hand(tmp_path) as (txn, blocks, index):
        assert txn.stat(blocks)["entries"] == txn.stat(index)["entries"] == 2


def test_an_index_that_cannot_be_read_is_not_believed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A, B])
    store.close()
    with opened_by_hand(tmp_path) as (txn, _, index):
        txn.put(A.key, b"odd", db=index)
    store = open_store(tmp_path)
    assert (store.entries(), has(store, B)) == ([], False)
    assert store.take_faults() == (TierFault.DISCARDED,)
    assert put(store, [A, B]) == (True, True)
    store.close()


def test_an_index_whose_value_is_gone_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A, B, C])
    store.close()
    with opened_by_hand(tmp_path) as (txn, blocks, _):
        txn.delete(A.key, db=blocks)
    store = open_store(tmp_path)
    assert fetched(store, A) == "missing on disk"
    assert store.take_faults() == (TierFault.MISSING,)
    assert [entry.key for entry in store.entries()] == [B.key, C.key]
    store.close()


# --- the system says no --------------------------------------------------------------------------


class At:
    """A fault at one point, while `on`."""

    def __init__(self, point: str, error: Exception) -> None:
        self.point, self.error, self.on = point, error, True

    def __call__(self, point: str, data: Bytes | None) -> None:
        if self.on and point == self.point:
            raise self.error


def faulty(folder: Path, fault: Fault) -> DiskStore:
    return DiskStore(folder, NAMESPACE, BUDGET, BLOCK_BYTES, fault=fault)


@pytest.mark.parametrize("point", [DISK_MAP, DISK_PAYLOAD, DISK_COMMIT])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        lmdb.MapFullError("full"),
        lmdb.DiskError("disk"),
    ],
)
def test_what_fails_while_writing_fails_alone(tmp_path: Path, point: str, error: Exception) -> None:
    fault = At(point, error)
    fault.on = False
    store = faulty(tmp_path, fault)
    put(store, [A, B])
    used = store.used
    fault.on = True
    stored = store.put_many([(block, content(block)) for block in chain(6)])
    assert stored.ok == (False,) * 6
    assert str(tmp_path) in stored.error
    assert store.used == used
    if point != DISK_PAYLOAD:
        gone = store.delete_many([A.key, B.key])
        assert gone.ok == (False, False)
        assert gone.error
    assert has(store, A)
    assert has(store, B)
    fault.on = False
    assert all(put(store, chain(6)))
    assert store.delete_many([A.key]).ok == (True,)
    store.close()


def test_a_read_error_is_a_miss_and_the_block_is_deleted(tmp_path: Path) -> None:
    """Who ordered it forgets it: kept, it would take room that nobody can free."""
    fault = At(DISK_READ, OSError(errno.EIO, "Input/output error"))
    store = faulty(tmp_path, fault)
    put(store, [A])
    assert "Input/output error" in str(fetched(store, A))
    assert store.take_faults() == (TierFault.UNREADABLE,)
    fault.on = False
    assert not has(store, A)
    assert (store.entries(), store.used) == ([], 0)
    assert put(store, [A]) == (True,)
    assert has(store, A)
    store.close()


def test_what_could_not_be_deleted_then_is_deleted_before_the_next_write(tmp_path: Path) -> None:
    troubles = [DISK_READ, DISK_COMMIT]

    def fault(point: str, data: Bytes | None) -> None:
        if point in troubles:
            raise OSError(errno.EIO, "Input/output error")

    store = faulty(tmp_path, fault)
    troubles.clear()
    put(store, [A])
    used = store.used
    troubles += [DISK_READ, DISK_COMMIT]
    assert not has(store, A)
    assert store.used == used
    troubles.clear()
    put(store, [B])
    assert [entry.key for entry in store.entries()] == [B.key]
    assert store.used == used
    store.close()


def test_a_torn_write_is_found_when_it_is_read(tmp_path: Path) -> None:
    def tear(point: str, data: Bytes | None) -> None:
        if point == DISK_PAYLOAD and data is not None:
            data[data.nbytes // 2 :] = 0

    store = faulty(tmp_path, tear)
    assert put(store, [A]) == (True,)
    assert not has(store, A)
    assert store.entries() == []
    store.close()


def test_a_broken_tree_is_left_alone_until_the_next_start(tmp_path: Path) -> None:
    fault = At(DISK_READ, lmdb.CorruptedError("a page lies"))
    store = faulty(tmp_path, fault)
    put(store, [A, B])
    assert not has(store, A)
    fault.on = False
    assert "not used until the next start" in str(fetched(store, B))
    assert store.take_faults() == (TierFault.UNREADABLE,), "once, whoever asks"
    assert put(store, [C]) == (False,)
    assert store.delete_many([B.key]).error
    store.close()
    again = open_store(tmp_path)
    assert again.entries() == []
    again.close()


def test_a_broken_orphan_is_let_go_and_the_own_blocks_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    orphan = open_store(theirs)
    put(orphan, [A, B])
    orphan.close()
    fault = At(DISK_READ, lmdb.CorruptedError("a page lies"))
    store = faulty(tmp_path / "mine", fault)
    put(store, [C])
    store.adopt(theirs)
    assert not has(store, A)
    fault.on = False
    assert [has(store, block) for block in (A, B, C)] == [False, False, True]
    assert not (theirs / "data.mdb").exists()
    store.close()


def test_a_device_that_fails_is_not_the_disks_fault(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A])

    def fail(payload: Bytes) -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        store.fetch(A, fail)
    assert store.take_faults() == ()
    assert store.entries() == []
    store.close()


def test_a_full_disk_is_a_failure_of_that_write(tmp_path: Path) -> None:
    """The system's own refusal, in a process that may write no file beyond a megabyte."""
    code = """
import resource, sys
from pathlib import Path
from tests.kv_blocks import chain, has, open_store, put
store = open_store(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
blocks, kept = chain(80), []
for at in range(0, 80, 4):
    stored = put(store, blocks[at : at + 4])
    assert len(set(stored)) == 1
    kept += blocks[at : at + 4] if stored[0] else []
assert 40 < len(kept) < 80, len(kept)
assert all(has(store, block) == (block in kept) for block in blocks)
gone = store.delete_many([block.key for block in kept[:20]])
assert not any(has(store, block) for block, ok in zip(kept, gone.ok) if ok)
assert all(has(store, block) for block in kept[20:])
print(len(store.entries()))
store.close()
"""
    run = [sys.executable, "-c", code, str(tmp_path)]
    kept = int(subprocess.run(run, check=True, timeout=60, capture_output=True).stdout)
    store = open_store(tmp_path)
    assert len(store.entries()) == kept
    assert all(has(store, block) for block in chain(80) if block.key in {e.key for e in store.entries()})
    store.close()


def test_a_reader_that_keeps_everything_stops_writes_but_no_deletions(tmp_path: Path) -> None:
    """Once the map is full of what somebody still reads, even a deletion finds no room of its own."""
    store = open_store(tmp_path)
    code = (
        "import lmdb, sys\n"
        "handle = lmdb.open(sys.argv[1], readonly=True, max_dbs=3)\n"
        "with handle.begin() as txn:\n"
        "    print('reading', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    put(store, [A])
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    refused = 0
    for round_ in range(1, 40):
        blocks = chain(20, first=1000 * round_)
        refused += put(store, blocks).count(False)
        gone = store.delete_many([block.key for block in blocks])
        assert gone.ok == (True,) * 20, gone.error
        assert not any(has(store, block) for block in blocks)
    assert refused > 0
    assert (tmp_path / "data.mdb").stat().st_size <= BUDGET + environment.RESERVE
    reader.kill()
    reader.wait()
    reader.stdin.close()
    reader.stdout.close()
    blocks = chain(80, first=77)
    assert all(put(store, blocks))
    assert all(has(store, block) for block in (A, *blocks))
    store.close()


def test_bytes_that_are_spoiled_in_memory_after_a_load_do_not_reach_the_disk(tmp_path: Path) -> None:
    """What `take` sees is the map itself: it cannot be written."""
    store = open_store(tmp_path)
    put(store, [A])

    def scribble(payload: Bytes) -> None:
        assert not payload.flags.writeable
        with pytest.raises(ValueError):
            payload[0] = np.uint8(1)

    assert store.fetch(A, scribble) == ""
    store.close()
