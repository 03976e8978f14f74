"""Steps of a real model and the mover over a device whose copies are as late as they may be."""

from __future__ import annotations

import select
from array import array
from random import Random

import numpy as np
import pytest
import torch

from agentserve.clock import WallClock
from agentserve.core.plan import PageCopy, Plan
from kernels.reference import ReferenceOps
from tests.beside_rig import TOKENS, Beside
from tests.kv_blocks import chain
from tests.late_streams import LateStreams
from tests.parity.harness import CPU
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.stores.streams import Queue
from tiering.types import Move, Transfer, TransferDone

PATIENCE = 60.0  # seconds, only if something is broken
PAGES, SLOTS = 6, 5


@pytest.mark.parametrize("name", ["llama", "qwen2-windows"])
def test_a_prefill_behind_blocks_that_are_on_their_way_has_the_same_bits(name: str) -> None:
    beside = Beside(name, ReferenceOps(CPU))
    assert beside.on_its_way()
    assert torch.equal(beside.prefill(), beside.expected)


def test_without_waiting_it_has_not() -> None:
    """Pages that have not come hold NaN here."""
    beside = Beside("llama", ReferenceOps(CPU), frozenset({(Queue.COMPUTE, Queue.IN)}))
    assert "not finite" in beside.attempt().error


def test_a_copy_of_a_page_that_is_on_its_way_is_of_what_comes() -> None:
    beside = Beside("llama", ReferenceOps(CPU))
    source, target = beside.tables[0][1], beside.engine.tables(1)[0][0]
    beside.engine.executor.run(Plan(1, (PageCopy(0, source, target, 16),), (), 0.0, ()))
    assert torch.equal(beside.engine.pool.storages[0][target], beside.before[0][1])


def test_wrong_plans_fail_as_they_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the device is told that their steps are over."""
    beside = Beside("llama", ReferenceOps(CPU))
    ended: list[bool] = []
    end = beside.copies.end
    monkeypatch.setattr(beside.copies, "end", lambda: (ended.append(True), end()))
    with pytest.raises(ValueError, match="page copy names KV group 7"):
        beside.engine.executor.run(Plan(1, (PageCopy(7, 0, 1, 4),), (), 0.0, ()))
    tokens = list(TOKENS)
    wrong = beside.engine.chunk("w", tokens, 0, 5, (array("i", [0]), array("i", [0])))
    (result,) = beside.engine.executor.run(Plan(2, (), (wrong,), 0.0, ())).chunks
    assert "2 page tables for 1 KV groups" in result.error
    assert ended == [True, True]
    assert torch.equal(beside.prefill(), beside.expected)


def test_through_the_mover_a_load_is_answered_before_it_arrives_and_close_waits_for_it() -> None:
    storages = [torch.zeros((PAGES, 2, 2, 4, 1, 8)) for _ in range(2)]
    slab_owner = HostStore(SLOTS, 1024)
    streams = LateStreams(Random(1))
    streams.pin(np.asarray(slab_owner.view(0).base))
    pages = PoolPages(storages, streams=streams)
    assert pages.copies is not None
    pages.copies.begin(lambda: [])
    pages.copies.end()
    mover = Mover(pages, slab_owner, None, WallClock())
    blocks = chain(3, groups=2)

    def move(number: int, what: Move) -> TransferDone:
        mover.submit(Transfer(number, what, tuple(blocks)))
        while not (done := mover.poll()):
            assert select.select([mover.fileno()], [], [], PATIENCE)[0]
        return done[0]

    storages[0].fill_(1.5)
    assert move(1, Move.SAVE).ok == (True,) * 3
    assert move(2, Move.LOAD).ok == (True,) * 3  # waited for
    slab_owner.view(1).view(np.float32).fill(2.5)
    done = move(3, Move.LOAD)
    assert done.ok == (True,) * 3
    assert done.seconds > 0.9, "as long as the one before it took"
    at = blocks[1].pages[0]
    assert storages[0][at].eq(1.5).all(), "it is under way"
    assert mover.close(PATIENCE)
    assert storages[0][at].eq(2.5).all()
