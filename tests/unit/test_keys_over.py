"""Keys that are over stay over, whatever the clock says, and take nobody's room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from agentserve.server.http import app
from agentserve.server.tenants import keyfile
from agentserve.server.tenants.keyfile import KeyFile, KeysError
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.keys import KeyRecord
from tests.admins_rig import KEYS, Admins
from tests.api_rig import settled


class Wall:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "tenants")


def test_a_revoked_key_is_revoked_before_it_was_too(file: KeyFile) -> None:
    wall = Wall()
    record, key = file.create("acme", wall.at)
    ring = Keyring(file=file, wall=wall)
    assert ring.caller(key) is not None
    file.revoke(lambda one: True, wall.at)
    ring.look()
    wall.at -= 500
    for one in (ring, Keyring(file=file, wall=wall)):  # also one that starts now
        assert one.caller(key) is None
        assert not one.holds(record.id)
    assert file.rotate(record.id, wall.at, 0.0) is None
    assert file.revoke(lambda one: True, wall.at) == []


def test_a_key_that_was_replaced_at_once_is_over_for_good(file: KeyFile) -> None:
    wall = Wall()
    record, key = file.create("acme", wall.at)
    assert file.rotate(record.id, wall.at, 0.0) is not None
    wall.at -= 1
    assert Keyring(file=file, wall=wall).caller(key) is None


def test_a_grace_that_was_seen_to_be_over_stays_over(file: KeyFile) -> None:
    wall = Wall()
    record, key = file.create("acme", wall.at)
    file.rotate(record.id, wall.at, 60.0)
    ring = Keyring(file=file, wall=wall)
    wall.at += 59
    assert ring.caller(key) is not None
    assert not ring.unsettled
    wall.at += 1
    assert ring.caller(key) is None
    assert ring.unsettled
    wall.at -= 30
    assert ring.caller(key) is None
    assert not ring.holds(record.id)
    ring.settle()
    ring.look()
    assert not ring.unsettled
    for one in (ring, Keyring(file=file, wall=wall)):  # also one that starts now
        assert one.caller(key) is None


def test_a_key_revoked_within_its_grace_is_over_for_good(file: KeyFile) -> None:
    record, key = file.create("acme", 1000.0)
    file.rotate(record.id, 1000.0, 60.0)
    file.revoke(lambda one: one.id == record.id, 1010.0)
    assert Keyring(file=file, wall=lambda: 1005.0).caller(key) is None


def test_where_it_cannot_be_written_it_is_told_once_and_holds_all_the_same(
    file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    record, key = file.create("acme", wall.at)
    file.rotate(record.id, wall.at, 60.0)
    ring = Keyring(file=file, wall=wall)
    wall.at += 60
    (file.folder / "keys.json").write_bytes(b"nonsense")
    for _ in range(3):
        assert ring.unsettled
        ring.settle()
    assert len(caplog.records) == 1
    wall.at -= 60
    assert ring.caller(key) is None


def test_only_keys_that_hold_are_counted_and_the_oldest_that_do_not_are_forgotten(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyfile, "MOST_KEYS", 3)
    monkeypatch.setattr(keyfile, "MOST_OVER", 4)
    kept, kept_key = file.create("other", 1.0)
    record, key = file.create("acme", 2.0)
    names = [record.id]
    for hour in range(1, 21):
        made = file.rotate(record.id, hour * 3600.0, 60.0)
        assert made is not None
        record, key = made
        names.append(record.id)
    records = file.records()
    assert [one.id for one in records] == [kept.id, *names[-6:]]  # the last before it is let in yet
    assert [one.over for one in records] == [False, True, True, True, True, False, False]
    ring = Keyring(file=file, wall=lambda: 20 * 3600.0 + 1)
    assert ring.caller(key) is not None
    assert ring.caller(kept_key) is not None
    with pytest.raises(KeysError, match="3 keys hold, and no more may"):
        file.create("more", 20 * 3600.0 + 59)
    with pytest.raises(KeysError, match="no more may"):
        file.rotate(record.id, 20 * 3600.0 + 59, 60.0)
    assert file.records() == records
    assert file.rotate(record.id, 20 * 3600.0 + 59, 0.0) is not None  # in its place
    file.create("more", 20 * 3600.0 + 60)


def test_files_of_before_are_read(file: KeyFile) -> None:
    record, key = file.create("acme", 1.0)
    old = msgspec.structs.replace(record, revoked=5.0)
    document = {"version": 1, "keys": msgspec.to_builtins([old])}
    assert "over" not in document["keys"][0]
    (file.folder / "keys.json").write_bytes(msgspec.json.encode(document))
    assert file.records() == [old]
    assert Keyring(file=file, wall=lambda: 6.0).caller(key) is None
    assert isinstance(old.settled(6.0), KeyRecord)
    assert old.settled(6.0).over


async def test_a_server_writes_down_what_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOOK_SECONDS", 0.01)
    rig = Admins(tmp_path)
    made = await rig.made("acme")
    await rig.ask("POST", f"{KEYS}/{made['id']}/rotate", {"grace_seconds": 60})
    async with rig.app.router.lifespan_context(rig.app):
        await asyncio.sleep(0.03)
        assert await rig.models(made["key"]) == 200
        rig.time += 60
        await settled(lambda: not rig.context.keyring.unsettled)
        rig.time -= 60
        assert await rig.models(made["key"]) == 401
    assert [one.over for one in rig.file.records()] == [False, True, False]
    assert Keyring(file=rig.file, wall=lambda: 1000.0).caller(made["key"]) is None
