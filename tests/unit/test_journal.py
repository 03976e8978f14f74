"""Turns and the disk: what the client hears when, and what a restart finds."""

from __future__ import annotations

import asyncio

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.http.sessions.taking import NO_RESULT
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.session_record import Claim
from agentserve.types import FinishReason
from tests.api_rig import CHAT, TOOLS, events, joined, settled, user
from tests.fakes import say
from tests.journal_rig import CALL, FULL, TWO, kept, said, turns_on, waiting
from tests.session_stores import MemoryStore


async def test_the_last_of_a_stream_waits_for_the_disk_and_nobody_else_does() -> None:
    async with kept() as k:
        k.store.open.clear()
        request = asyncio.create_task(
            k.rig.post(CHAT, {"messages": [user("a")], "stream": True, "session_id": "mine"})
        )
        await settled(lambda: k.store.asked.acquire(blocking=False))
        session = k.directory.get("default", "mine")
        assert (session.committed, session.running) == (0, 1)
        assert not request.done()
        other = await k.rig.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert other.status_code == 200  # it needs no disk, and the loop was free to serve it
        assert turns_on(k.store) == 0
        k.store.open.set()
        chunks = events((await request).content)
        assert joined(chunks)["content"] == "Hello!"
        assert chunks[-1] == "[DONE]"
        assert (session.committed, turns_on(k.store)) == (1, 1)


async def test_many_turns_share_a_sync() -> None:
    async with kept() as k:
        k.store.open.clear()
        first = asyncio.create_task(k.rig.chat([user("first")]))
        await settled(lambda: k.store.asked.acquire(blocking=False))
        others = [asyncio.create_task(k.rig.chat([user(f"{i}")])) for i in range(8)]
        await settled(lambda: len(k.rig.engine.submits) == 9 and not k.rig.engine.live)
        await asyncio.sleep(0.05)
        k.store.open.set()
        await asyncio.gather(first, *others)
        assert turns_on(k.store) == 9
        assert len(k.store.groups) < 9


async def test_a_restart_goes_on_with_the_very_ids() -> None:
    async with kept() as k:
        k.rig.engine.reply = say(CALL)
        asked = await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)
        before = await k.rig.session("mine")
        store = k.store
    async with kept(store) as k:
        assert k.journal.skipped == 0
        after = await k.rig.session("mine")
        on_workers = {"computed_tokens": 0, "pages": 0, "as_of": None}
        assert after | on_workers == before | on_workers
        assert after["state"] == "WAITING_TOOL"
        message = asked["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        message = said(None) | {"tool_calls": message["tool_calls"]}  # type: ignore[arg-type]
        reply = await k.rig.chat([user("a"), message, result], tools=TOOLS)
        assert reply["session_id"] == "mine"
        prompt = unpack_tokens(k.rig.engine.submits[0].tokens)
        assert bytes(t for t in prompt if t < 256).count(CALL.encode()) == 1  # as it was generated
        assert k.rig.engine.submits[0].turn == 2
        assert (await k.rig.session("mine"))["state"] == "IDLE"


async def test_results_are_taken_across_restarts_without_the_history() -> None:
    async with kept() as k:
        path, (first, second) = await waiting(k)
        assert (await k.rig.post(path, {"call_id": second, "content": "12:00"})).status_code == 200
        store = k.store
    async with kept(store) as k:
        again = await k.rig.post(path, {"call_id": second, "content": "12:00"})
        assert again.json()["results"] == [{"call_id": second, "status": "repeated"}], again.text
        conflict = await k.rig.post(path, {"call_id": second, "content": "13:00"})
        assert conflict.status_code == 409
        k.rig.engine.reply = say("done")
        reply = await k.rig.post(path, {"call_id": first, "content": "sunny"})
        assert reply.json()["choices"][0]["message"]["content"] == "done", reply.text
        prompt = bytes(t for t in unpack_tokens(k.rig.engine.submits[0].tokens) if t < 256)
        assert prompt.count(TWO.encode()) == 1
        assert prompt.index(b"sunny") < prompt.index(b"12:00")
        store = k.store
    async with kept(store) as k:
        assert (await k.rig.session("mine"))["turns"] == 2
        late = await k.rig.post(path, {"call_id": first, "content": "sunny"})
        assert late.json()["results"] == [{"call_id": first, "status": "repeated"}], late.text


async def test_a_fork_outlives_the_server_and_its_calls_stay_its_parents() -> None:
    async with kept() as k:
        path, calls = await waiting(k)
        child = (await k.rig.post("/agentserve/sessions/mine/fork", {})).json()
        assert sorted(child["pending_tool_calls"]) == sorted(calls)
        before = {name: await k.rig.session(name) for name in ("mine", child["id"])}
        k.store.error = FULL
        reply = await k.rig.post("/agentserve/sessions/mine/fork", {})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_failed")
        assert len(k.directory) == 2
        store = k.store
    async with kept(store) as k:
        assert (k.journal.skipped, len(k.directory)) == (0, 2)
        for name, session in before.items():
            after = await k.rig.session(name)
            for field in ("state", "turns", "epoch", "tokens", "messages", "pending_tool_calls", "history"):
                assert after[field] == session[field], (name, field)
        issuer = k.directory._lineages.issuer(Claim("default", None, tuple(calls), (b"x",)))
        assert issuer == k.directory.get("default", "mine").key
        k.rig.engine.reply = say("the child's")
        results = [{"call_id": call, "content": "x"} for call in calls]
        reply = await k.rig.post(path.replace("mine", child["id"]), results)
        assert reply.json()["choices"][0]["message"]["content"] == "the child's", reply.text
        assert (await k.rig.session("mine"))["state"] == "WAITING_TOOL"
        store = k.store
    async with kept(store) as k:
        assert (k.journal.skipped, len(k.directory)) == (0, 2)
        turns = [(await k.rig.session(name))["turns"] for name in ("mine", child["id"])]
        assert turns == [1, 2]
        await k.rig.client.delete("/agentserve/sessions/mine")
        store = k.store
    async with kept(store) as k:
        assert [session.public_id for session in k.directory.sessions("default")] == [child["id"]]


async def test_a_wait_is_measured_across_restarts() -> None:
    async with kept() as k:
        k.rig.engine.reply = say(CALL)
        await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)
        store = k.store
    for passed, state in ((60.0, "WAITING_TOOL"), (99.0, "WAITING_TOOL"), (101.0, "IDLE")):
        async with kept(store, passed=passed) as k:
            assert (await k.rig.session("mine"))["state"] == state


async def test_another_template_renders_replies_again() -> None:
    async with kept() as k:
        await k.rig.chat([user("a")], session_id="mine")
        store = k.store
    async with kept(store, text=b"another") as k:
        lease = k.directory.begin(
            Claim("default", "mine", (), (*k.directory.get("default", "mine").chain, b"new")), 60.0
        )
        assert lease.spliced == {}
        assert (lease.session.public_id, lease.turn) == ("mine", 2)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_results_whose_turn_died_with_the_server_are_taken(goes_on: bool) -> None:
    """The client's connection broke: it sends the same again, with the epoch that it knows."""
    async with kept() as k:
        path, (first, second) = await waiting(k)
        await k.rig.post(path, {"call_id": second, "content": "12:00"})
        k.rig.engine.reply = say("done", hold_at=1)
        last = {"continue": True} if goes_on else {"call_id": first, "content": "sunny", "epoch": 0}
        request = asyncio.create_task(k.rig.post(path, last))
        await settled(lambda: k.rig.engine.live)
        await settled(lambda: not k.journal._writer._orders and not k.journal._writer._writing)
        died = MemoryStore()
        for group in k.store.groups:
            died.write(group)
        k.rig.engine.reply.release.set()
        assert (await request).status_code == 200
    async with kept(died) as k:
        session = await k.rig.session("mine")
        assert (session["state"], session["epoch"], session["turns"]) == ("WAITING_TOOL", 1, 1)
        assert [call["result_taken"] for call in session["pending_tool_calls"]] == [not goes_on, True]
        k.rig.engine.reply = say("done")
        if not goes_on:
            other = await k.rig.post(path, {"call_id": first, "content": "rain", "epoch": 0})
            assert other.json()["error"]["code"] == "result_conflict", "as after any other rollback"
        again = await k.rig.post(path, last if not goes_on else {"call_id": first, "content": "sunny"})
        assert again.json()["choices"][0]["message"]["content"] == "done", again.text
        died = k.store
    async with kept(died) as k:
        assert (await k.rig.session("mine"))["turns"] == 2


async def test_results_that_were_made_up_for_a_turn_that_failed_are_not_there_after_a_restart() -> None:
    async with kept() as k:
        path, (first, second) = await waiting(k)
        k.rig.engine.reply = say("done", reason=FinishReason.ERROR)
        assert (await k.rig.post(path, {"continue": True})).status_code >= 500
        store = k.store
    words = next(content for (table, _), content in store.records.items() if table is Table.WORDS)
    assert NO_RESULT.encode() not in words
    async with kept(store) as k:
        session = await k.rig.session("mine")
        assert [call["result_taken"] for call in session["pending_tool_calls"]] == [False, False]
        taken = await k.rig.post(
            path, {"results": [{"call_id": call, "content": "x"} for call in (first, second)]}
        )
        assert taken.status_code == 200, taken.text
