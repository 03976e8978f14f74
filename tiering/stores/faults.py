"""Named points at which a test may make a store slow, failing or wrong."""

from __future__ import annotations

from collections.abc import Callable

from tiering.stores.buffers import Bytes

HOST_COPY = "host.copy"  # before a block is saved or loaded
DISK_PAYLOAD = "disk.payload"  # a whole value, its checksum taken, before it goes to LMDB
DISK_COMMIT = "disk.commit"  # before a transaction of puts or deletions is committed
DISK_READ = "disk.read"  # before a block is read
DISK_ADOPT = "disk.adopt"  # an orphan is open, and its blocks not yet served
DISK_MAP = "disk.map"  # before LMDB is asked for room: raising lmdb.MapFullError here is its answer

POINTS = (HOST_COPY, DISK_PAYLOAD, DISK_COMMIT, DISK_READ, DISK_ADOPT, DISK_MAP)

Fault = Callable[[str, Bytes | None], None]
"""Called with a point's name and, at DISK_PAYLOAD, the bytes, which it may spoil in place. It may take
its time (a slow disk) or raise what the system would raise."""


def no_fault(point: str, data: Bytes | None) -> None:
    """How things are outside of tests."""
