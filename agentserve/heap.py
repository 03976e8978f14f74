"""The heap of a process that serves: what costs a pause is done when nobody waits, or where it is small.

Python's collector of cycles looks at every object there is whenever their number has grown by a quarter:
60 ms with a thousand clients, in which no stream gets a token. Requests leave no cycles (a test holds that),
so what it could find is little, and it may wait. The C library keeps what large bodies leave in pieces, and
gives it back when it is asked to.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Protocol

ROUNDS = 10  # collections of young objects, before there is one of old ones: Python's own number
FEW = 60_000  # blocks of memory, at which a collection takes some 20 ms
MANY = 2_000_000  # blocks (some 200 MB) that may have come since the last one before it no longer waits
GROWN = 32 << 20  # bytes by which the process is larger than it was once, before it gives back what it can
_NEVER = 2**31 - 1

# mallopt(3). The library would take each large block that is freed for a sign to keep the next ones: up to
# 64 MiB at the end of every arena, and there are eight for each core.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_BOUNDS = (
    (_MMAP_THRESHOLD, 2 << 20),  # bytes: who frees so large a block gives it back at once
    (_TRIM_THRESHOLD, 4 << 20),  # bytes: more than that is not kept at an arena's end
    (_ARENA_MAX, 4),  # few threads allocate without the interpreter's lock
)


def freeze() -> None:
    """Take all that lives out of the cyclic collector's sight. Call once, when everything is built.

    A full collection looks at every object there is. Over a tokenizer, an application and their modules
    that takes tens of milliseconds, in which no stream gets a token; over what turns leave behind it
    takes less than one.
    """
    gc.collect()
    gc.freeze()


def bound_pieces() -> None:
    """What the C library may keep of what was freed. Call before there are threads; nothing where it has no
    such bounds (musl, macOS)."""
    for name, value in _BOUNDS:
        _libc("mallopt", name, value)


def give_back() -> None:
    """Pages that nothing lies on, to the system. A tenth of a second for some hundred MiB: call it in a
    thread (it does not hold the interpreter's lock)."""
    _libc("malloc_trim", 0)


def resident() -> int:
    """Bytes of memory that the process takes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _libc(name: str, *arguments: int) -> None:
    if sys.platform == "linux" and (call := getattr(ctypes.CDLL(None), name, None)) is not None:
        call(*arguments)


class Collector(Protocol):
    """Python's, of cycles."""

    def rounds(self) -> int:
        """Collections of young objects since the last full one."""
        ...

    def blocks(self) -> int:
        """Of memory, that Python has allocated: up to half of them are objects that a full one looks at. (To
        count those takes as long as to collect them.)"""
        ...

    def collect(self) -> None:
        """A full one."""
        ...


class PythonsCollector:
    def rounds(self) -> int:
        return gc.get_count()[2]

    def blocks(self) -> int:
        return sys.getallocatedblocks()

    def collect(self) -> None:
        gc.collect()


class FullCollections:
    """When they happen: not by themselves any more, until `stop`, but as one `look`s."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._first = 0  # blocks that there were at the start, of what was frozen
        self._left = 0  # that the last one left besides
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        self._first = self._collector.blocks()
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def stop(self) -> None:
        gc.set_threshold(*self._thresholds)

    def look(self, quiet: bool) -> bool:
        """Collect if it is time: where there is little to look at, where nobody waits (`quiet`), or where
        what may be garbage is as much as was left the last time, and MANY more. Whether it did."""
        collector = self._collector
        if collector.rounds() < ROUNDS:
            return False
        held = collector.blocks() - self._first
        if not quiet and FEW < held < 2 * self._left + MANY:
            return False
        collector.collect()
        self._left = max(0, collector.blocks() - self._first)
        return True
