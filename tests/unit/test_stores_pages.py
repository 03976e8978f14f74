"""Blocks of a pool and slots of the slab, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv_pages import KV_DTYPES
from tiering.stores.host import HostStore, slot_bytes
from tiering.stores.pages import PoolPages


def pool(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    made = []
    for number, shape in enumerate(shapes):
        size = int(np.prod(shape)) * dtype.itemsize
        random = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
        made.append(torch.from_numpy(random).view(dtype).view(shape))
    return made


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_block_is_its_pages_of_all_groups_one_after_the_other(dtype: torch.dtype) -> None:
    storages = pool(dtype, (6, 2, 2, 4, 3, 8), (9, 1, 2, 4, 3, 8))
    pages = PoolPages(storages)
    out = np.zeros(pages.block_bytes, dtype=np.uint8)
    pages.read((5, 7), out)
    expected = [part.reshape(-1).view(torch.uint8).numpy() for part in (storages[0][5], storages[1][7])]
    assert out.tobytes() == b"".join(part.tobytes() for part in expected)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_saved_and_loaded_is_the_same_bits_and_nothing_else_changes(dtype: torch.dtype) -> None:
    storages = pool(dtype, (6, 2, 2, 4, 3, 8), (9, 1, 2, 4, 3, 8))
    before = [storage.view(torch.uint8).clone() for storage in storages]
    pages = PoolPages(storages)
    host = HostStore(3, pages.block_bytes)
    pages.read((2, 3), host.view(1))
    pages.write((4, 8), host.view(1))
    pages.settle()
    for storage, old, source, target in zip(storages, before, (2, 3), (4, 8), strict=True):
        now = storage.view(torch.uint8)
        assert torch.equal(now[target], old[source])
        others = [page for page in range(len(old)) if page != target]
        assert torch.equal(now[others], old[others])


def test_read_only_bytes_can_be_written_to_pages() -> None:
    """As they come from a map of a file."""
    storages = pool(torch.float32, (4, 1, 2, 4, 1, 8))
    pages = PoolPages(storages)
    source = np.frombuffer(bytes(range(256)), dtype=np.uint8)
    pages.write((3,), source)
    assert storages[0][3].reshape(-1).view(torch.uint8).tolist() == list(range(256))


def test_wrong_pages_and_sizes_are_refused() -> None:
    pages = PoolPages(pool(torch.float32, (4, 1, 2, 4, 1, 8), (4, 1, 2, 4, 1, 8)))
    room = np.zeros(pages.block_bytes, dtype=np.uint8)
    with pytest.raises(ValueError, match="one per KV group"):
        pages.read((1,), room)
    with pytest.raises(ValueError, match="no such page"):
        pages.write((1, -1), room)
    with pytest.raises(IndexError):
        pages.read((1, 4), room)
    with pytest.raises(ValueError, match="512 bytes, not 511"):
        pages.read((1, 1), room[1:])
    with pytest.raises(ValueError, match="without groups"):
        PoolPages([])


def test_slots_are_apart_and_start_at_cache_lines() -> None:
    host = HostStore(5, 100)
    assert host.nbytes == 5 * slot_bytes(100) == 640
    for slot in range(5):
        view = host.view(slot)
        assert view.nbytes == 100
        assert view.ctypes.data % 64 == 0
        view[:] = slot + 1
    assert [int(host.view(slot).sum()) for slot in range(5)] == [100, 200, 300, 400, 500]


def test_slots_that_are_not_there_are_refused() -> None:
    host = HostStore(2, 100)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="no host slot"):
            host.view(slot)
    with pytest.raises(ValueError, match="needs slots and bytes"):
        HostStore(0, 100)
