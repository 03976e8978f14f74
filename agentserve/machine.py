"""What this machine is and leaves us: processor, cores, memory, and how large a KV pool is by default."""

from __future__ import annotations

import os
import platform
from pathlib import Path

POOL_SHARE = 0.4  # of what is available: the rest is for activations, the page cache, and others
POOL_CAP = 16 * 2**30  # bytes; more is better asked for than taken


def usable_cores() -> int:
    """How many cores this process may use; less than the machine has in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The processor's name, family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return f"{found.get('model name', 'unknown')} family {found.get('cpu family')} model {found.get('model')}"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not say.

    The smaller of the kernel's MemAvailable and what the control group leaves (a container's
    limit less its use, version 2 or 1).
    """
    bounds = [bound for bound in (_meminfo(root), _group_v2(root), _group_v1(root)) if bound is not None]
    return min(bounds) if bounds else None


def pool_bytes(available: int | None, share: int) -> int:
    """Bytes of one worker's pool when `share` workers start on a machine with `available` bytes left."""
    if available is None:
        return 512 * 2**20 // share
    return min(POOL_CAP, int(available * POOL_SHARE)) // share


def _meminfo(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_v2(root: Path) -> int | None:
    return _left(root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current")


def _group_v1(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    return _left(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")


def _left(limit: Path, used: Path) -> int | None:
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no such group, or the word "max"
        return None
