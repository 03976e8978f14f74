"""KV on disk whose folder is moved or deleted under a running worker: missed, told once, begun afresh."""

from __future__ import annotations

import select
import shutil
from pathlib import Path

import pytest

from agentserve.clock import WallClock
from tests.kv_blocks import chain, has, open_store, put
from tests.mover_rig import PATIENCE, Rig
from tiering.health import DiskHealth
from tiering.stores.mover import Mover
from tiering.types import NEWS, Move, TierFault, TransferDone

BLOCKS = chain(6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "kv" / "worker-0"


def move_away(folder: Path) -> None:
    folder.parent.rename(folder.parent.parent / "kv-gone")


def delete(folder: Path) -> None:
    shutil.rmtree(folder.parent)


def delete_the_file(folder: Path) -> None:
    (folder / "data.mdb").unlink()


@pytest.mark.parametrize("lose", [move_away, delete, delete_the_file])
def test_what_was_there_is_missed_and_the_disk_goes_on(folder: Path, lose: object) -> None:
    store = open_store(folder)
    assert all(put(store, BLOCKS[:3]))
    lose(folder)  # type: ignore[operator]
    assert all(put(store, BLOCKS[3:]))
    assert [has(store, block) for block in BLOCKS] == [False] * 3 + [True] * 3
    assert store.take_faults() == (TierFault.VANISHED,)
    assert len(store.entries()) == 3
    assert store.delete_many([block.key for block in BLOCKS]).ok == (True,) * 6
    assert store.used == 0
    store.close()
    again = open_store(folder)  # in good order
    assert (again.entries(), again.take_faults()) == ([], ())
    again.close()


@pytest.mark.parametrize("first", ["fetch", "delete", "look"])
def test_whatever_comes_first_finds_it(folder: Path, first: str) -> None:
    store = open_store(folder)
    put(store, BLOCKS)
    move_away(folder)
    match first:
        case "fetch":
            assert not has(store, BLOCKS[0])
        case "delete":
            assert store.delete_many([BLOCKS[0].key]).ok == (True,)
        case _:
            assert store.look() == ""
    assert (store.take_faults(), store.used) == ((TierFault.VANISHED,), 0)
    store.close()


def test_what_lies_there_instead_is_not_used(folder: Path) -> None:
    other = open_store(folder)
    put(other, BLOCKS)
    other.close()
    move_away(folder)
    store = open_store(folder)
    put(store, BLOCKS[:1])
    shutil.rmtree(folder.parent)
    (folder.parent.parent / "kv-gone").rename(folder.parent)
    assert not has(store, BLOCKS[0])
    assert (store.entries(), store.used) == ([], 0)
    assert all(put(store, BLOCKS))
    store.close()


def test_a_folder_that_cannot_be_made_again_is_an_error_until_it_can(folder: Path) -> None:
    store = open_store(folder)
    put(store, BLOCKS[:3])
    delete(folder)
    folder.parent.write_text("in the way")
    for _ in range(2):
        stored = store.put_many([(block, b"") for block in BLOCKS])  # type: ignore[list-item]
        assert not any(stored.ok)
        assert "is gone, and cannot be made again" in stored.error
        assert "\n" not in stored.error
    assert not has(store, BLOCKS[0])
    assert store.look() == stored.error
    assert store.take_faults() == (TierFault.VANISHED,), "once"
    folder.parent.unlink()
    assert all(put(store, BLOCKS))
    assert (store.look(), store.take_faults()) == ("", ())
    store.close()
    store.close()


def test_a_store_that_is_gone_can_be_closed(folder: Path) -> None:
    store = open_store(folder)
    delete(folder)
    folder.parent.write_text("in the way")
    assert store.look()
    store.close()
    assert store.look() == "the disk store is closed"


def heard(mover: Mover) -> TransferDone:
    assert select.select([mover], [], [], PATIENCE)[0]
    (done,) = mover.poll()
    return done


def test_a_disk_that_nobody_uses_is_looked_at(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.mover.close()
    mover = Mover(rig.pages, rig.host, rig.disk, WallClock(), look_seconds=0.01)
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    done = heard(mover)
    assert (done.id, done.ok, done.error, done.faults) == (NEWS, (), "", (TierFault.VANISHED,))
    assert (tmp_path / "kv" / "data.mdb").exists()
    assert (mover.pending, mover.close(PATIENCE)) == (0, True)
    rig.disk.close()


def test_that_it_fails_is_said_once_and_that_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, health = Rig(tmp_path / "kv"), DiskHealth()
    rig.mover.close()
    looks = iter(["", "", "gone", "gone", "gone", ""])
    monkeypatch.setattr(rig.disk, "look", lambda: next(looks, ""))
    mover = Mover(rig.pages, rig.host, rig.disk, WallClock(), look_seconds=0.01)
    done = heard(mover)
    assert (done.ok, done.error) == ((), "gone")
    health.hear(done)
    assert (health.error, health.faults) == ("gone", {TierFault.UNWRITABLE: 1})
    done = heard(mover)
    assert (done.ok, done.error) == ((True,), "")
    health.hear(done)
    assert health.error == ""
    mover.close(PATIENCE)
    rig.disk.close()


def test_what_nobody_knows_changes_nothing() -> None:
    health = DiskHealth()
    health.hear(TransferDone(7, (True,), 0.0, "full", faults=(TierFault.CORRUPT,)))
    assert (health.error, health.faults) == ("", {})
    health.hear(TransferDone(NEWS, (), 0.0, faults=(TierFault.VANISHED,)))
    assert (health.error, health.faults) == ("", {TierFault.VANISHED: 1})
    assert not health.judge(Move.FETCH, True, TransferDone(1, (True,), 0.1))
