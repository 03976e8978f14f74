"""The disk store on real LMDB files: what is kept, what is refused, what survives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kv_blocks import (
    BLOCK_BYTES,
    BUDGET,
    NAMESPACE,
    chain,
    content,
    fetched,
    has,
    open_store,
    put,
)
from tiering.stores.disk import (
    HEADER_ROOM,
    DiskStore,
    adopt_orphans,
    block_footprint,
    capacity_of,
    footprint,
)
from tiering.stores.disk_format import ZSTD, value_bytes
from tiering.stores.environment import StoreBusy, StoreError, distrust, orphans, worker_folder
from tiering.types import DiskEntry

SIZE = footprint(value_bytes(16, BLOCK_BYTES))
FITS = capacity_of(BUDGET) // SIZE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = open_store(tmp_path / "kv")
    yield store
    store.close()


def test_blocks_come_back_bit_for_bit_and_survive_a_restart(tmp_path: Path) -> None:
    blocks = chain(20)
    store = open_store(tmp_path)
    assert put(store, blocks) == (True,) * 20
    assert all(has(store, block) for block in blocks)
    store.close()
    again = open_store(tmp_path)
    assert again.entries() == [DiskEntry(block.key, BLOCK_BYTES + HEADER_ROOM) for block in blocks]
    assert again.used == 20 * SIZE
    assert all(has(again, block) for block in blocks)
    again.close()


def test_a_folder_that_is_not_trusted_any_more_is_started_afresh(tmp_path: Path) -> None:
    blocks = chain(3)
    store = open_store(tmp_path)
    put(store, blocks)
    store.close()
    assert distrust(tmp_path)
    again = open_store(tmp_path)
    assert again.entries() == []
    assert put(again, blocks) == (True,) * 3
    again.close()


def test_a_folder_that_is_not_there_cannot_be_distrusted(tmp_path: Path) -> None:
    assert not distrust(tmp_path / "none")


def test_entries_come_in_the_order_of_writing(tmp_path: Path) -> None:
    blocks = chain(6)
    store = open_store(tmp_path)
    put(store, blocks[3:])
    put(store, blocks[:3])
    put(store, [blocks[4]])  # once more
    expected = [blocks[at].key for at in (3, 5, 0, 1, 2, 4)]
    assert [entry.key for entry in store.entries()] == expected
    store.close()
    again = open_store(tmp_path)
    assert [entry.key for entry in again.entries()] == expected
    put(again, [blocks[3]])
    assert [entry.key for entry in again.entries()][-1] == blocks[3].key
    again.close()


def test_what_is_not_there_is_a_miss(store: DiskStore) -> None:
    assert fetched(store, chain(1)[0]) == "missing on disk"
    assert store.delete_many([chain(1)[0].key]).ok == (True,)


def test_deleted_blocks_are_gone_and_their_room_is_used_again(store: DiskStore) -> None:
    blocks = chain(FITS)
    assert all(put(store, blocks))
    for round_ in range(1, 6):
        gone, fresh = blocks[:30], chain(30, first=10_000 * round_)
        assert put(store, fresh) == (False,) * 30
        assert store.delete_many([block.key for block in gone]).ok == (True,) * 30
        assert put(store, fresh) == (True,) * 30
        assert not any(has(store, block) for block in gone)
        blocks = blocks[30:] + fresh
    assert all(has(store, block) for block in blocks)


def test_the_budget_is_never_exceeded(store: DiskStore, tmp_path: Path) -> None:
    stored = store.put_many([(block, content(block)) for block in chain(FITS + 7)])
    assert stored.ok == (True,) * FITS + (False,) * 7
    assert stored.error == "the disk budget is used up"
    assert store.used == FITS * SIZE <= store.capacity < store.budget
    assert sum(file.stat().st_size for file in (tmp_path / "kv").glob("data.mdb")) <= BUDGET
    assert all(put(store, chain(FITS)))  # what is there is written again without more room


def test_a_budget_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no block"):
        DiskStore(tmp_path, NAMESPACE, 1 << 20, BLOCK_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_fill_the_room_and_no_more_are_never_refused(store: DiskStore) -> None:
    """As one who plans counts: KV and a header for a new block, what `entries` says for others."""
    planned = store.room // (BLOCK_BYTES + HEADER_ROOM)
    assert planned == FITS
    assert put(store, chain(planned)) == (True,) * planned
    assert sum(entry.nbytes for entry in store.entries()) <= store.room
    assert put(store, chain(1, first=10**6)) == (False,)


def test_the_room_of_a_block_can_be_told_beforehand(store: DiskStore) -> None:
    put(store, chain(3))
    assert store.used == 3 * block_footprint(BLOCK_BYTES, page_size=4)


def test_small_blocks_lie_inside_the_tree(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, NAMESPACE, BUDGET, 500)
    blocks = chain(200)
    assert all(store.put_many([(block, content(block, 500)) for block in blocks]).ok)
    assert [fetched(store, block) for block in blocks] == [content(block, 500).tobytes() for block in blocks]
    store.close()


def test_compressed_blocks_take_less_room_and_any_store_reads_them(tmp_path: Path) -> None:
    blocks = chain(10)
    even = [np.full(BLOCK_BYTES, number, dtype=np.uint8) for number in range(10)]
    store = DiskStore(tmp_path, NAMESPACE, BUDGET, BLOCK_BYTES, codec=ZSTD)
    assert all(store.put_many(list(zip(blocks, even, strict=True))).ok)
    assert store.used == 10 * footprint(100) < 10 * SIZE
    store.close()
    plain = open_store(tmp_path)
    assert [fetched(plain, block) for block in blocks] == [raw.tobytes() for raw in even]
    plain.close()


def test_a_second_opener_is_told(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(StoreBusy, match="another process keeps KV in"):
        open_store(tmp_path / "kv")
    put(store, chain(1))
    assert has(store, chain(1)[0])


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="no KV can be kept in"):
        open_store(tmp_path / "file" / "kv")


def test_a_closed_store_answers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, chain(1))
    store.close()
    store.close()
    assert fetched(store, chain(1)[0]) == "the disk store is closed"
    assert put(store, chain(1)) == (False,)


# --- workers that are no more ------------------------------------------------------------------


def test_a_smaller_server_finds_the_workers_it_does_not_have(tmp_path: Path) -> None:
    for number in (0, 1, 2, 10):
        open_store(worker_folder(tmp_path, number)).close()
    (tmp_path / "kv" / "worker-x").mkdir()
    (tmp_path / "kv" / "worker-7").mkdir()  # nothing in it
    assert orphans(tmp_path, 2) == [worker_folder(tmp_path, 2), worker_folder(tmp_path, 10)]
    assert orphans(tmp_path / "no such", 2) == []


def test_an_orphans_blocks_are_served_until_they_are_dropped(tmp_path: Path) -> None:
    mine, theirs = worker_folder(tmp_path, 0), worker_folder(tmp_path, 1)
    blocks = chain(8)
    orphan = open_store(theirs)
    put(orphan, blocks[:6])
    orphan.close()
    store = open_store(mine)
    put(store, blocks[5:])
    store.adopt(theirs)
    assert [entry.key for entry in store.entries()] == [block.key for block in blocks]
    assert all(has(store, block) for block in blocks)
    assert store.used == 3 * SIZE  # an orphan's blocks are outside the budget
    with pytest.raises(StoreBusy):
        open_store(theirs)
    store.delete_many([block.key for block in blocks[:5]])
    assert [has(store, block) for block in blocks] == [False] * 5 + [True] * 3
    assert orphans(tmp_path, 1) == [theirs]
    store.delete_many([blocks[5].key])
    assert orphans(tmp_path, 1) == []
    open_store(theirs).close()
    store.close()


def test_all_orphans_go_to_the_first_that_asks(tmp_path: Path) -> None:
    blocks = chain(6)
    for number, namespace in ((2, NAMESPACE), (3, b"o" * 32), (4, NAMESPACE)):
        orphan = open_store(worker_folder(tmp_path, number), namespace)
        put(orphan, blocks[number : number + 1])
        orphan.close()
    first, second = (open_store(worker_folder(tmp_path, number)) for number in (0, 1))
    adopt_orphans(first, tmp_path, 2)
    adopt_orphans(second, tmp_path, 2)
    assert [entry.key for entry in first.entries()] == [blocks[2].key, blocks[4].key]
    assert second.entries() == []
    assert orphans(tmp_path, 2) == [worker_folder(tmp_path, 2), worker_folder(tmp_path, 4)]
    first.close()
    adopt_orphans(second, tmp_path, 2)
    assert has(second, blocks[4])
    second.close()


def test_an_orphan_that_nobody_can_use_is_deleted(tmp_path: Path) -> None:
    theirs = worker_folder(tmp_path, 1)
    orphan = open_store(theirs, namespace=b"o" * 32)
    put(orphan, chain(3))
    orphan.close()
    store = open_store(worker_folder(tmp_path, 0))
    with pytest.raises(StoreError, match="deleted, not adopted"):
        store.adopt(theirs)
    assert orphans(tmp_path, 1) == []
    assert store.entries() == []
    store.close()


def test_an_orphan_that_runs_is_left_alone(tmp_path: Path) -> None:
    orphan = open_store(worker_folder(tmp_path, 1))
    put(orphan, chain(3))
    store = open_store(worker_folder(tmp_path, 0))
    with pytest.raises(StoreBusy):
        store.adopt(worker_folder(tmp_path, 1))
    assert all(has(orphan, block) for block in chain(3))
    store.close()
    orphan.close()
