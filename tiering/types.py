"""The vocabulary of tiers: where KV can be, and the orders that move it.

Whoever decides (the core) writes `Transfer`s, and may say a word (`Change`) of one in flight; whoever
moves bytes (`tiering.stores.mover`) answers each transfer with one `TransferDone`, whatever was said.
Between order and answer the device pages and host slots that a transfer names are pinned: nobody else
frees, reads or writes them. Plain values; they are part of the core's log.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Tier(Enum):
    """Where a block's bytes are, fastest first. What is nowhere is computed again."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Move(Enum):
    """What a transfer does with its blocks. Only DROP deletes; the others copy, but for PROBE, which asks."""

    SAVE = "save"  # device pages -> host slots
    LOAD = "load"  # host slots -> device pages
    WRITE = "write"  # host slots -> disk
    FETCH = "fetch"  # disk -> device pages, verified
    DROP = "drop"  # forget on disk
    PROBE = "probe"  # which of a run do other workers of this machine have on disk? ok: these
    BORROW = "borrow"  # another worker's disk -> device pages, verified


SHUT = "not used until the next start"  # so begin the errors of a disk that has been given up


class TierFault(Enum):
    """What goes wrong below the device, each thing counted once, where it is first found."""

    CORRUPT = "corrupt"  # a block whose checksum or length is wrong
    MISPLACED = "misplaced"  # a block that lies under another's key
    MISSING = "missing"  # a block that the disk's index names, and that is not there
    UNINDEXED = "unindexed"  # a block on disk that the index does not name
    UNREADABLE = "unreadable"  # a block that the system could not read
    UNWRITABLE = "unwritable"  # the disk has begun to refuse what is written
    LATE = "late"  # a turn has stopped waiting for blocks, and computes
    DISCARDED = "discarded"  # all blocks of a folder: of another model, cut off, unsynced, broken
    UNOPENED = "unopened"  # the disk cannot be had: a worker serves without it
    VANISHED = "vanished"  # the disk's folder was moved or deleted while it was in use


class Block(msgspec.Struct, frozen=True):
    """One full page of KV in a transfer."""

    key: bytes  # its block key (tiering.keys): 32 bytes
    parent: bytes  # the key of the block before it, or the namespace digest
    tokens: bytes  # its token ids, little-endian int32: a load is believed only if they agree
    pages: tuple[int, ...] = ()  # its device page in each KV group; empty where no page is concerned
    slot: int = -1  # its host slot; -1 where no slot is concerned


class Transfer(msgspec.Struct, frozen=True):
    """Blocks to move, in order: for loads, each is the next one of the same sequence."""

    id: int  # counts up from 1
    move: Move
    blocks: tuple[Block, ...]
    urgent: bool = False  # a session waits for it: it goes before the others of its queue


class Word(Enum):
    """What may be said of a transfer after it was ordered."""

    HURRY = "hurry"  # a session waits for it now: as if it had been urgent, behind those that were
    CANCEL = "cancel"  # nobody needs it: what is not done of it need not be


class Change(msgspec.Struct, frozen=True):
    """A word about a transfer in flight. It gets no answer of its own; one for a transfer that has ended
    changes nothing."""

    id: int  # the transfer's
    word: Word


NEWS = -1  # in place of a transfer's id: nobody ordered it, the disk says how it is


class TransferDone(msgspec.Struct, frozen=True):
    """The end of a transfer, however it ended. `ok[i]` says whether block i was moved whole.

    A block that was missing, torn, corrupt or of other tokens is not ok, and is deleted by the store.
    """

    id: int
    ok: tuple[bool, ...]
    seconds: float  # of moving, without waiting in queues
    error: str = ""  # one line, if anything failed
    cancelled: bool = False  # taken back: as if it had never begun
    faults: tuple[TierFault, ...] = ()  # what the disk was found to have wrong meanwhile

    def moved(self, blocks: int) -> list[bool]:
        """Of each of the transfer's blocks, whether it was moved whole: what is not said was not."""
        return [index < len(self.ok) and self.ok[index] for index in range(blocks)]


class DiskEntry(msgspec.Struct, frozen=True):
    """A block that a disk store has, as told at start."""

    key: bytes
    nbytes: int  # with its header
