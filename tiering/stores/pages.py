"""The bytes of KV pages on a device.

A block is one page of every KV group; its bytes are those pages one after the other, groups in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tiering.stores.buffers import Bytes
from tiering.stores.device_copies import DeviceCopies
from tiering.stores.packing import packing_for
from tiering.stores.streams import CudaStreams, Streams


class DevicePages(Protocol):
    """Reads and writes blocks. Called by the mover's threads, which may read and write different
    blocks at the same time; whoever ordered the transfer keeps everybody else off these pages."""

    @property
    def block_bytes(self) -> int: ...

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        """Copy block `pages` (its page in each group) to `into [block_bytes]`."""
        ...

    def write(self, pages: Sequence[int], source: Bytes) -> None:
        """Copy `source [block_bytes]` to block `pages`. `source` is read before this returns, unless it
        is pinned: then it must stay as it is until `settle`, and where that says so, beyond."""
        ...

    def settle(self) -> float | None:
        """Wait until what this thread has read is where it should be, and what it has written is for all who
        look: a device may hold up its steps until it is (`device_copies`). Then: the seconds that takes."""
        ...

    @property
    def duplex(self) -> bool:
        """Whether reads and writes go on beside each other without taking from one another's speed, and
        blocks from pinned memory need not be waited for: the more at once, the better."""
        ...

    def drain(self, timeout: float) -> bool:
        """Wait until nothing at all is on its way; False if that takes longer. Nothing is asked for then."""
        ...


class PoolPages:
    """Blocks of a KV pool: `storages` holds one tensor `[pages, layers, ...]` per group, on one device."""

    def __init__(
        self,
        storages: Sequence[Tensor],
        layers: Sequence[Sequence[int]] | None = None,
        streams: Streams | None = None,
    ) -> None:
        """layers: each group's, by their numbers in the model; without, one group after the other. streams:
        what copies are enqueued in; by default a GPU's own, and on the CPU nothing is."""
        if not storages:
            raise ValueError("a KV pool without groups has no blocks")
        flat = [storage.view(storage.shape[0], -1).view(torch.uint8) for storage in storages]
        self.group_bytes = tuple(pages.shape[1] for pages in flat)
        self.block_bytes = sum(self.group_bytes)
        device = storages[0].device
        self.pinned = device.type == "cuda"
        if streams is None and device.type != "cpu":
            streams = CudaStreams(device)
        self.copies: DeviceCopies | None = None
        self._copier: _HostCopier | DeviceCopies
        if streams is None:
            self._copier = _HostCopier([pages.numpy() for pages in flat])
        else:
            packing = packing_for(device, self.group_bytes)
            copies = DeviceCopies(flat, layers or _one_by_one(storages), streams, packing)
            self._copier = self.copies = copies

    @property
    def duplex(self) -> bool:
        return self.copies is not None

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        self._check(pages, into)
        self._copier.read(pages, into)

    def write(self, pages: Sequence[int], source: Bytes) -> None:
        self._check(pages, source)
        self._copier.write(pages, source)

    def settle(self) -> float | None:
        return self._copier.settle()

    def drain(self, timeout: float) -> bool:
        return self.copies is None or self.copies.drain(timeout)

    def _check(self, pages: Sequence[int], run: Bytes) -> None:
        if len(pages) != len(self.group_bytes):
            raise ValueError(f"a block has {len(self.group_bytes)} pages, one per KV group; got {len(pages)}")
        if min(pages) < 0:  # numpy and torch would count from the end
            raise ValueError(f"no such page: {min(pages)}")
        if run.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {run.nbytes}")


def _one_by_one(storages: Sequence[Tensor]) -> list[range]:
    counts = [storage.shape[1] for storage in storages]
    return [range(sum(counts[:at]), sum(counts[: at + 1])) for at in range(len(counts))]


class _HostCopier:
    """Device memory that is this machine's. numpy copies without holding the interpreter."""

    def __init__(self, groups: Sequence[Bytes]) -> None:
        self._groups = groups

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        start = 0
        for group, page in zip(self._groups, pages, strict=True):
            np.copyto(into[start : start + group.shape[1]], group[page])
            start += group.shape[1]

    def write(self, pages: Sequence[int], source: Bytes) -> None:
        start = 0
        for group, page in zip(self._groups, pages, strict=True):
            np.copyto(group[page], source[start : start + group.shape[1]])
            start += group.shape[1]

    def settle(self) -> None:
        """Nothing is left undone."""
