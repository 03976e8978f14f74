"""Random histories of the disk store against a dictionary: nothing wrong, nothing beyond the budget."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.kv_blocks import BLOCK_BYTES, NAMESPACE, chain, content, fetched
from tiering.stores.buffers import Bytes
from tiering.stores.disk import DiskStore, capacity_of
from tiering.stores.disk_format import PLAIN, ZSTD
from tiering.stores.faults import DISK_COMMIT, DISK_MAP, DISK_PAYLOAD
from tiering.types import Block

BUDGET = 1_400_000  # holds some twenty blocks: most histories fill it
UNIVERSE = chain(40)
FEW = st.lists(st.sampled_from(range(len(UNIVERSE))), min_size=1, max_size=8, unique=True)


def bytes_of(block: Block, kind: int) -> Bytes:
    """Either bytes that do not compress, or some that do: blocks of one key may have either."""
    raw = content(block)
    if kind:
        raw[kind * 1000 :] = 0
    return raw


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.model: dict[bytes, bytes] = {}
        self.trouble = ""
        self.store = self.opened(PLAIN)

    def opened(self, codec: int) -> DiskStore:
        return DiskStore(self.path, NAMESPACE, BUDGET, BLOCK_BYTES, codec=codec, fault=self.fault)

    def fault(self, point: str, data: Bytes | None) -> None:
        if point == self.trouble:
            if data is None:
                raise OSError(5, "Input/output error")
            data[-1] ^= 1

    @rule(few=FEW, kind=st.integers(0, 8))
    def write(self, few: list[int], kind: int) -> None:
        blocks = [(UNIVERSE[at], bytes_of(UNIVERSE[at], kind)) for at in few]
        stored = self.store.put_many(blocks)
        for (block, raw), ok in zip(blocks, stored.ok, strict=True):
            if ok:
                self.model[block.key] = raw.tobytes()
        assert all(stored.ok) == (not stored.error)

    @rule(few=FEW)
    def delete(self, few: list[int]) -> None:
        assert all(self.store.delete_many([UNIVERSE[at].key for at in few]).ok)
        for at in few:
            self.model.pop(UNIVERSE[at].key, None)

    @rule(at=st.sampled_from(range(len(UNIVERSE))))
    def read(self, at: int) -> None:
        block = UNIVERSE[at]
        assert fetched(self.store, block) == self.model.get(block.key, "missing on disk")

    @rule(few=FEW, point=st.sampled_from([DISK_MAP, DISK_COMMIT]), delete=st.booleans())
    def fail(self, few: list[int], point: str, delete: bool) -> None:
        self.trouble = point
        blocks = [UNIVERSE[at] for at in few]
        if delete:
            ok = self.store.delete_many([block.key for block in blocks]).ok
            assert ok == tuple(block.key not in self.model for block in blocks)
        else:
            assert not any(self.store.put_many([(block, content(block)) for block in blocks]).ok)
        self.trouble = ""

    @rule(few=FEW)
    def tear(self, few: list[int]) -> None:
        self.trouble = DISK_PAYLOAD
        blocks = [UNIVERSE[at] for at in few]
        stored = self.store.put_many([(block, content(block)) for block in blocks])
        self.trouble = ""
        for block, ok in zip(blocks, stored.ok, strict=True):
            if ok:
                assert fetched(self.store, block) == "its checksum is wrong"
                self.model.pop(block.key, None)

    @rule(codec=st.sampled_from([PLAIN, ZSTD]))
    def reopen(self, codec: int) -> None:
        order = [entry.key for entry in self.store.entries()]
        self.store.close()
        self.store = self.opened(codec)
        assert [entry.key for entry in self.store.entries()] == order

    @precondition(lambda self: self.model)
    @rule()
    def read_all(self) -> None:
        for block in UNIVERSE:
            assert fetched(self.store, block) == self.model.get(block.key, "missing on disk")

    @invariant()
    def within_the_budget(self) -> None:
        entries = self.store.entries()
        assert {entry.key for entry in entries} == set(self.model)
        assert self.store.used <= capacity_of(BUDGET)
        assert sum(entry.nbytes for entry in entries) <= self.store.room
        assert (self.path / "data.mdb").stat().st_size <= BUDGET

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_contents_differ() -> None:
    assert len({content(block).tobytes() for block in UNIVERSE}) == len(UNIVERSE)
    assert np.count_nonzero(bytes_of(UNIVERSE[0], 1)[1000:]) == 0
