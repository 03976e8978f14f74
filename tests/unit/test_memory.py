"""The pool is sized from what is really free, containers included."""

from __future__ import annotations

from pathlib import Path

from agentserve.memory import POOL_CAP, available_memory, pool_bytes

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
