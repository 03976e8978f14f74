"""The session environment on a real file system: damage, full disks, foreign formats, two servers."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.changes import Delete, Forget, Put, turn_name
from agentserve.server.sessions.environment import Table, unsealed
from agentserve.server.sessions.store import SessionStore, Stored
from tests.session_files import FailingDisk, head, read, turn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    made = SessionStore(tmp_path / "data" / "sessions")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with two sessions, closed."""
    made = SessionStore(tmp_path / "sessions")
    made.write([head(b"s1"), turn(b"s1", 1), turn(b"s1", 2, b"x" * 3000), head(b"s2"), turn(b"s2", 1)])
    made.close()
    return tmp_path / "sessions"


def flipped(bit: int, value: bytes) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if i == bit // 8 else 0) for i, byte in enumerate(value))


def raw(folder: Path, table: Table, name: bytes, change: Any) -> None:
    """Change a stored value behind the store's back; `change` of the value gives None to delete it."""
    env = lmdb.open(str(folder), max_dbs=8, lock=False)
    with env.begin(write=True) as txn:
        db = env.open_db(table.value, txn=txn)
        txn.put(name, change(txn.get(name, db=db)), db=db)
    env.close()


def test_what_was_written_is_there_again(folder: Path) -> None:
    found = read(folder)
    assert found == {
        b"s1": Stored(b"a head", {1: b"a turn", 2: b"x" * 3000}),
        b"s2": Stored(b"a head", {1: b"a turn"}),
    }


def test_only_the_owner_may_read_what_users_said(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "data.mdb").stat().st_mode) == 0o600


def test_a_session_is_forgotten_whole_and_no_other_with_it(store: SessionStore) -> None:
    names = [b"s", b"s1", b"s10", b"s1-", b"s2"]
    store.write([change for name in names for change in (head(name), turn(name, 1), turn(name, 300))])
    store.write([Forget(b"s1"), Delete(Table.TURNS, turn_name(b"s2", 1)), Delete(Table.TURNS, b"unknown")])
    found = store.read()
    assert sorted(found) == [b"s", b"s1-", b"s10", b"s2"]
    assert sorted(found[b"s"].turns) == [1, 300]
    assert sorted(found[b"s2"].turns) == [300]


def test_transcripts_are_read_one_by_one(store: SessionStore) -> None:
    words = [Put(Table.WORDS, name, b"words of " + name) for name in (b"s1", b"s2", b"alone")]
    store.write([head(b"s1"), head(b"s2"), turn(b"s2", 1), *words])
    found = store.read(words=False)
    assert found == {b"s1": Stored(b"a head"), b"s2": Stored(b"a head", {1: b"a turn"}), b"alone": Stored()}
    assert [store.words(name) for name in (b"s1", b"alone", b"none")] == [
        b"words of s1",
        b"words of alone",
        b"",
    ]
    assert store.read()[b"s2"].words == b"words of s2"


def test_a_second_server_is_refused_in_one_line(store: SessionStore, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"/data/sessions: another server \(pid \d+\) has these sessions open$"
    ):
        SessionStore(tmp_path / "data" / "sessions")
    store.close()
    SessionStore(tmp_path / "data" / "sessions").close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "swapped", "moved"])
def test_a_damaged_record_is_known_as_one_and_the_others_are_read(folder: Path, damage: str) -> None:
    name = turn_name(b"s1", 2)
    if damage == "swapped":  # sound in itself, but of another turn
        env = lmdb.open(str(folder), max_dbs=8, lock=False)
        with env.begin(db=env.open_db(b"turns")) as txn:
            other = bytes(txn.get(turn_name(b"s1", 1)))
        env.close()
        raw(folder, Table.TURNS, name, lambda value: other)
    elif damage == "moved":  # a head that lies among the turns
        env = lmdb.open(str(folder), max_dbs=8, lock=False)
        with env.begin(db=env.open_db(b"heads")) as txn:
            other = bytes(txn.get(b"s1"))
        env.close()
        raw(folder, Table.TURNS, name, lambda value: other)
    elif damage == "flipped":
        raw(folder, Table.TURNS, name, lambda value: value[:-1] + bytes([value[-1] ^ 1]))
    else:
        raw(folder, Table.TURNS, name, lambda value: value[:-5] if damage == "cut" else b"")
    store = SessionStore(folder)
    found = store.read()
    assert found[b"s1"].damaged == 1
    assert found[b"s2"] == Stored(b"a head", {1: b"a turn"})
    store.set_aside(b"s1")
    assert set(store.read()) == {b"s2"}
    store.close()
    env = lmdb.open(str(folder), max_dbs=8, lock=False)
    with env.begin() as txn:
        assert txn.stat(env.open_db(b"damaged", txn=txn))["entries"] == 3
    env.close()


def test_every_bit_of_a_record_counts(folder: Path) -> None:
    env = lmdb.open(str(folder), max_dbs=8, lock=False)
    with env.begin(db=env.open_db(b"heads")) as txn:
        sealed = bytes(txn.get(b"s1"))
    env.close()
    assert unsealed(Table.HEADS, b"s1", sealed) == b"a head"
    for bit in range(8 * len(sealed)):
        assert unsealed(Table.HEADS, b"s1", flipped(bit, sealed)) is None
    for length in range(len(sealed)):
        assert unsealed(Table.HEADS, b"s1", sealed[:length]) is None


@pytest.mark.parametrize("left", [0, 100, 4096, 8192, 12288, 16384])
def test_a_file_that_was_cut_stops_no_start(folder: Path, left: int) -> None:
    with (folder / "data.mdb").open("r+b") as file:
        file.truncate(left)
    store = SessionStore(folder)
    for stored in store.read().values():  # whatever can still be believed
        assert stored.head in (b"a head", None)
    store.write([head(b"new")])
    assert store.read()[b"new"].head == b"a head"
    store.close()


def test_a_file_that_is_something_else_is_kept_beside_the_new_one(folder: Path) -> None:
    (folder / "data.mdb").write_bytes(b"not an environment" * 1000)
    store = SessionStore(folder)
    assert store.read() == {}
    store.close()
    assert (folder / "damaged-1.mdb").read_bytes().startswith(b"not an environment")
    assert read(folder) == {}
    assert len(list(folder.glob("damaged-*"))) == 1


def test_a_full_disk_keeps_nothing_of_a_group_and_takes_the_next(tmp_path: Path) -> None:
    plan = FailingDisk()
    store = SessionStore(tmp_path, plan)
    store.write([head(b"s1")])
    plan.error = lmdb.DiskError("mdb_txn_commit", 28)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            store.write([head(b"s2"), turn(b"s2", 1)])
        assert str(tmp_path) in str(caught.value)
        assert "\n" not in str(caught.value)
    plan.error = None
    store.write([head(b"s3")])
    assert sorted(store.read()) == [b"s1", b"s3"]
    assert plan.opened > 1  # LMDB may refuse to go on after such an error
    store.close()


@pytest.mark.parametrize("filled", [b"\0", b"\x55", b"\xff"])
def test_damaged_pages_stop_no_start_and_what_can_be_read_is_saved(tmp_path: Path, filled: bytes) -> None:
    """LMDB believes its pages, and ends the process at some: it must not be the server's."""
    source = tmp_path / "source"
    store = SessionStore(source)
    store.write([change for i in range(40) for change in (head(b"s%d" % i), turn(b"s%d" % i, 1, b"x" * 300))])
    store.close()
    content = (source / "data.mdb").read_bytes()
    whole = read(source)
    replaced = 0
    for page in range(2, len(content) // 4096, 3):
        folder = tmp_path / f"page{page}"
        folder.mkdir()
        start = page * 4096 + 8
        (folder / "data.mdb").write_bytes(content[:start] + filled * 32 + content[start + 32 :])
        store = SessionStore(folder)
        found = store.read()
        store.write([head(b"new"), turn(b"new", 1, b"y" * 9000)])
        assert store.read()[b"new"] == Stored(b"a head", {1: b"y" * 9000})
        store.close()
        for name, stored in found.items():
            assert stored in (whole[name], Stored(None, whole[name].turns), Stored(b"a head", {}))
        replaced += (folder / "damaged-1.mdb").exists()
    assert replaced


def test_the_environment_grows_with_what_is_in_it(store: SessionStore) -> None:
    for number in range(1, 25):
        store.write([turn(b"s", number, bytes([number]) * (4 << 20))])
    store.write([head(b"s")])
    found = store.read()[b"s"]
    assert sorted(found.turns) == list(range(1, 25))
    assert all(content == bytes([number]) * (4 << 20) for number, content in found.turns.items())


def test_a_format_of_another_version_is_refused_in_one_line(folder: Path) -> None:
    env = lmdb.open(str(folder), max_dbs=8, lock=False)
    with env.begin(write=True) as txn:
        txn.put(b"format", b"7", db=env.open_db(b"meta", txn=txn))
    env.close()
    with pytest.raises(ValueError, match=r"its sessions have format 7, this version knows 1") as caught:
        SessionStore(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="format 7"):  # the first did not keep the lock
        SessionStore(folder)


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "sessions"):
        with pytest.raises(ValueError, match="cannot keep sessions here") as caught:
            SessionStore(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("linked", ["data.mdb", "."])
def test_a_link_to_a_disk_that_is_not_there_is_not_replaced(
    folder: Path, tmp_path: Path, linked: str
) -> None:
    link, away = (folder / linked), tmp_path / "unmounted"
    link.rename(away)
    target = tmp_path / "mounted"
    link.symlink_to(target)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot keep sessions here: .* is a link to something that"):
            SessionStore(folder)
        assert link.is_symlink()
    away.rename(target)
    assert read(folder).keys() == {b"s1", b"s2"}


def test_a_link_whose_disk_goes_while_it_is_used_takes_nothing_until_it_is_back(
    folder: Path, tmp_path: Path
) -> None:
    target, data = tmp_path / "mounted", folder / "data.mdb"
    data.rename(target)
    data.symlink_to(target)
    made = SessionStore(folder)
    target.rename(tmp_path / "unmounted")
    with pytest.raises(StorageError, match="a link to something that is not there"):
        made.write([head(b"s3")])
    (tmp_path / "unmounted").rename(target)
    made.write([head(b"s4")])
    made.close()
    assert read(folder).keys() == {b"s1", b"s2", b"s4"}
    assert data.is_symlink()


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened_as_one(folder: Path, kind: Callable[[Path], None]) -> None:
    (folder / "data.mdb").unlink()
    kind(folder / "data.mdb")
    with pytest.raises(ValueError, match=r"cannot keep sessions here: data\.mdb is not a file$"):
        SessionStore(folder)
