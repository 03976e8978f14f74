"""Making a file cold, and proof that it was: what the system holds of it, what a read took from the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

COLD_SHARE = 0.9  # of what was wanted, at least, must have come from the medium
LEFT_SHARE = 64  # one page in so many may stay in memory


def drop_from_memory(path: Path) -> str:
    """Write a file out and have the system forget its pages; nobody has it mapped. Returns why that cannot
    be relied on, else ""."""
    if not hasattr(os, "posix_fadvise"):
        return "this system has no posix_fadvise"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return still_in_memory(path)


def still_in_memory(path: Path) -> str:
    """Why a file cannot be called cold; "" if (almost) none of it is in memory."""
    there = pages_in_memory(path)
    if there is None:
        return "this system does not tell what is in memory"
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    if there > pages // LEFT_SHARE:
        return f"{there:,} of {pages:,} pages stay in memory"
    return ""


def pages_in_memory(path: Path) -> int | None:
    """How many of a file's pages the system holds; None where it does not say. Reads none of them
    (asking for a page without waiting, by `preadv2`, would start to read ahead)."""
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as area:
        start = ctypes.c_char.from_buffer(area)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states)
        del start  # the map cannot be closed while it is looked at
    return None if failed else sum(state & 1 for state in states)


def read_so_far() -> int | None:
    """Bytes that this process has had read from the medium; None where the system does not count them."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) if "read_bytes" in counts else None


def not_cold(before: int | None, after: int | None, wanted: int) -> str:
    """Why a read of `wanted` bytes between two counts was none from the medium; "" if it was."""
    if before is None or after is None:
        return "this system does not count what is read from the medium"
    if after - before < COLD_SHARE * wanted:
        return f"only {(after - before) / 1e6:,.0f} of {wanted / 1e6:,.0f} MB came from the medium"
    return ""
