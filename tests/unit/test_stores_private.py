"""What is kept under the data directory is for its owner alone, whatever the umask, also what an earlier
version left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentserve.server.sessions import folder as sessions_folder
from agentserve.server.sessions.store import SessionStore
from tests.kv_blocks import chain, open_store, put
from tiering.stores.private import close_to_others, make_folder


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}


def test_kv_and_sessions_are_for_their_owner(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data" / "kv" / "worker-0")
    assert all(put(store, chain(3)))
    sessions = SessionStore(tmp_path / "data" / "sessions")
    assert {mode for name, mode in modes(tmp_path).items()} == {0o700, 0o600}
    store.close()
    sessions.close()
    found = modes(tmp_path)
    assert found["data/kv/worker-0/state"] == 0o600
    assert set(found.values()) == {0o700, 0o600}


def test_a_damaged_file_is_copied_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    data = tmp_path / "data.mdb"
    data.write_bytes(b"what users said")
    kept = sessions_folder.keep_aside(data)
    assert (kept.read_bytes(), kept.stat().st_mode & 0o777) == (b"what users said", 0o600)


def test_what_an_earlier_version_left_open_is_closed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    (root / "worker-0").mkdir(parents=True)
    (root / "worker-0" / "state").write_text("synced")
    elsewhere.write_text("not ours")
    (root / "link").symlink_to(elsewhere)
    before = elsewhere.stat().st_mode
    close_to_others(root)
    found = modes(tmp_path)
    assert (found["kv"], found["kv/worker-0"], found["kv/worker-0/state"]) == (0o700, 0o700, 0o600)
    assert elsewhere.stat().st_mode == before
    close_to_others(tmp_path / "missing")


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o755)
    make_folder(mine / "a" / "b")
    found = modes(tmp_path)
    assert (found["mine"], found["mine/a"], found["mine/a/b"]) == (0o755, 0o700, 0o700)
