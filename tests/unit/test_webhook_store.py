"""The outbox's file: synced, locked, damaged, cut, deleted; and the thread that writes it."""

import os
import stat
import threading

import lmdb
import pytest

from tools_bridge.webhooks import store as storage
from tools_bridge.webhooks.reading import read_file
from tools_bridge.webhooks.store import Damaged, StorageError, Store, Table
from tools_bridge.webhooks.writer import Writer

ONE = (Table.ENDPOINTS, b"we_1", b"one")
BODY = (Table.BODIES, b"we_1\0msg", os.urandom(3 * 4096))
MANY = [(Table.DELIVERIES, b"we_1\0%05d" % n, os.urandom(500)) for n in range(200)]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data" / "webhooks"


def reopened(folder):
    made = Store(folder)
    made.close()
    return made


def found(made):
    return {(table, name): content for table, name, content in made.found if table is not Table.META}


def as_found(changes):
    return {(table, name): content for table, name, content in changes}


def test_what_was_written_is_there(folder):
    made = Store(folder)
    assert made.found == []
    made.write([ONE, BODY, *MANY])
    made.write([(Table.DELIVERIES, MANY[0][1], None), (Table.ENDPOINTS, b"nothing", None)])
    made.close()
    for _ in range(2):
        again = reopened(folder)
        assert found(again) == as_found([ONE, BODY, *MANY[1:]])
        assert not again.damages


def test_it_is_for_its_owner_alone(folder):
    made = Store(folder)
    made.write([ONE])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    made.close()


def test_one_server_at_a_time(folder):
    made = Store(folder)
    with pytest.raises(ValueError, match="another server"):
        Store(folder)
    made.close()
    made.close()
    reopened(folder)


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot keep webhooks here"):
        Store(tmp_path / "file")


def test_another_format_is_refused_and_stays(folder, monkeypatch):
    made = Store(folder)
    made.write([ONE])
    made.close()
    monkeypatch.setattr(storage, "FORMAT", b"2")
    with pytest.raises(ValueError, match="format 1, this version knows 2"):
        Store(folder)
    monkeypatch.undo()
    assert found(reopened(folder)) == as_found([ONE])


def test_the_map_grows(folder, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_MAP", 1 << 20)
    made = Store(folder)
    large = [(Table.BODIES, b"%d" % n, os.urandom(1 << 20)) for n in range(5)]
    made.write(large)
    made.close()
    assert found(reopened(folder)) == as_found(large)


def test_a_start_that_was_killed_leaves_nothing_that_hurts(folder):
    made = Store(folder)
    made.write([ONE])
    made.close()
    (folder / storage.FRESH).write_bytes(b"half of a file")
    assert found(reopened(folder)) == as_found([ONE])
    assert not (folder / storage.FRESH).exists()


def pages_of(folder):
    return (folder / storage.DATA).stat().st_size // 4096


@pytest.mark.parametrize("damage", ["zero", "random", "swap"])
def test_a_damaged_page_costs_what_it_hit_and_no_start(folder, damage):
    """Also where LMDB ends its process at it."""
    made = Store(folder)
    made.write([ONE, BODY, *MANY])
    made.close()
    whole = (folder / storage.DATA).read_bytes()
    everything = as_found([ONE, BODY, *MANY])
    lost = 0
    for page in range(0, pages_of(folder), 11):
        at = page * 4096
        other = (page + 3) % pages_of(folder) * 4096
        with (folder / storage.DATA).open("wb") as file:
            file.write(whole)
            file.seek(at)
            file.write(
                {"zero": bytes(4096), "random": os.urandom(4096), "swap": whole[other : other + 4096]}[damage]
            )
        again = reopened(folder)
        assert found(again).items() <= everything.items()
        if found(again) != everything:
            assert again.damages or page < 2  # a meta page that is gone names an older root
            lost += 1
    assert lost
    assert len(list(folder.glob("damaged-*.mdb"))) <= storage.MOST_KEPT


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 20_000, 60_000])
def test_a_file_that_was_cut(folder, size):
    made = Store(folder)
    made.write([ONE, BODY, *MANY])
    made.close()
    os.truncate(folder / storage.DATA, size)
    again = reopened(folder)
    assert found(again).items() <= as_found([ONE, BODY, *MANY]).items()
    assert again.damages
    assert not reopened(folder).damages


def test_a_page_that_lists_less_than_it_has_is_missed(folder):
    made = Store(folder)
    made.write([ONE, *MANY])
    made.close()
    path = folder / storage.DATA
    data = bytearray(path.read_bytes())
    at = data.index(MANY[50][2]) // 4096 * 4096
    lower = int.from_bytes(data[at + 12 : at + 14], "little")  # where the page's list of records ends
    data[at + 12 : at + 14] = (lower - 2).to_bytes(2, "little")
    path.write_bytes(data)
    again = reopened(folder)
    assert len(found(again)) == len(MANY)
    assert again.damages == ["the file is damaged (kept as damaged-1.mdb)"]


def test_one_flipped_bit_costs_one_record(folder):
    made = Store(folder)
    made.write([ONE, *MANY])
    made.close()
    data = bytearray((folder / storage.DATA).read_bytes())
    data[data.index(MANY[7][2]) + 250] ^= 1
    (folder / storage.DATA).write_bytes(data)
    again = reopened(folder)
    assert as_found([ONE, *MANY]).items() - found(again).items() == {
        ((Table.DELIVERIES, MANY[7][1]), MANY[7][2])
    }
    assert again.damages == ["1 damaged record(s) (kept as damaged-1.mdb)"]


def test_a_record_in_anothers_place_is_none(folder):
    made = Store(folder)
    made.write([ONE])
    sealed = storage._seal(*ONE)
    with made._env.begin(write=True) as txn:
        txn.put(b"we_2", sealed, db=made._tables[Table.ENDPOINTS])
        txn.put(b"we_1", sealed, db=made._tables[Table.BODIES])
    made.close()
    assert found(reopened(folder)) == as_found([ONE])


def test_a_file_that_goes_while_it_is_used_is_made_again(folder):
    made = Store(folder)
    made.write([ONE])
    for harm in (
        (folder / storage.DATA).unlink,
        lambda: os.truncate(folder / storage.DATA, 4096),
        lambda: folder.rename(folder.with_name("elsewhere")),
    ):
        harm()
        for _ in range(2):
            with pytest.raises(Damaged):
                made.write([BODY])
        made.rebuild([ONE, *MANY], "it was deleted")
        made.write([BODY])
        with pytest.raises(ValueError, match="another server"):
            Store(folder)
    made.close()
    assert found(reopened(folder)) == as_found([ONE, BODY, *MANY])
    assert len(made.damages) == 3


def test_another_file_in_its_place_is_not_touched(folder):
    made = Store(folder)
    made.write([ONE])
    (folder / storage.DATA).rename(folder / "mine")
    (folder / storage.DATA).write_text("somebody's")
    with pytest.raises(StorageError, match="another file"):
        made.write([BODY])
    assert (folder / storage.DATA).read_text() == "somebody's"
    (folder / "mine").rename(folder / storage.DATA)
    made.write([BODY])
    made.close()
    assert found(reopened(folder)) == as_found([ONE, BODY])


class Failing:
    """An LMDB that fails when it is told to."""

    def __init__(self):
        self.error = None

    def __call__(self, *args, **more):
        env, outer = lmdb.open(*args, **more), self

        class Env:
            def __getattr__(self, name):
                return getattr(env, name)

            def begin(self, *args, **more):
                if outer.error is not None:
                    raise outer.error
                return env.begin(*args, **more)

        return Env()


def test_a_full_disk_and_then_room(folder):
    opener = Failing()
    made = Store(folder, opener)
    made.write([ONE])
    opener.error = lmdb.DiskError("mdb_txn_commit: No space left on device")
    for _ in range(2):
        with pytest.raises(StorageError, match="No space left"):
            made.write([BODY])
    opener.error = None
    made.write([MANY[0]])
    made.close()
    assert found(reopened(folder)) == as_found([ONE, MANY[0]])


def test_damage_that_is_met_while_it_is_used(folder):
    opener = Failing()
    made = Store(folder, opener)
    opener.error = lmdb.CorruptedError("mdb_put")
    with pytest.raises(Damaged):
        made.write([ONE])
    opener.error = None
    with pytest.raises(Damaged):
        made.write([ONE])
    made.rebuild([ONE], "it was damaged")
    made.write([BODY])
    made.close()
    assert found(reopened(folder)) == as_found([ONE, BODY])


def test_a_reader_that_ends_early_has_told_what_it_read(tmp_path):
    rows, whole = read_file(tmp_path / "nothing", [b"meta"])
    assert (rows, whole) == ([], False)


# --- the writer ----------------------------------------------------------------------------


class MemoryDisk:
    def __init__(self):
        self.records, self.groups, self.rebuilt = {}, [], []
        self.error = None
        self.errors = []  # of the next writes, before `error`
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Semaphore(0)

    def write(self, changes):
        self.asked.release()
        assert self.open.wait(60)
        if self.errors:
            raise self.errors.pop(0)
        if self.error is not None:
            raise self.error
        self.groups.append(list(changes))
        for table, name, content in changes:
            self.records[table, name] = content
            if content is None:
                del self.records[table, name]

    def rebuild(self, changes, reason):
        self.records = {}
        self.rebuilt.append(reason)
        self.write(changes)


@pytest.fixture
def disk():
    return MemoryDisk()


@pytest.fixture
def damaged():
    return []


@pytest.fixture
def writer(disk, damaged):
    made = Writer(disk, lambda: 1000.0, damaged.append)
    yield made
    disk.open.set()
    assert made.close(30)


def put(n, content=b"x"):
    return (Table.ENDPOINTS, b"%d" % n, content)


def test_what_comes_while_the_disk_writes_shares_the_next_sync(disk, writer):
    disk.open.clear()
    futures = [writer.put([put(0)], lasting=True)]
    assert disk.asked.acquire(timeout=60)
    futures += [writer.put([put(n), put(0, b"%d" % n)], lasting=False) for n in range(1, 9)]
    assert not any(future.done() for future in futures)
    disk.open.set()
    for future in futures:
        future.result(60)
    assert len(disk.groups) == 2
    assert disk.records[Table.ENDPOINTS, b"0"] == b"8"


def test_what_lasts_is_made_up_for_in_order(disk, writer):
    disk.error = StorageError("full")
    failed = [writer.put([put(0), put(1)], lasting=True), writer.put([put(2)], lasting=False)]
    for future in failed:
        assert str(future.exception(60)) == "full"
    assert writer.put([put(1, None), put(2, None)], lasting=True).exception(60)
    assert writer.failure.reason == "full"
    assert writer.failure.since == 1000.0
    disk.error = None
    writer.put([put(3)], lasting=False).result(60)
    assert writer.failure is None
    assert disk.groups[0][:2] == [put(0), put(1, None)]
    assert {name for _, name in disk.records} == {b"0", b"3"}


def test_damage_is_told_and_a_rebuild_is_what_counts(disk, writer, damaged):
    disk.error = Damaged("cut")
    assert writer.put([put(0)], lasting=True).exception(60)
    disk.error = None
    writer.put([], lasting=False).result(60)
    assert damaged == ["cut"]
    disk.open.clear()
    writer.put([], lasting=True)
    futures = [writer.rebuild([put(1), put(2)], "cut"), writer.put([put(2, None), put(3)], lasting=True)]
    disk.open.set()
    for future in futures:
        future.result(60)
    assert disk.rebuilt == ["cut"]
    assert {name for _, name in disk.records} == {b"1", b"3"}


def test_a_disk_that_does_not_answer(disk, writer):
    disk.open.clear()
    future = writer.put([put(0)], lasting=True)
    assert disk.asked.acquire(timeout=60)
    writer.overdue()
    assert writer.hung
    assert "does not answer" in writer.failure.reason
    assert not writer.close(0.0)
    disk.open.set()
    future.result(60)
    assert not writer.hung


def test_after_the_end_nothing_is_taken(disk):
    made = Writer(disk, lambda: 0.0, print)
    made.put([put(0)], lasting=True)
    assert made.close(60)
    assert disk.records
    assert isinstance(made.put([put(1)], lasting=True).exception(60), StorageError)


def test_an_error_that_nobody_foresaw_is_one_of_storage(disk, writer):
    disk.error = RuntimeError("odd")
    assert "RuntimeError" in str(writer.put([put(0)], lasting=True).exception(60))
    disk.error = None
    writer.put([], lasting=False).result(60)
    assert disk.records
