"""A disk that takes nothing, or does not answer: what the client hears, and what is true afterwards."""

from __future__ import annotations

import asyncio

import pytest

from tests.api_rig import CHAT, events, settled, user
from tests.fakes import say
from tests.journal_rig import FULL, kept, said, turns_on, waiting
from tests.session_stores import MemoryStore


async def test_a_result_the_disk_does_not_take_is_not_taken() -> None:
    async with kept() as k:
        path, (first, second) = await waiting(k)
        k.store.error = FULL
        reply = await k.rig.post(path, {"call_id": second, "content": "12:00"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_failed")
        k.store.error = ""
        other = await k.rig.post(path, {"call_id": second, "content": "13:00"})  # no conflict
        assert other.json()["results"] == [{"call_id": second, "status": "taken"}], other.text
        reply = await k.rig.post(path, {"call_id": first, "content": "sunny"})
        assert reply.json()["choices"][0]["message"]["content"] == "done"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("applies_anyway", [False, True])
async def test_a_turn_the_disk_does_not_take_is_rolled_back_and_the_client_hears_it(
    stream: bool, applies_anyway: bool
) -> None:
    """Also where the write failed but reached the disk: the next one takes it back."""
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        history = [user("a"), said("Hello!"), user("b")]
        script = say("never kept", hold_at=3)
        k.rig.engine.reply = script
        body = {"messages": history, "session_id": "mine", "stream": stream}
        request = asyncio.create_task(k.rig.post(CHAT, body))
        await settled(lambda: len(k.rig.engine.submits) == 2)
        await settled(lambda: len(k.store.groups) == 2)  # the turn's number
        k.store.error, k.store.applies_anyway = FULL, applies_anyway
        script.release.set()
        reply = await request
        if stream:
            chunks = events(reply.content)
            assert chunks[-1]["error"]["code"] == "storage_failed"
            assert "[DONE]" not in chunks
        else:
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "storage_failed"
        assert FULL in reply.text
        session = await k.rig.session("mine")
        assert (session["turns"], session["epoch"], session["state"]) == (1, 1, "IDLE")
        health = (await k.rig.client.get("/health")).json()
        assert (health["status"], health["sessions_disk"]["state"]) == ("degraded", "failing")
        assert health["sessions_disk"]["reason"] == FULL

        submits = len(k.rig.engine.submits)
        refused = await k.rig.post(CHAT, {"messages": [user("new")]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert len(k.rig.engine.submits) == submits  # nothing was computed for it
        assert (await k.rig.post("/v1/completions", {"prompt": "x"})).status_code == 200
        assert (await k.rig.session("mine"))["turns"] == 1  # what is in memory can be read

        k.store.error = ""
        k.rig.engine.reply = say("kept")
        again = await k.rig.chat(history, session_id="mine")
        assert again["choices"][0]["message"]["content"] == "kept"
        health = (await k.rig.client.get("/health")).json()
        assert (health["status"], health["sessions_disk"]) == ("ok", {"state": "ok", "skipped": 0})
        store = k.store
    async with kept(store) as k:
        found = k.directory.get("default", "mine")
        assert found is not None
        assert (found.committed, found.epoch, found.last_turn) == (2, 1, 3)
        k.rig.check_rest()


async def test_a_first_turn_that_cannot_be_kept_leaves_no_session() -> None:
    async with kept() as k:
        k.store.error, k.store.applies_anyway = FULL, True
        reply = await k.rig.post(CHAT, {"messages": [user("a")], "session_id": "mine"})
        assert reply.status_code == 503
        assert len(k.directory) == 0
        k.store.error = ""
        await k.rig.chat([user("b")], session_id="other")
        store = k.store
    async with kept(store) as k:
        assert [session.public_id for session in k.directory.sessions("default")] == ["other"]


async def test_health_finds_out_that_the_disk_is_well_again() -> None:
    async with kept() as k:
        k.store.error = FULL
        await k.rig.post(CHAT, {"messages": [user("a")]})
        assert (await k.rig.client.get("/health")).json()["status"] == "degraded"
        k.store.error = ""
        await k.rig.client.get("/health")
        await settled(lambda: k.journal.failure is None)


async def test_a_number_is_on_disk_before_anything_is_said_of_its_turn() -> None:
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        k.store.open.clear()
        while k.store.asked.acquire(blocking=False):
            pass
        body = {"messages": [user("a"), said("Hello!"), user("b")], "session_id": "mine", "stream": True}
        request = asyncio.create_task(k.rig.post(CHAT, body))
        await settled(lambda: k.store.asked.acquire(blocking=False))
        await settled(lambda: len(k.rig.engine.submits) == 2)  # it computes meanwhile
        await asyncio.sleep(0.02)
        session = k.directory.get("default", "mine")
        assert session.engine_turn == 1  # not an event of turn 2 was looked at
        k.store.open.set()
        await request
        assert session.engine_turn == 2
    for groups in range(len(k.store.groups) + 1):
        store = MemoryStore()
        for group in k.store.groups[:groups]:
            store.write(group)
        async with kept(store) as again:
            found = again.directory.get("default", "mine")
            if found is not None:
                assert found.last_turn == (2 if groups > 1 else 1)


async def test_a_client_that_leaves_while_the_disk_writes_rolls_back() -> None:
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        history = [user("a"), said("Hello!"), user("b")]
        k.rig.engine.reply = script = say("late", hold_at=2)
        request = asyncio.create_task(k.rig.post(CHAT, {"messages": history, "session_id": "mine"}))
        await settled(lambda: len(k.store.groups) == 2)  # the turn's number
        k.store.open.clear()
        while k.store.asked.acquire(blocking=False):
            pass
        script.release.set()
        await settled(lambda: k.store.asked.acquire(blocking=False))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        session = k.directory.get("default", "mine")
        await settled(lambda: session.running is None)
        assert (session.committed, session.epoch) == (1, 1)
        k.store.open.set()
        store = k.store
    assert turns_on(store) == 1  # the write that had begun was taken back
    async with kept(store) as k:
        found = k.directory.get("default", "mine")
        assert (found.committed, found.epoch, found.last_turn) == (1, 1, 2)


async def test_a_closed_session_stays_closed_and_the_disk_has_a_say() -> None:
    async with kept() as k:
        for name in ("one", "two"):
            await k.rig.chat([user(name)], session_id=name)
        assert (await k.rig.client.delete("/agentserve/sessions/one")).status_code == 200
        assert turns_on(k.store) == 1
        k.store.error = FULL
        reply = await k.rig.client.delete("/agentserve/sessions/two")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_failed")
        assert len(k.directory) == 0
        k.store.error = ""
        k.journal.retry().result(30)
        store = k.store
    async with kept(store) as k:
        assert len(k.directory) == 0


async def test_closing_a_session_while_its_turn_is_written() -> None:
    async with kept() as k:
        k.store.open.clear()
        request = asyncio.create_task(k.rig.post(CHAT, {"messages": [user("a")], "session_id": "mine"}))
        await settled(lambda: k.store.asked.acquire(blocking=False))
        closing = asyncio.create_task(k.rig.client.delete("/agentserve/sessions/mine"))
        await settled(lambda: len(k.directory) == 0)
        k.store.open.set()
        assert (await closing).status_code == 200
        assert (await request).json()["error"]["code"] == "session_closed"
        store = k.store
    assert turns_on(store) == 0
