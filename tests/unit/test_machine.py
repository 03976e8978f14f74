"""The pool is sized from what is really free, containers included; cores are those this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentserve.machine import POOL_CAP, available_memory, pool_bytes, usable_cores

MEMINFO = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:   2000000 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_kernel_and_the_container_both_bound_it(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert available_memory(root) == 2_048_000_000
    write(root, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert available_memory(root) == 2_048_000_000
    write(root, {"sys/fs/cgroup/memory.max": "1000\n", "sys/fs/cgroup/memory.current": "400\n"})
    assert available_memory(root) == 600
    group = "sys/fs/cgroup/memory/memory"
    write(root, {f"{group}.limit_in_bytes": "100", f"{group}.usage_in_bytes": "300"})
    assert available_memory(root) == 0


def test_workers_share_the_pool_and_it_is_capped() -> None:
    assert pool_bytes(10_000, 1) == 4000
    assert pool_bytes(10_000, 4) == 1000
    assert pool_bytes(2**50, 2) == POOL_CAP // 2
    assert pool_bytes(None, 2) == 256 * 2**20


def test_usable_cores_are_those_of_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert usable_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == (os.cpu_count() or 1)
