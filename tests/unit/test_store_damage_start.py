"""Sessions files that are found damaged, cut or old at a start."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb
import pytest

from agentserve.server.sessions.changes import Change, Forget, turn_name
from agentserve.server.sessions.environment import DATA, Table
from agentserve.server.sessions.store import SessionStore, Stored
from tests.session_files import (
    FIRST,
    OTHER,
    PAGE,
    FailingDisk,
    data_of,
    filled,
    fixture_folder,  # noqa: F401
    fixture_made,  # noqa: F401
    fixture_whole,  # noqa: F401
    head,
    intact,
    leaf_of,
    overflow_of,
    patch,
    read,
    session_name,
    swap,
    turn,
)


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("at", [8, 16, 20, 24, 44, 92, 136, 144])
def test_a_damaged_meta_page_stops_no_start(
    folder: Path, whole: dict[bytes, Stored], page: int, at: int
) -> None:
    """Number and flags, magic, version, address, flags of the trees, last page, transaction."""
    older = min((0, 1), key=lambda number: data_of(folder)[number * PAGE + 144 : number * PAGE + 152][::-1])
    patch(folder, page * PAGE + at, b"\x77" * 4)
    store = SessionStore(folder)
    found = store.read()
    assert found == whole  # the root that it named is found all the same
    store.write([head(b"new")])
    told = [damage.missing for damage in store.damages]
    assert told == ([] if (page, at) == (older, 136) else [0])  # that number is of no use any more
    assert store.kept_aside == len(told)
    store.close()


def cut(folder: Path, length: int) -> None:
    with (folder / DATA).open("r+b") as file:
        file.truncate(length)


def test_a_file_without_metas_is_read_from_its_newest_root(folder: Path, whole: dict[bytes, Stored]) -> None:
    patch(folder, 0, bytes(2 * PAGE))
    store = SessionStore(folder)
    assert store.read() == whole
    assert [damage.missing for damage in store.damages] == [0]
    store.close()


@pytest.mark.parametrize("length", [0, 1, 100, PAGE, 2 * PAGE - 1, 2 * PAGE, 9 * PAGE + 5])
def test_a_file_that_was_cut_stops_no_start_and_is_told(
    folder: Path, whole: dict[bytes, Stored], length: int
) -> None:
    cut(folder, length)
    store = SessionStore(folder)
    for name, stored in store.read().items():
        assert stored.head in (whole[name].head, None)
    store.write([head(b"new")])
    assert len(store.damages) == 1
    assert (folder / "damaged-1.mdb").stat().st_size == length
    store.close()
    again = SessionStore(folder)
    assert (again.damages, again.kept_aside) == ([], 1)  # told of once; the file is still there
    again.close()


def test_a_page_of_before_is_told(folder: Path) -> None:
    """A write that the disk says it made: the page is sound, and in its place, and old."""
    store = SessionStore(folder)
    store.write([head(b"a", b"old" * 100), head(b"b")])
    store.close()
    old = data_of(folder)
    page = leaf_of(folder, Table.HEADS, b"a")
    store = SessionStore(folder)
    for number in range(9):
        store.write([head(b"a", b"new" * 100 + b"%d" % number)])
    store.close()
    # The leaf that is in use now gets the content it had when "a" was old.
    now = leaf_of(folder, Table.HEADS, b"a")
    content = now.to_bytes(8, "little") + old[page * PAGE + 8 : (page + 1) * PAGE]
    patch(folder, now * PAGE, content)
    store = SessionStore(folder)
    assert store.read()[b"a"].head == b"old" * 100
    [damage] = store.damages
    assert (damage.missing, damage.kept) == (None, "")
    store.close()
    again = SessionStore(folder)
    assert not again.damages  # once
    again.close()


def test_a_record_that_is_gone_is_missed(folder: Path) -> None:
    filled(folder, 3)
    env = lmdb.open(str(folder / DATA), subdir=False, max_dbs=8, lock=False)
    with env.begin(write=True) as txn:
        txn.delete(turn_name(FIRST, 2), db=env.open_db(b"turns", txn=txn))
    env.close()
    store = SessionStore(folder)
    [damage] = store.damages
    assert damage.missing is None  # another program has written here
    store.close()


def test_a_file_of_before_tallies_existed_is_opened_without_a_word(folder: Path) -> None:
    whole = filled(folder, 3)
    env = lmdb.open(str(folder / DATA), subdir=False, max_dbs=8, lock=False)
    with env.begin(write=True) as txn:
        txn.delete(b"tally", db=env.open_db(b"meta", txn=txn))
    env.close()
    for _ in range(2):
        store = SessionStore(folder)
        assert (store.read(), store.damages) == (whole, [])
        store.close()


def test_no_room_at_a_start_refuses_it_and_the_next_finds_the_same(
    folder: Path, whole: dict[bytes, Stored]
) -> None:
    patch(folder, overflow_of(folder, Table.TURNS, turn_name(OTHER, 2)) * PAGE, bytes(16))
    disk = FailingDisk()
    disk.error = lmdb.DiskError("mdb_txn_commit", 28)
    with pytest.raises(ValueError, match="cannot keep sessions here"):
        SessionStore(folder, disk)
    found = read(folder)
    assert intact(found, OTHER) == intact(whole, OTHER)


@pytest.mark.parametrize("kind", ["zero", "flip", "swap"])
def test_any_page_may_be_damaged_and_what_is_lost_is_known(tmp_path: Path, kind: str) -> None:
    """Each page in turn: it starts, takes writes, gives nothing that was not written, and says that
    something was wrong if it was."""
    source = tmp_path / "source"
    whole = filled(source, 8)
    data = data_of(source)
    count = len(data) // PAGE
    changes: list[Change] = [Forget(session_name(3)), head(b"new"), turn(b"new", 1, bytes(9000))]
    for page in range(count):
        folder = tmp_path / f"{page}"
        folder.mkdir()
        (folder / DATA).write_bytes(data)
        if kind == "zero":
            patch(folder, page * PAGE, bytes(PAGE))
        elif kind == "flip":
            at = page * PAGE + (page * 37) % 160
            patch(folder, at, bytes([data[at] ^ 1 << page % 8]))
        else:
            swap(folder, page, (page * 7 + 5) % count)
        store = SessionStore(folder)
        found = store.read()
        differs = [name for name in whole if found.get(name) != whole[name]]
        assert not differs or store.damages or all(found[name].damaged for name in differs)
        for name, stored in found.items():
            unsure = [damage for damage in store.damages if damage.missing is None]
            assert stored.head in (whole[name].head, None) or (unsure and stored.head == b"old")
            assert stored.turns.items() <= whole[name].turns.items()
        store.write(changes)
        store.write(changes)
        store.close()
        again = read(folder)
        assert again.keys() == (found.keys() | {b"new"}) - {session_name(3)}
        assert again[b"new"] == Stored(b"a head", {1: bytes(9000)})
        shutil.rmtree(folder)
