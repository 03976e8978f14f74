"""A disk that does not answer: nobody waits without end, and it has its say when it is back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agentserve.server.sessions.environment import Table
from tests.api_rig import CHAT, events, settled, user
from tests.fakes import say
from tests.journal_rig import FULL, Kept, kept, said, turns_on

SHORT = 0.05  # patience, in seconds; the disk hangs until an event is set


async def hung(k: Kept, stream: bool = False) -> None:
    """A client's second turn meets a disk that hangs, when it is about to be committed."""
    await k.rig.chat([user("a")], session_id="mine")
    k.rig.engine.reply = script = say("late", hold_at=2)
    body = {"messages": [user("a"), said("Hello!"), user("b")], "session_id": "mine", "stream": stream}
    request = asyncio.create_task(k.rig.post(CHAT, body))
    await settled(lambda: len(k.rig.engine.submits) == 2)
    await settled(lambda: len(k.store.groups) == 2)  # the turn's number
    k.store.open.clear()
    script.release.set()
    reply = await request
    if stream:
        error = events(reply.content)[-1]["error"]
    else:
        assert reply.status_code == 503
        error = reply.json()["error"]
    assert error["code"] == "storage_failed"
    assert "the disk has not answered for 0.05 s" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_waits_so_long_and_the_disk_has_its_say_later(stream: bool) -> None:
    async with kept(patience=SHORT) as k:
        await hung(k, stream)
        session = await k.rig.session("mine")
        assert (session["turns"], session["epoch"], session["state"]) == (1, 1, "IDLE")
        k.store.open.set()
        await settled(lambda: k.journal.failure is None)
        k.rig.engine.reply = say("kept")
        again = await k.rig.chat([user("a"), said("Hello!"), user("b")], session_id="mine")
        assert again["choices"][0]["message"]["content"] == "kept"
        store = k.store
    assert turns_on(store) == 2  # the late turn was written, and taken back as the client was told
    async with kept(store) as k:
        found = k.directory.get("default", "mine")
        assert (found.committed, found.epoch, found.last_turn) == (2, 1, 3)


async def test_a_turn_that_reached_the_disk_before_the_end_is_there_after_it() -> None:
    """The client was told that nobody knows; the machine stops before the disk could be told anything."""
    async with kept(patience=SHORT) as k:
        await hung(k)
        late = [change for change in k.store.waiting if getattr(change, "table", None) is Table.TURNS]
        assert len(late) == 1
        before = dict(k.store.records)
        k.store.open.set()
    for reached in (False, True):
        store = type(k.store)()
        store.records = dict(before)
        if reached:
            store.write(k.store.groups[2])
        async with kept(store) as again:
            assert again.directory.get("default", "mine").committed == 1 + reached
            assert again.journal.skipped == 0


async def test_while_the_disk_hangs_everything_else_goes_on_and_nothing_piles_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with kept(patience=SHORT) as k:
        await hung(k)
        submits = len(k.rig.engine.submits)
        for _ in range(20):
            refused = await k.rig.post(CHAT, {"messages": [user("new")]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
            health = (await k.rig.client.get("/health")).json()
            assert (health["status"], health["sessions_disk"]["state"]) == ("degraded", "failing")
        assert len(k.rig.engine.submits) == submits
        assert len(k.journal._writer._orders) <= 3  # what takes the turn back, and one that tries
        assert "agentserve_sessions_disk_failing 1.0" in (await k.rig.client.get("/metrics")).text
        assert (await k.rig.post("/v1/completions", {"prompt": "x"})).status_code == 200
        assert (await k.rig.session("mine"))["turns"] == 1
        k.store.open.set()
        await settled(lambda: k.journal.failure is None)
        assert "agentserve_sessions_disk_failing 0.0" in (await k.rig.client.get("/metrics")).text
    said_of_it = [record.message for record in caplog.records if record.name.endswith("writer")]
    assert said_of_it == [
        "sessions cannot be kept: the disk has not answered for 0.05 s",
        "sessions are kept again",
    ]


async def test_closing_a_session_does_not_wait_without_end() -> None:
    async with kept(patience=SHORT) as k:
        await k.rig.chat([user("a")], session_id="mine")
        k.store.open.clear()
        reply = await k.rig.client.delete("/agentserve/sessions/mine")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_failed")
        assert len(k.directory) == 0
        k.store.open.set()
        store = k.store
    assert turns_on(store) == 0


async def test_a_disk_with_room_for_little_is_said_to_be_full_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is small still fits: that is no news, until as much fits as did not."""
    caplog.set_level(logging.WARNING)
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        k.store.room = 700
        k.rig.engine.reply = say("x" * 2000)
        for _ in range(5):
            reply = await k.rig.post(CHAT, {"messages": [user("b")]})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_failed")
            assert FULL in reply.text
            assert (await k.rig.client.get("/health")).json()["status"] == "degraded"
        assert len(k.rig.engine.submits) == 2  # once it is known, nothing is computed in vain
        assert len([r for r in caplog.records if r.name.endswith("writer")]) == 1
        k.store.room = None
        await k.rig.chat([user("b")])
        assert (await k.rig.client.get("/health")).json()["status"] == "ok"
        store = k.store
    assert len([r for r in caplog.records if r.name.endswith("writer")]) == 2
    assert not store.records[Table.META, b"tried"]  # what was tried takes no room
