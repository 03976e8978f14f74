"""The host slab: copies of blocks in this machine's memory, by slot."""

from __future__ import annotations

import torch

from kernels.memory import huge_bytes
from tiering.stores.buffers import Bytes

ALIGN = 64  # bytes: a cache line
STAGING_BYTES = 32 << 20  # what blocks pass through on their way to a disk with no host tier before it
LEAST_STAGED = 4  # slots


def slot_bytes(block_bytes: int) -> int:
    """What one slot takes of the slab's budget."""
    return -(-block_bytes // ALIGN) * ALIGN


def staging_slots(block_bytes: int) -> int:
    """Slots of a staging area, where the host keeps no KV of its own."""
    return max(LEAST_STAGED, STAGING_BYTES // slot_bytes(block_bytes))


class HostStore:
    """`slots` places of one block each. Which block is where is the tier manager's business.

    Memory is taken once and touched when a slot is first used. `pinned` makes it page-locked, so that
    a GPU reads and writes it directly; that takes all of it at once.
    """

    def __init__(self, slots: int, block_bytes: int, pinned: bool = False) -> None:
        if slots < 1 or block_bytes < 1:
            raise ValueError(f"a host store needs slots and bytes, got {slots} slots of {block_bytes} bytes")
        self.slots = slots
        self.block_bytes = block_bytes
        stride = slot_bytes(block_bytes)
        if pinned:
            slab = torch.empty(slots * stride, dtype=torch.uint8, pin_memory=True)
        else:
            slab = huge_bytes(slots * stride)
        self.nbytes = slots * stride
        self._rows = slab.view(slots, stride).numpy()

    def view(self, slot: int) -> Bytes:
        """The bytes of `slot`, `[block_bytes]`, to be read or written in place."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"no host slot {slot}: there are {self.slots}")
        view: Bytes = self._rows[slot, : self.block_bytes]
        return view
