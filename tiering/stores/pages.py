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
        is pinned: then it must stay as it is until `settle`."""
        ...

    def settle(self) -> None:
        """Wait until what this thread has read and written is where it should be."""
        ...


class PoolPages:
    """Blocks of a KV pool: `storages` holds one tensor `[pages, ...]` per group, all on one device."""

    def __init__(self, storages: Sequence[Tensor]) -> None:
        if not storages:
            raise ValueError("a KV pool without groups has no blocks")
        flat = [storage.view(storage.shape[0], -1).view(torch.uint8) for storage in storages]
        self.group_bytes = tuple(pages.shape[1] for pages in flat)
        self.block_bytes = sum(self.group_bytes)
        device = storages[0].device
        self.pinned = device.type == "cuda"
        self._copier: _HostCopier | _DeviceCopier
        if device.type == "cpu":
            self._copier = _HostCopier([pages.numpy() for pages in flat])
        else:
            self._copier = _DeviceCopier(flat, device)

    def read(self, pages: Sequence[int], into: Bytes) -> None:
        self._check(pages, into)
        start = 0
        for group, (page, size) in enumerate(zip(pages, self.group_bytes, strict=True)):
            self._copier.read(group, page, into[start : start + size])
            start += size

    def write(self, pages: Sequence[int], source: Bytes) -> None:
        self._check(pages, source)
        start = 0
        for group, (page, size) in enumerate(zip(pages, self.group_bytes, strict=True)):
            self._copier.write(group, page, source[start : start + size])
            start += size

    def settle(self) -> None:
        self._copier.settle()

    def _check(self, pages: Sequence[int], run: Bytes) -> None:
        if len(pages) != len(self.group_bytes):
            raise ValueError(f"a block has {len(self.group_bytes)} pages, one per KV group; got {len(pages)}")
        if min(pages) < 0:  # numpy and torch would count from the end
            raise ValueError(f"no such page: {min(pages)}")
        if run.nbytes != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {run.nbytes}")


class _HostCopier:
    """Device memory that is this machine's. numpy copies without holding the interpreter."""

    def __init__(self, groups: Sequence[Bytes]) -> None:
        self._groups = groups

    def read(self, group: int, page: int, into: Bytes) -> None:
        np.copyto(into, self._groups[group][page])

    def write(self, group: int, page: int, source: Bytes) -> None:
        np.copyto(self._groups[group][page], source)

    def settle(self) -> None:
        """Nothing is left undone."""


class _DeviceCopier:
    """Memory of an accelerator. Copies run on a stream of their own, so they wait for no kernel; the
    core orders a transfer only after the step that wrote the pages has given its results."""

    def __init__(self, groups: Sequence[Tensor], device: torch.device) -> None:
        self._groups = groups
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def read(self, group: int, page: int, into: Bytes) -> None:
        with torch.cuda.stream(self._stream):
            torch.from_numpy(into).copy_(self._groups[group][page], non_blocking=True)

    def write(self, group: int, page: int, source: Bytes) -> None:
        host = torch.from_numpy(source) if source.flags.writeable else torch.from_numpy(source.copy())
        with torch.cuda.stream(self._stream):
            self._groups[group][page].copy_(host, non_blocking=True)

    def settle(self) -> None:
        self._stream.synchronize()
