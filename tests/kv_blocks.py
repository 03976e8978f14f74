"""KV blocks for tests of the stores: chained keys, and bytes that say whose they are."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

import numpy as np

from tiering.keys import block_key
from tiering.stores.buffers import Bytes
from tiering.stores.disk import DiskStore
from tiering.types import Block

NAMESPACE = hashlib.sha256(b"a model").digest()
BLOCK_BYTES = 9000  # three pages of LMDB
BUDGET = 2 << 20


def chain(count: int, first: int = 0, parent: bytes = NAMESPACE, groups: int = 1) -> list[Block]:
    """Blocks of one sequence of tokens `first ..`; block i has page and slot i."""
    blocks = []
    for number in range(count):
        tokens = array("i", range(first + 4 * number, first + 4 * number + 4)).tobytes()
        key = block_key(parent, tokens)
        blocks.append(Block(key, parent, tokens, (number,) * groups, number))
        parent = key
    return blocks


def content(block: Block, size: int = BLOCK_BYTES) -> Bytes:
    """Bytes that only this block has, and that do not compress."""
    seed = int.from_bytes(block.key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def put(store: DiskStore, blocks: list[Block]) -> tuple[bool, ...]:
    return store.put_many([(block, content(block)) for block in blocks]).ok


def fetched(store: DiskStore, block: Block) -> bytes | str:
    """The bytes that the store believes are the block's, or why it has none."""
    got: list[bytes] = []
    return store.fetch(block, lambda payload: got.append(payload.tobytes())) or got[0]


def has(store: DiskStore, block: Block) -> bool:
    """True if the store gives the right bytes; fails if it gives wrong ones."""
    got = fetched(store, block)
    assert isinstance(got, str) or got == content(block).tobytes(), "the store believed wrong bytes"
    return not isinstance(got, str)


def open_store(folder: Path, namespace: bytes = NAMESPACE, budget: int = BUDGET) -> DiskStore:
    return DiskStore(folder, namespace, budget, BLOCK_BYTES, page_size=4)
