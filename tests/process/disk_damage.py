"""Damage to KV on disk, done to the files of a worker that is not running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

PARENT = 36  # bytes of a value before its parent key: checksum, magic, version, codec, zeros, lengths
MAP_BYTES = 1 << 30


class Damage:
    """One worker's blocks on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._open() as (txn, blocks, _):
            self._values = {bytes(key): bytes(value) for key, value in txn.cursor(blocks)}
        self._parents = {key: value[PARENT : PARENT + 32] for key, value in self._values.items()}

    @contextmanager
    def _open(self) -> Iterator[tuple[lmdb.Transaction, lmdb._Database, lmdb._Database]]:
        handle = lmdb.open(str(self._folder), max_dbs=3, map_size=MAP_BYTES)
        blocks, index = handle.open_db(b"blocks", create=False), handle.open_db(b"index", create=False)
        with handle.begin(write=True) as txn:
            yield txn, blocks, index
        handle.close()

    def own_blocks(self) -> list[list[bytes]]:
        """Keys of the blocks that only one run of tokens has, run by run, each in order."""
        children: dict[bytes, list[bytes]] = {}
        for key, parent in self._parents.items():
            children.setdefault(parent, []).append(key)
        runs = []
        for leaf in self._parents.keys() - children.keys():
            run = [leaf]
            while len(children[parent := self._parents[run[-1]]]) == 1 and parent in self._parents:
                run.append(parent)
            runs.append(run[::-1])
        return sorted(runs)

    def _place(self, key: bytes) -> int:
        """Where the value lies in the file."""
        return (self._folder / "data.mdb").read_bytes().index(self._values[key])

    def _overwrite(self, at: int, data: bytes) -> None:
        with (self._folder / "data.mdb").open("r+b") as file:
            file.seek(at)
            file.write(data)

    def flip(self, key: bytes) -> None:
        """One bit in the middle of the block's KV, of an exponent (bf16): whoever used it would say so."""
        middle = len(self._values[key]) // 2 | 1
        self._overwrite(self._place(key) + middle, bytes([self._values[key][middle] ^ 0x40]))

    def truncate(self, key: bytes) -> None:
        """Half of the value."""
        with self._open() as (txn, blocks, _):
            txn.put(key, self._values[key][: len(self._values[key]) // 2], db=blocks)

    def swap(self, first: bytes, second: bytes) -> None:
        """Each block's value, whole, under the other's key."""
        places = self._place(first), self._place(second)
        assert len(self._values[first]) == len(self._values[second])
        self._overwrite(places[0], self._values[second])
        self._overwrite(places[1], self._values[first])

    def lose_index(self, key: bytes) -> None:
        with self._open() as (txn, _, index):
            assert txn.delete(key, db=index)

    def lose_value(self, key: bytes) -> None:
        with self._open() as (txn, blocks, _):
            assert txn.delete(key, db=blocks)
