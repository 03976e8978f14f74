"""Random blocks in a pool and a slab, and how fast a mover takes them from one place to another."""

from __future__ import annotations

import select

import numpy as np
import torch

from kernels.memory import empty_pages
from tiering.keys import block_key
from tiering.stores.host import HostStore
from tiering.stores.mover import Mover
from tiering.stores.pages import PoolPages
from tiering.types import Block, Move, Transfer

NAMESPACE = bytes(32)
PAGE_SIZE = 16  # tokens of a block
GB = 1e9
PATIENCE = 300.0  # seconds for one transfer


class Scene:
    """A pool of random bytes, a slab of its size, and the blocks in both."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        count, size = blocks, block_bytes
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
