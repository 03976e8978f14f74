"""Turns and the disk: what the client hears when, what a disk that fails or hangs leads to."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentserve.clock import VirtualClock
from agentserve.messages import unpack_tokens
from agentserve.server.sessions.changes import Put
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.session_record import Claim, committed_turn
from agentserve.server.sessions.transcript import Transcripts
from agentserve.types import SessionId, SessionState
from tests.api_rig import CHAT, TOOLS, Rig, events, hermes, joined, settled, user
from tests.fakes import ScriptedEngine, say
from tests.session_stores import MemoryStore

CALL = hermes("weather", '{"city": "Oslo"}')
FULL = "No space left on device"


class Kept:
    """An application over a made-up disk, started `passed` seconds after the first one."""

    def __init__(
        self, store: MemoryStore | None = None, text: bytes = b"text", passed: float = 0.0, **options: Any
    ) -> None:
        self.store = store or MemoryStore()
        clock = VirtualClock(50.0 + 7 * passed)  # monotonic clocks begin anywhere
        self.journal = Journal(self.store, text, clock, lambda: 1e9 + passed)  # type: ignore[arg-type]
        self.directory = SessionDirectory(new_session_id, max_wait=100.0, book=self.journal)
        self.directory.restore(self.journal.sessions(), clock.now())
        self.directory.end_waits(clock.now())
        transcripts = Transcripts()
        for transcript in self.journal.transcripts:
            transcripts.restore(transcript)
        self.rig = Rig(
            ScriptedEngine(say("Hello!")),
            directory=self.directory,
            journal=self.journal,
            clock=clock,
            chronicle=Chronicle(transcripts, EventLogs(lambda: "epoch")),
            **options,
        )

    async def close(self) -> None:
        self.store.error = ""
        self.store.open.set()
        await self.journal.close()


@asynccontextmanager
async def kept(store: MemoryStore | None = None, **options: Any) -> AsyncIterator[Kept]:
    made = Kept(store, **options)
    try:
        yield made
    finally:
        await made.close()
        assert made.store.closed


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turns_on(store: MemoryStore) -> int:
    return sum(table is Table.TURNS for table, _ in store.records)


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
        assert after | {"computed_tokens": 0, "pages": 0} == before | {"computed_tokens": 0, "pages": 0}
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


TWO = CALL + hermes("now", "{}")


async def waiting(k: Kept) -> tuple[str, list[str]]:
    """A session that waits for two results: its path, and the calls."""
    k.rig.engine.reply = say(TWO)
    reply = await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)
    k.rig.engine.reply = say("done")
    calls = reply["choices"][0]["message"]["tool_calls"]
    return "/agentserve/sessions/mine/tool_results", [call["id"] for call in calls]


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


async def test_records_that_cannot_be_read_are_set_aside_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with kept() as k:
        for name in ("a", "b", "c", "d"):
            await k.rig.chat([user(name)], session_id=name)
        keys = [session.key.encode() for session in k.directory.sessions("default")]
        store = k.store
    store.records[Table.HEADS, keys[0]] = b"\xc1"
    del store.records[Table.HEADS, keys[1]]
    twin = store.records[Table.HEADS, keys[2]]
    store.write([Put(Table.HEADS, b"twin", twin), Put(Table.TURNS, b"twin\0" + bytes(7) + b"\1", b"")])
    caplog.set_level(logging.ERROR)
    async with kept(store) as k:
        assert k.journal.skipped == 3
        assert sorted(s.public_id for s in k.directory.sessions("default")) == ["a", "b"]
        assert (await k.rig.client.get("/health")).json()["sessions_disk"] == {"state": "ok", "skipped": 3}
    assert len(caplog.records) == 1
    async with kept(store) as k:
        assert (k.journal.skipped, len(k.directory)) == (0, 2)


def a_directory(store: MemoryStore, **bounds: Any) -> tuple[SessionDirectory, Journal]:
    clock = VirtualClock()
    journal = Journal(store, b"text", clock, clock.now)  # type: ignore[arg-type]
    directory = SessionDirectory(new_session_id, book=journal, **bounds)
    directory.restore(journal.sessions(), clock.now())
    return directory, journal


def run_turn(directory: SessionDirectory, claim: Claim, *calls: str) -> SessionId:
    lease = directory.begin(claim, 0.0)
    made = [(call, "tool", "{}") for call in calls]
    turn = committed_turn(
        lease, reply=claim.keys[-1] + b"a", length=3, generated=array("i", [1]), calls=made, now=0.0
    )
    directory.write(lease, turn)
    assert directory.commit(lease, turn)
    return lease.key


def test_a_result_that_came_through_a_sibling_is_not_waited_for_again() -> None:
    store = MemoryStore()
    directory, journal = a_directory(store)
    issuer = run_turn(directory, Claim("t", None, (), (b"u",)), "c1", "c2")
    run_turn(directory, Claim("t", None, ("c1",), (b"elsewhere", b"r1")))
    assert journal._writer.close(30)
    found, journal = a_directory(store)
    session = found._sessions[issuer]
    assert (list(session.pending), session.state) == (["c2"], SessionState.WAITING_TOOL)
    assert journal._writer.close(30)


def test_smaller_limits_forget_the_longest_unused_on_disk_too() -> None:
    store = MemoryStore()
    directory, journal = a_directory(store)
    keys = [run_turn(directory, Claim("t", f"n{i}", (), (b"%d" % i,))) for i in range(6)]
    assert journal._writer.close(30)
    smaller, journal = a_directory(store, max_sessions=2)
    assert list(smaller._sessions) == keys[-2:]
    assert journal._writer.close(30)
    assert turns_on(store) == 2


def test_a_clock_that_was_set_back_makes_nothing_future() -> None:
    store = MemoryStore()
    directory, journal = a_directory(store)
    key = run_turn(directory, Claim("t", None, (), (b"u",)), "c1")
    directory._sessions[key].created = 5000.0
    directory._waits[key] = 5000.0
    directory._keep(directory._sessions[key], 5000.0)
    assert journal._writer.close(30)
    found, journal = a_directory(store)
    assert (found._sessions[key].created, found._waits[key]) == (0.0, 0.0)
    assert journal._writer.close(30)
