"""Sessions files that are damaged, cut, moved or gone while they are in use."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.changes import Check, Forget, turn_name
from agentserve.server.sessions.environment import DATA, Table
from agentserve.server.sessions.store import SessionStore, Stored
from tests.session_files import (
    FIRST,
    OTHER,
    PAGE,
    FailingDisk,
    data_of,
    fixture_folder,  # noqa: F401
    fixture_made,  # noqa: F401
    fixture_whole,  # noqa: F401
    head,
    intact,
    leaf_of,
    overflow_of,
    patch,
    read,
    swap,
    turn,
)


@pytest.mark.parametrize("gone", [b"\0" * 16, b"\xff" * 16])
def test_an_overflow_page_that_cannot_be_deleted_stops_nobody(
    folder: Path, whole: dict[bytes, Stored], gone: bytes
) -> None:
    store = SessionStore(folder)
    patch(folder, overflow_of(folder, Table.TURNS, turn_name(OTHER, 2)) * PAGE, gone)
    store.write([Forget(OTHER)])
    store.write([head(b"new")])
    assert store.read() == intact(whole, OTHER) | {b"new": Stored(b"a head")}
    assert store.take_lost() <= {OTHER}
    [damage] = store.damages
    assert (damage.kept, damage.missing) == ("damaged-1.mdb", 1)
    store.close()
    assert read(folder) == intact(whole, OTHER) | {b"new": Stored(b"a head")}
    assert store.kept_aside == 1


def test_a_page_that_was_zeroed_loses_its_records_and_says_whose(
    folder: Path, whole: dict[bytes, Stored]
) -> None:
    store = SessionStore(folder)
    patch(folder, leaf_of(folder, Table.TURNS, turn_name(OTHER, 1)) * PAGE, bytes(PAGE))
    store.write([head(OTHER), turn(OTHER, 3)])
    found = store.read()
    lost = store.take_lost()
    assert OTHER in lost
    assert len(lost) < 20
    assert store.take_lost() == set()
    for name in whole.keys() - lost:
        assert found[name] == whole[name]
    assert found[OTHER].turns[3] == b"a turn"  # the write that met it was made
    gone = sum(len(whole[name].turns) - len(found[name].turns) for name in lost)
    assert store.damages[0].missing == gone + 1  # OTHER has a third one by now
    store.close()


def test_a_look_at_the_file_ends_with_its_time(folder: Path, whole: dict[bytes, Stored]) -> None:
    store = SessionStore(folder)
    patch(folder, leaf_of(folder, Table.TURNS, turn_name(OTHER, 1)) * PAGE, bytes(PAGE))
    store.write([Check(0.0), head(b"new")])
    assert not store.damages
    store.write([Check(60.0), head(b"newer")])
    assert len(store.damages) == 1
    assert {b"new", b"newer"} <= set(store.read())
    store.close()


def test_two_pages_that_changed_places_lose_nothing(folder: Path, whole: dict[bytes, Stored]) -> None:
    """LMDB frees the page that a page says it is: the other one, which is in use and then written over."""
    swap(folder, leaf_of(folder, Table.HEADS, FIRST), leaf_of(folder, Table.TURNS, turn_name(OTHER, 2)))
    store = SessionStore(folder)
    assert store.read() == whole
    assert [damage.missing for damage in store.damages] == [0]
    for number in range(50):
        store.write([turn(b"zz", number, bytes(100 * number))])
    store.close()
    assert len(read(folder)[b"zz"].turns) == 50


def test_a_session_that_is_forgotten_while_a_page_hides_it_does_not_come_back(
    folder: Path, whole: dict[bytes, Stored]
) -> None:
    """A branch that leads astray: LMDB finds nothing there to delete, and says nothing."""
    store = SessionStore(folder)
    with (folder / DATA).open("rb") as file:
        data = file.read()
    branches = [p for p in range(2, len(data) // PAGE) if data[p * PAGE + 10] == 1]
    for page in branches:  # every separator now sorts before every session
        content = data[page * PAGE : (page + 1) * PAGE].replace(b"sess-", b"aaaa-")
        patch(folder, page * PAGE, content)
    store.write([Forget(FIRST)])
    assert [bool(store.damages), store.kept_aside] == [True, 1]
    store.close()
    assert read(folder) == intact(whole, FIRST)


def test_what_lmdb_reports_without_a_cause_is_tried_once_more(folder: Path) -> None:
    disk = FailingDisk()
    store = SessionStore(folder, disk)
    disk.error = lmdb.CorruptedError("mdb_put", -30796)
    with pytest.raises(StorageError, match="mdb_put"):
        store.write([head(b"a")])
    disk.error = None
    store.write([head(b"b")])
    assert set(store.read()) == {b"b"}
    store.close()


def test_no_room_to_replace_a_damaged_file_leaves_it_until_there_is(
    folder: Path, whole: dict[bytes, Stored]
) -> None:
    disk = FailingDisk()
    store = SessionStore(folder, disk)
    patch(folder, overflow_of(folder, Table.TURNS, turn_name(OTHER, 2)) * PAGE, bytes(16))
    disk.error = lmdb.DiskError("mdb_txn_commit", 28)
    for _ in range(2):
        with pytest.raises(StorageError):
            store.write([Forget(FIRST), Forget(OTHER)])
    assert not store.kept_aside
    disk.error = None
    store.write([Forget(FIRST), Forget(OTHER)])
    assert store.read() == intact(whole, FIRST, OTHER)
    store.close()


@pytest.mark.parametrize("how", ["file", "folder", "moved"])
def test_a_file_that_is_gone_is_begun_again_and_all_sessions_are_asked_for(
    folder: Path, whole: dict[bytes, Stored], how: str
) -> None:
    store = SessionStore(folder)
    if how == "file":
        (folder / DATA).unlink()
    elif how == "folder":
        shutil.rmtree(folder)
    else:
        folder.rename(folder.with_name("elsewhere"))
    store.write([head(b"new")])
    store.write([head(b"newer")])
    assert store.take_lost() == set(whole)
    [damage] = store.damages
    assert "deleted or moved" in damage.reason
    with pytest.raises(ValueError, match="another server"):  # the lock came along
        SessionStore(folder)
    store.close()
    assert set(read(folder)) == {b"new", b"newer"}
    if how == "moved":
        assert read(folder.with_name("elsewhere")) == whole


def aside(folder: Path) -> dict[bytes, bytes]:
    env = lmdb.open(str(folder / DATA), subdir=False, max_dbs=8, lock=False, readonly=True)
    with env.begin() as txn:
        found = dict(txn.cursor(env.open_db(b"damaged", txn=txn)))
    env.close()
    return found


@pytest.mark.parametrize("how", ["gone", "moved", "damaged"])
def test_what_was_set_aside_is_in_the_file_that_takes_the_place(
    folder: Path, whole: dict[bytes, Stored], how: str
) -> None:
    store = SessionStore(folder)
    store.set_aside(OTHER)
    store.close()
    before = aside(folder)
    assert len(before) == 3
    store = SessionStore(folder)
    for _ in range(2):
        if how == "gone":
            shutil.rmtree(folder)
        elif how == "moved":
            (folder / DATA).replace(folder / "elsewhere")
        else:
            patch(folder, overflow_of(folder, Table.TURNS, turn_name(FIRST, 2)) * PAGE, bytes(16))
        store.write([Check(60.0), Forget(FIRST), head(FIRST), turn(FIRST, 2, bytes(9000))])
    assert len(store.damages) == 2
    store.close()
    assert aside(folder) == before
    if how == "damaged":
        assert read(folder).keys() == intact(whole, OTHER).keys()


def test_only_a_few_damaged_files_are_kept(folder: Path) -> None:
    store = SessionStore(folder)
    (folder / "damaged-copy.mdb").touch()  # somebody's own
    for number in range(12):
        store.write([turn(FIRST, number, bytes(9000))])
        patch(folder, overflow_of(folder, Table.TURNS, turn_name(FIRST, number)) * PAGE, bytes(16))
        store.write([Check(60.0)])
    assert store.kept_aside == 5
    names = {path.name for path in folder.glob("damaged-*.mdb")}
    assert names == {f"damaged-{number}.mdb" for number in range(9, 13)} | {"damaged-copy.mdb"}
    store.close()


def test_another_file_in_its_place_is_not_written_to(folder: Path, whole: dict[bytes, Stored]) -> None:
    store = SessionStore(folder)
    ours, theirs = folder / DATA, folder / "theirs"
    shutil.copy(ours, theirs)
    ours.rename(folder / "ours")
    theirs.rename(ours)
    before = data_of(folder)
    for _ in range(2):
        with pytest.raises(StorageError, match="another file has taken the place"):
            store.write([head(b"new")])
    assert data_of(folder) == before
    (folder / "ours").replace(ours)
    store.write([head(b"new")])
    assert store.read() == whole | {b"new": Stored(b"a head")}
    assert not store.damages
    store.close()


def test_a_file_that_is_cut_while_in_use_is_met_before_lmdb_reads_behind_its_end(
    folder: Path, whole: dict[bytes, Stored]
) -> None:
    store = SessionStore(folder)
    with (folder / DATA).open("r+b") as file:
        file.truncate(5 * PAGE)
    store.write([head(b"new")])
    found, lost = store.read(), store.take_lost()
    assert found[b"new"] == Stored(b"a head")
    assert {name for name in whole if found.get(name) != whole[name]} <= lost
    assert len(store.damages) == 1
    store.close()


def test_a_transaction_that_failed_and_is_there_all_the_same_is_known(folder: Path) -> None:
    """Its records are not what the server believes it wrote: it is told to write them again."""
    store = SessionStore(folder)
    store.write([head(b"a")])
    commit = store._commit

    def late(work: object) -> None:
        commit(work)  # type: ignore[arg-type]
        store._tally = before
        raise lmdb.DiskError("mdb_txn_commit", 5)

    before = type(store._tally)(store._tally.rows, store._tally.total, dict(store._tally.sums))
    store._commit = late  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        store.write([head(b"a", b"other"), head(b"b")])
    store._commit = commit  # type: ignore[method-assign]
    store.write([head(b"c")])
    assert store.take_lost() == {b"a", b"b"}
    assert not store.damages
    store.close()
    store = SessionStore(folder)
    assert (set(store.read()), store.damages) == ({b"a", b"b", b"c"}, [])
    store.close()
