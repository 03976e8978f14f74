"""Environments that cannot be used, or not any more: deleted with one line in the log, never opened."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kv_blocks import BUDGET, NAMESPACE, chain, has, open_store, put
from tiering.stores import environment

A, B, C = chain(3)


def cut(folder: Path, size: int) -> None:
    os.truncate(folder / "data.mdb", size)


def overwrite(folder: Path, data: bytes) -> None:
    (folder / "data.mdb").write_bytes(data)


@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(lambda folder: cut(folder, 4096), id="one-page"),
        pytest.param(lambda folder: cut(folder, 50_000), id="half"),
        pytest.param(lambda folder: overwrite(folder, b"no database" * 9999), id="not-lmdb"),
        pytest.param(lambda folder: (folder / "state").unlink(), id="no-state"),
        pytest.param(lambda folder: (folder / "state").write_bytes(b"\xff\0"), id="bad-state"),
    ],
)
def test_an_environment_that_cannot_be_used_is_started_afresh(
    tmp_path: Path, break_it: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    blocks = chain(20)
    store = open_store(tmp_path)
    put(store, blocks)
    store.close()
    break_it(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert store.entries() == []
    assert len(lines) == 1
    assert "started afresh" in lines[0]
    assert all(put(store, blocks))
    assert all(has(store, block) for block in blocks)
    store.close()
    again = open_store(tmp_path)
    assert len(again.entries()) == 20
    again.close()


def test_an_empty_file_is_a_new_environment(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, [A, B])
    store.close()
    cut(tmp_path, 0)
    store = open_store(tmp_path)
    assert not has(store, A)
    assert put(store, [A]) == (True,)
    assert has(store, A)
    store.close()


def test_blocks_of_another_model_are_never_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    put(store, [A, B])
    store.close()
    other = open_store(tmp_path, namespace=b"o" * 32)
    assert other.entries() == []
    assert not has(other, A)
    assert "another model" in caplog.text
    other.close()
    back = open_store(tmp_path, namespace=NAMESPACE)
    assert back.entries() == []
    back.close()


def test_another_format_version_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    put(store, [A])
    store.close()
    monkeypatch.setattr(environment, "VERSION", 99)
    newer = open_store(tmp_path)
    assert newer.entries() == []
    newer.close()


def test_a_smaller_budget_starts_afresh(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget=16 * BUDGET)
    assert all(put(store, chain(800)))
    store.close()
    small = open_store(tmp_path)
    assert (small.entries(), small.used) == ([], 0)
    small.close()
    assert (tmp_path / "data.mdb").stat().st_size <= BUDGET


def left_unsynced(folder: Path, blocks: int) -> None:
    """A process writes and ends without a goodbye."""
    code = (
        "import os, sys; from pathlib import Path; from tests.kv_blocks import chain, open_store, put;"
        f"store = open_store(Path(sys.argv[1])); assert all(put(store, chain({blocks}))); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def test_what_a_killed_process_committed_is_there(tmp_path: Path) -> None:
    left_unsynced(tmp_path, 3)
    store = open_store(tmp_path)
    assert all(has(store, block) for block in (A, B, C))
    store.close()


@pytest.mark.parametrize("boot", ["another-boot", None])
def test_after_a_power_cut_unsynced_blocks_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str | None
) -> None:
    """The next boot has another id; None: a system that has no such id."""
    left_unsynced(tmp_path / "kv", 3)
    identity = tmp_path / "boot_id"
    if boot is not None:
        identity.write_text(boot)
    monkeypatch.setattr(environment, "_BOOT_ID", identity)
    store = open_store(tmp_path / "kv")
    assert store.entries() == []
    put(store, [A])
    store.close()  # synced
    identity.write_text("a third")
    again = open_store(tmp_path / "kv")
    assert has(again, A)
    again.close()
