"""A worker's tiers put together: what the core is told of them agrees with what the stores can do."""

from __future__ import annotations

import os
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentserve.config import load
from agentserve.executor.pool import KVPool, kv_groups
from agentserve.server.workers.build_tiers import BuiltTiers, build_tiers
from agentserve.server.workers.sizes import tier_sizes
from agentserve.server.workers.spec import replacement, worker_spec
from tests.unit.test_models_gguf import model
from tiering.keys import block_key
from tiering.manager import HEADER_BYTES
from tiering.policy.registry import policy_names
from tiering.stores.environment import StoreBusy, StoreError, worker_folder
from tiering.types import Block, Move, TierFault, Transfer, TransferDone

PAGES = 8
NAMESPACE = b"n" * 32
CONFIG, _, _ = model()


class Opened:
    """Tiers over a pool of eight pages, each filled with its own number."""

    def __init__(
        self,
        folder: Path,
        index: int = 0,
        workers: int = 1,
        namespace: bytes = NAMESPACE,
        replaces: bool = False,
        **flags: Any,
    ) -> None:
        given = {"host_kv": "1MiB", "disk_kv": f"{4 * workers}MiB", "data_dir": str(folder), **flags}
        config = load({"workers": workers, **given})
        spec = worker_spec(config, index, "unused", os.getpid(), cores=1)
        self.spec = replacement(spec, 0) if replaces else spec
        groups = kv_groups(CONFIG, self.spec.page_size, torch.bfloat16)
        sizes = tier_sizes(self.spec, groups, None)
        assert sizes is not None
        self.sizes = sizes
        self.pool = KVPool(CONFIG, (PAGES,), self.spec.page_size, torch.bfloat16)
        for page in range(PAGES):
            self.pool.storages[0][page].view(torch.uint8).fill_(page + 1)
        self.tiers: BuiltTiers = build_tiers(self.spec, sizes, self.pool, namespace)
        self._orders = 0

    def move(self, move: Move, *blocks: Block) -> TransferDone:
        """Carry out one transfer and wait for its end."""
        self._orders += 1
        self.tiers.mover.submit(Transfer(self._orders, move, blocks))
        while True:
            for done in self.tiers.mover.poll():
                return done

    def page(self, number: int) -> set[int]:
        """The bytes that occur in a page."""
        return set(np.unique(self.pool.storages[0][number].view(torch.uint8).numpy()).tolist())

    def close(self) -> None:
        assert self.tiers.mover.close(20)
        self.tiers.release()


def blocks(count: int, first: int = 0) -> list[Block]:
    parent, made = NAMESPACE, []
    for number in range(count):
        tokens = array("i", [first + number] * 16).tobytes()
        key = block_key(parent, tokens)
        made.append(Block(key, parent, tokens, (number % PAGES,), number % 64))
        parent = key
    return made


def test_a_blocks_way_down_and_back(tmp_path: Path) -> None:
    with closing(Opened(tmp_path)) as opened:
        (block,) = blocks(1, first=7)
        for move in (Move.SAVE, Move.WRITE):
            assert opened.move(move, block).ok == (True,)
        opened.pool.storages[0].zero_()
        assert opened.move(Move.LOAD, block).ok == (True,)
        assert (opened.page(0), opened.page(1)) == ({1}, {0})
        opened.pool.storages[0].zero_()
        assert opened.move(Move.FETCH, block).ok == (True,)
        assert (opened.page(0), opened.page(1)) == ({1}, {0})


def test_the_core_is_told_of_as_many_blocks_as_the_disk_takes(tmp_path: Path) -> None:
    """The manager counts blocks of one size, the store reckons otherwise: neither may refuse the other."""
    with closing(Opened(tmp_path)) as opened:
        setup = opened.tiers.parts.setup
        assert (setup.host_slots, setup.block_bytes, setup.policy) == (64, 16384, "priced")
        each = setup.block_bytes + HEADER_BYTES
        count, rest = divmod(setup.disk_bytes, each)
        assert rest == 0
        assert count > 100
        written = blocks(count)
        for start in range(0, count, 32):
            part = written[start : start + 32]
            assert all(opened.move(Move.SAVE, *part).ok)
            assert all(opened.move(Move.WRITE, *part).ok), f"refused after {start} of {count}"
    with closing(Opened(tmp_path)) as again:
        entries = again.tiers.parts.setup.entries
        assert [entry.key for entry in entries] == [block.key for block in written]
        assert sum(entry.nbytes for entry in entries) == again.tiers.parts.setup.disk_bytes, "full, not more"


def test_host_memory_alone_has_no_disk(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, disk_kv="0")) as opened:
        assert opened.tiers.parts.setup.disk_bytes == 0
        assert opened.move(Move.SAVE, *blocks(1)).ok == (True,)
        assert "no disk tier" in opened.move(Move.WRITE, *blocks(1)).error
    assert list(tmp_path.iterdir()) == []


def test_a_disk_alone_has_a_staging_area(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, host_kv="0")) as opened:
        setup = opened.tiers.parts.setup
        assert setup.staging
        assert setup.disk_bytes > 0
        (block,) = blocks(1, first=7)
        for move in (Move.SAVE, Move.WRITE, Move.FETCH):
            assert opened.move(move, block).ok == (True,)


def test_two_servers_do_not_share_a_folder_and_workers_have_their_own(tmp_path: Path) -> None:
    with closing(Opened(tmp_path, 0, 2)), closing(Opened(tmp_path, 1, 2)):
        with pytest.raises(StoreBusy) as caught:
            Opened(tmp_path, 1, 2)
        assert "\n" not in str(caught.value)
    Opened(tmp_path, 1, 2).close()  # closed means given back


def test_what_workers_left_that_are_no_more_is_adopted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = {}
    for index in (2, 3):
        with closing(Opened(tmp_path, index, 4)) as opened:
            left[index] = blocks(3, first=100 * index)
            assert all(opened.move(Move.SAVE, *left[index]).ok)
            assert all(opened.move(Move.WRITE, *left[index]).ok)
    with closing(Opened(tmp_path, 4, 5, namespace=b"o" * 32)) as foreign:
        written = blocks(1, first=400)
        foreign.move(Move.SAVE, *written)
        assert foreign.move(Move.WRITE, *written).ok == (True,)
    with closing(Opened(tmp_path, 0, 2)) as first, closing(Opened(tmp_path, 1, 2)) as second:
        found = [[entry.key for entry in each.tiers.parts.setup.entries] for each in (first, second)]
        assert found == [[block.key for index in (2, 3) for block in left[index]], []]
        assert first.move(Move.FETCH, left[2][1]).ok == (True,)
        assert first.page(1) == {2}
    assert worker_folder(tmp_path, 4).exists(), "of another model: left alone"


def test_who_takes_a_dead_workers_place_serves_without_a_disk_that_cannot_be_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("not a folder")
    with pytest.raises(StoreError, match="no KV can be kept in "):
        Opened(tmp_path)
    with closing(Opened(tmp_path, replaces=True)) as opened:
        setup = opened.tiers.parts.setup
        assert (setup.host_slots, setup.disk_bytes, setup.entries) == (64, 0, ())
        assert "no KV can be kept in " in setup.disk_error
        assert opened.move(Move.SAVE, *blocks(1)).ok == (True,)
    assert "serving without KV on disk: no KV can be kept in " in caplog.text
    (tmp_path / "kv").unlink()
    with closing(Opened(tmp_path, replaces=True)) as opened:
        assert opened.tiers.parts.setup.disk_error == ""
        assert opened.tiers.parts.setup.disk_bytes > 0


def test_what_was_found_wrong_at_the_start_is_told(tmp_path: Path) -> None:
    for index, namespace, found in (
        (0, NAMESPACE, ()),
        (0, b"o" * 32, (TierFault.DISCARDED,)),
        (1, NAMESPACE, ()),
    ):
        with closing(Opened(tmp_path, index, index + 1, namespace)) as opened:
            assert opened.tiers.parts.setup.faults == found
            (block,) = blocks(1)
            assert opened.move(Move.SAVE, block).ok == opened.move(Move.WRITE, block).ok == (True,)
    with closing(Opened(tmp_path, 0, 1)) as opened:
        assert opened.tiers.parts.setup.faults == (TierFault.DISCARDED,)
        assert [entry.key for entry in opened.tiers.parts.setup.entries] == [block.key], "adopted"


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_can_be_asked_for(name: str, tmp_path: Path) -> None:
    with closing(Opened(tmp_path, disk_kv="0", tier_policy=name)) as opened:
        assert opened.tiers.parts.policy.name == opened.tiers.parts.setup.policy == name
