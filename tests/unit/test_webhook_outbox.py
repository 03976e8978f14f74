"""The outbox: what is accepted is kept, and comes back after a restart."""

import asyncio
import logging

import pytest

from tests.unit.test_webhook_store import MemoryDisk
from tests.webhook_rig import Desk
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.callback import Call
from tools_bridge.webhooks.outbox import BadEndpoint, Outbox
from tools_bridge.webhooks.signing import key_of
from tools_bridge.webhooks.store import Damaged, StorageError
from tools_bridge.webhooks.types import (
    Delivered,
    Delivery,
    GaveUp,
    Key,
    Kind,
    NotKept,
    State,
    ToolResult,
    UnknownEndpoint,
    Why,
)


class FakeStore(MemoryDisk):
    """A store in memory; the next one finds what this one has."""

    def __init__(self, before=None):
        super().__init__()
        self.records = dict(before.records) if before else {}
        self.found = [(table, name, content) for (table, name), content in self.records.items()]
        self.damages = []
        self.closed = False

    def close(self):
        self.closed = True


def outbox(store=None, now=lambda: 1000.0, patience=60.0):
    store = store or FakeStore()
    return Outbox("folder", AddressPolicy(), now, patience=patience, open_store=lambda folder: store)


def delivery(endpoint, event="msg_1", kind=Kind.LIFECYCLE, size=4):
    return Delivery(endpoint, event, "t", kind, 1000.0, 1000.0, 1000.0, size, None)


async def made(box):
    endpoint, _ = await box.create_endpoint("ann", "hooks", "https://a.example/", ["t"])
    return endpoint


async def test_all_of_it_is_back_after_a_restart():
    store = FakeStore()
    box = outbox(store)
    endpoint, secret = await box.create_endpoint("ann", "hooks", "https://a.example/x", ["t", "u", "t"])
    assert endpoint.secrets[0].text == secret
    assert len(key_of(secret)) == 32
    await box.accept([delivery(endpoint.id, "1"), delivery(endpoint.id, "2", Kind.TOOL)], b"body")
    await box.accept([delivery(endpoint.id, "3")], b"log!")
    box.end(Key(endpoint.id, "2"), Delivered(ToolResult(True, [{"type": "text", "text": "ü"}])))
    box.end(Key(endpoint.id, "3"), GaveUp(Why.EXHAUSTED, "x"))
    token = box.tokens.issue(Call("s", "c", 1))
    await box.close()
    assert store.closed

    again = outbox(FakeStore(store))
    assert dict(again.ledger.everything()) == dict(box.ledger.everything())
    assert again.ledger.body(Key(endpoint.id, "1")) == b"body"
    assert again.tokens.read(token) == Call("s", "c", 1)
    assert again.skipped == 0
    again.ledger.check()
    await again.close()


async def test_without_a_folder_it_is_all_the_same_but_gone_afterwards():
    box = Outbox(None, AddressPolicy(), lambda: 1000.0)
    endpoint = await made(box)
    assert await box.accept([delivery(endpoint.id)], b"body") == [Key(endpoint.id, "msg_1")]
    assert box.failure is None
    assert box.damages == ()
    await box.close()


async def test_on_a_real_disk(tmp_path):
    desk = Desk(tmp_path / "webhooks")
    endpoint = await desk.endpoint()
    await desk.call(endpoint, "1")
    await desk.outbox.close()
    again = Desk(tmp_path / "webhooks")
    assert [found.event for found in again.outbox.ledger.pending()] == ["1"]
    await again.outbox.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"url": "http://a.example/"},
        {"url": "https://127.0.0.1/"},
        {"url": "https://user:pass@a.example/"},
        {"name": "x" * 201},
        {"name": "a\nb"},
        {"event_types": []},
        {"event_types": ["t"] * 65},
        {"event_types": [""]},
        {"event_types": ["x" * 129]},
        {"event_types": ["a\0"]},
    ],
)
async def test_endpoints_that_cannot_be(asked):
    box = outbox()
    good = {"owner": "ann", "name": "n", "url": "https://a.example/", "event_types": ["t"]}
    with pytest.raises(BadEndpoint):
        await box.create_endpoint(**good | asked)
    endpoint, _ = await box.create_endpoint(**good)
    with pytest.raises(BadEndpoint):
        await box.update_endpoint(endpoint.id, **asked)
    assert list(box.ledger.endpoints.values()) == [endpoint]
    await box.close()


async def test_changes_say_when():
    now = 1000.0
    box = outbox(now=lambda: now)
    endpoint = await made(box)
    now = 2000.0
    assert await box.update_endpoint(endpoint.id, name="hooks") == endpoint
    changed = await box.update_endpoint(endpoint.id, url="https://b.example/", event_types=["u"])
    assert (changed.name, changed.url, changed.event_types) == ("hooks", "https://b.example/", ("u",))
    assert (changed.created, changed.updated) == (1000.0, 2000.0)
    _, secret = await box.rotate_secret(endpoint.id, 500.0)
    assert [each.until for each in box.ledger.endpoint(endpoint.id).secrets] == [None, 2500.0]
    assert box.ledger.endpoint(endpoint.id).secrets[0].text == secret
    with pytest.raises(UnknownEndpoint):
        await box.rotate_secret("we_none", 0.0)
    await box.close()


async def test_secrets_are_in_no_log_and_no_repr(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    desk = Desk(tmp_path)
    endpoint = await desk.endpoint()
    await desk.outbox.rotate_secret(endpoint.id, 60.0)
    shown = repr(desk.outbox.ledger.endpoints) + repr(desk.outbox.ledger.endpoint(endpoint.id)) + caplog.text
    for secret in desk.outbox.ledger.endpoint(endpoint.id).secrets:
        assert secret.text[6:20] not in shown
    await desk.close()


async def test_what_the_disk_does_not_take_was_not_accepted():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    store.error = StorageError("No space left on device")
    for asked in (
        box.accept([delivery(endpoint.id)], b"body"),
        box.create_endpoint("ann", "n", "https://b.example/", ["t"]),
        box.update_endpoint(endpoint.id, name="other"),
        box.rotate_secret(endpoint.id, 0.0),
    ):
        with pytest.raises(NotKept, match="No space"):
            await asked
    assert list(box.ledger.endpoints.values()) == [endpoint]
    assert box.ledger.pending() == []
    assert "No space" in box.failure.reason
    box.ledger.check()
    store.error = None
    await box.accept([delivery(endpoint.id)], b"body")
    assert box.failure is None
    again = outbox(FakeStore(store))
    assert dict(again.ledger.everything()) == dict(box.ledger.everything())
    await asyncio.gather(box.close(), again.close())


async def test_ends_are_written_when_the_disk_is_back():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    await box.accept([delivery(endpoint.id, str(n)) for n in range(3)], b"body")
    store.error = StorageError("full")
    box.end(Key(endpoint.id, "0"), Delivered())
    box.end(Key(endpoint.id, "1"), Delivered())
    with pytest.raises(NotKept):
        await box.kept()
    store.error = None
    await box.close()
    again = outbox(FakeStore(store))
    assert [found.event for found in again.ledger.pending()] == ["2"]
    await again.close()


async def test_a_disk_that_does_not_answer_holds_nobody_for_long():
    store = FakeStore()
    box = outbox(store, patience=0.05)
    box._patience = 60.0
    endpoint = await made(box)
    box._patience = 0.05
    store.open.clear()
    with pytest.raises(NotKept, match="has not answered"):
        await box.accept([delivery(endpoint.id)], b"body")
    assert box.hung
    with pytest.raises(NotKept):  # at once
        await box.accept([delivery(endpoint.id, "2")], b"body")
    assert box.ledger.pending() == []
    store.open.set()
    box._patience = 60.0
    await box.kept()
    assert not box.hung
    await box.close()
    again = outbox(FakeStore(store))
    assert again.ledger.pending() == []
    await again.close()


async def test_two_who_ask_for_the_same_are_told_the_same():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    for error in (StorageError("full"), None):
        store.error = error
        asked = [asyncio.ensure_future(box.accept([delivery(endpoint.id)], b"body")) for _ in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        if error:
            assert all(isinstance(each, NotKept) for each in found)
        else:
            assert found == [[Key(endpoint.id, "msg_1")], [], []]
    await box.close()


async def test_who_asks_for_what_somebody_waits_for_is_told_what_became_of_that():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    while store.asked.acquire(blocking=False):
        pass
    store.open.clear()
    first = asyncio.ensure_future(box.accept([delivery(endpoint.id)], b"body"))
    await asyncio.sleep(0)
    assert await asyncio.to_thread(store.asked.acquire, timeout=60)  # the disk has it in its hands
    store.errors = [StorageError("full")]
    second = asyncio.ensure_future(box.accept([delivery(endpoint.id)], b"body"))
    await asyncio.sleep(0)
    store.open.set()
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(each, NotKept) for each in found)
    await box.close()


async def test_who_stops_waiting_was_promised_nothing():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    store.open.clear()
    asked = asyncio.ensure_future(box.accept([delivery(endpoint.id)], b"body"))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    store.open.set()
    await box.close()
    again = outbox(FakeStore(store))
    assert again.ledger.pending() == []
    await again.close()


async def test_what_a_damaged_file_lost_is_written_again_from_memory():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    await box.accept([delivery(endpoint.id)], b"body")
    token = box.tokens.issue(Call("s", "c", 1))
    store.error = Damaged("it was cut")
    with pytest.raises(NotKept):
        await box.accept([delivery(endpoint.id, "2")], b"body")
    store.records.clear()
    store.error = None
    async with asyncio.timeout(60):
        while not store.rebuilt:  # noqa: ASYNC110 (by the writer's thread)
            await asyncio.sleep(0.001)
    await box.accept([delivery(endpoint.id, "3")], b"body")
    await box.close()
    again = outbox(FakeStore(store))
    assert {found.event for found in again.ledger.pending()} == {"msg_1", "3"}
    assert again.tokens.read(token)
    await again.close()


async def test_records_that_mean_nothing_are_counted_and_dropped():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    await box.accept([delivery(endpoint.id, str(n)) for n in range(4)], b"body")
    await box.close()
    names = sorted(name for table, name in store.records if table.value == b"deliveries")
    tables = {table.value: table for table, _ in store.records}
    store.records[tables[b"deliveries"], names[0]] = b"\xc1"
    store.records[tables[b"deliveries"], names[1]] = b"\x81\xa5state\xa3odd"
    del store.records[tables[b"bodies"], names[2]]
    store.records[tables[b"bodies"], b"nobody's"] = b"x"
    again_store = FakeStore(store)
    again = outbox(again_store)
    assert [found.event for found in again.ledger.pending()] == ["3"]
    assert again.skipped == 3
    again.ledger.check()
    await again.close()
    assert {name for table, name in again_store.records if table.value in (b"deliveries", b"bodies")} == {
        names[3]
    }


async def test_a_replay_that_was_not_kept_did_not_happen():
    store = FakeStore()
    box = outbox(store)
    endpoint = await made(box)
    key = Key(endpoint.id, "msg_1")
    await box.accept([delivery(endpoint.id)], b"body")
    was = box.end(key, Delivered())
    await box.kept()
    store.error = StorageError("full")
    with pytest.raises(NotKept):
        await box.replay(key)
    assert box.ledger.delivery(key).state is State.LOGGED
    assert box.ledger.delivery(key).ending == was.ending
    store.error = None
    await box.replay(key)
    assert box.ledger.delivery(key).state is State.PENDING
    box.ledger.check()
    await box.close()
