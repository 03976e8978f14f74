"""Reading LMDB's tree before its values: it is in memory then, they are not, and nothing wrong is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentserve.bench.tiers.cold import drop_from_memory, pages_in_memory
from tests.kv_blocks import chain, has, open_store, put
from tiering.stores.descents import read_tree

COUNT = 400  # so many that their tree has leaves of its own


def filled(folder: Path) -> Path:
    store = open_store(folder, budget=64 << 20)
    assert all(put(store, chain(COUNT)))
    store.close()
    return folder / "data.mdb"


def test_the_tree_is_in_memory_and_no_value(tmp_path: Path) -> None:
    path = filled(tmp_path)
    why_not = drop_from_memory(path)
    if why_not:
        pytest.skip(why_not)
    before = pages_in_memory(path)
    read_tree(tmp_path, b"blocks", b"index")
    tree = pages_in_memory(path) - before
    assert 10 <= tree <= COUNT // 4, "a block has a page of its own at least, and there are as many"


def test_a_store_opens_cold_with_its_tree(tmp_path: Path) -> None:
    path = filled(tmp_path)
    if why_not := drop_from_memory(path):
        pytest.skip(why_not)
    store = open_store(tmp_path, budget=64 << 20)
    assert len(store.entries()) == COUNT
    assert all(has(store, block) for block in chain(COUNT))
    store.close()


@pytest.mark.parametrize("what", ["nothing", "no-database", "cut", "no-blocks"])
def test_what_cannot_be_read_is_left_to_others(what: str, tmp_path: Path) -> None:
    if what == "no-database":
        (tmp_path / "data.mdb").write_bytes(b"no database" * 9999)
    elif what == "cut":
        os.truncate(filled(tmp_path), 50_000)
    elif what == "no-blocks":
        open_store(tmp_path).close()
    before = sorted(entry.name for entry in tmp_path.iterdir())
    read_tree(tmp_path, b"blocks", b"index")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
