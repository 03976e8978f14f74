"""A model whose pages are restored beside its steps, on a device that is late."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

from agentserve.core.plan import Chunk, ChunkResult, Plan
from agentserve.models.config import DecoderConfig
from agentserve.models.hf_config import hf_config
from agentserve.models.weights import DecoderWeights, random_weights
from kernels.ops import Ops
from tests.late_streams import LateStreams
from tests.parity.harness import Engine, config_json
from tiering.stores.device_copies import DeviceCopies
from tiering.stores.host import HostStore
from tiering.stores.packing import PlainPacking
from tiering.stores.streams import Queue

BLOCKS, SLOTS = 2, 16
TOKENS = Random(6).choices(range(3, 90), k=BLOCKS * SLOTS + 5)


def model(name: str) -> tuple[DecoderConfig, DecoderWeights]:
    config = hf_config(config_json(name), name)
    return config, random_weights(config, 2, std=0.25)


class Beside:
    """The first blocks of `TOKENS` have been computed, saved, lost and ordered back: a load is under way."""

    def __init__(
        self,
        name: str,
        ops: Ops,
        deaf: frozenset[tuple[Queue, Queue]] = frozenset(),
        made: tuple[DecoderConfig, DecoderWeights] | None = None,
        last: int = 4,
    ) -> None:
        """last: rows of the chunk behind the blocks that is run last, at the end of `TOKENS`."""
        self.engine = Engine(*(made or model(name)), pages=12, page_size=SLOTS, ops=ops)
        self.start = len(TOKENS) - last
        self.tables = self.engine.tables(len(TOKENS))
        sizes = [BLOCKS * SLOTS, self.start - BLOCKS * SLOTS, last]
        self.expected = self.engine.logits(TOKENS, sizes, self.tables)[len(TOKENS) - 1]
        pool = self.engine.pool
        self.before = [
            storage[list(table[:BLOCKS])].clone()
            for storage, table in zip(pool.storages, self.tables, strict=True)
        ]
        flat = [storage.view(storage.shape[0], -1).view(torch.uint8) for storage in pool.storages]
        layers = [group.layers for group in pool.groups]
        self.streams = LateStreams(Random(1), deaf=deaf, eager=True)
        self.copies = DeviceCopies(flat, layers, self.streams, PlainPacking(), pack_below=0, part_bytes=1)
        host = HostStore(BLOCKS, self.copies.block_bytes)
        self.streams.pin(np.asarray(host.view(0).base))
        blocks = [tuple(table[at] for table in self.tables) for at in range(BLOCKS)]
        for at, pages in enumerate(blocks):
            self.copies.read(pages, host.view(at))
        self.copies.settle()
        self.copies.begin(lambda: [])
        self.copies.end()
        for _ in range(2):  # the first load is waited for
            for storage, table in zip(pool.storages, self.tables, strict=True):
                storage[list(table[:BLOCKS])] = float("nan")
            for at, pages in enumerate(blocks):
                self.copies.write(pages, host.view(at))
            self.copies.settle()
        self.engine.executor.expect(self.copies)

    def on_its_way(self) -> bool:
        """Whether nothing has come yet."""
        return all(
            bool(storage[table[at]].isnan().all())
            for storage, table in zip(self.engine.pool.storages, self.tables, strict=True)
            for at in range(BLOCKS)
        )

    def chunk(self) -> Chunk:
        return self.engine.chunk("s", TOKENS, self.start, len(TOKENS), self.tables)

    def attempt(self) -> ChunkResult:
        return self.engine.executor.run(Plan(1, (), (self.chunk(),), 0.0, ())).chunks[0]

    def prefill(self) -> Tensor:
        """The last row's logits."""
        self.engine.spy.rows.clear()
        self.engine.run(self.chunk())
        return self.engine.spy.rows["s"]
