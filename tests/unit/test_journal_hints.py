"""Hints are on disk with their session before their receipt, and count after a restart as they did before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentserve.server.sessions.changes import Put
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.store import SessionStore
from tests.api_rig import CHAT, TOOLS, hermes, settled, user
from tests.fakes import say
from tests.journal_rig import CALL, FULL, Kept, kept, said
from tests.session_stores import MemoryStore
from tiering.policy.base import Hints, Span

PATH = "/agentserve/sessions/mine/hints"
RANGES = [{"start": 0, "end": 64, "priority": 100}, {"start": 64, "end": None, "priority": 7}]
ALL = {"expected_wait": 30, "deadline": 60, "priority": 1, "retain": RANGES}


async def a_wait(k: Kept) -> None:
    k.rig.engine.reply = say(CALL)
    await k.rig.chat([user("a")], session_id="mine", tools=TOOLS)


async def hint(k: Kept, **fields: Any) -> None:
    reply = await k.rig.post(PATH, fields)
    assert reply.status_code == 200, reply.text


async def told(k: Kept) -> Any:
    return (await k.rig.session("mine"))["hints"]


def killed(k: Kept) -> MemoryStore:
    """What is on disk should the process die now."""
    left = MemoryStore()
    left.records = dict(k.store.records)
    return left


async def test_what_was_said_counts_after_a_restart_and_time_has_passed(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        await a_wait(k)
        await hint(k, **ALL)
        before = await told(k)
        assert before["expected_wait"] == 30
    async with kept(SessionStore(tmp_path), passed=10.0) as k:
        after = await told(k)
        assert after == before | {"expected_wait": pytest.approx(20.0)}
        assert after["deadline"] == pytest.approx(1e9 + 60)
        call = (await k.rig.session("mine"))["pending_tool_calls"][0]["id"]
        k.rig.engine.reply = say(hermes("now", "{}"))
        await k.rig.post("/agentserve/sessions/mine/tool_results", {"call_id": call, "content": "x"})
        spans = (Span(0, 64, 100), Span(64, None, 7))
        assert k.rig.engine.hints == [Hints(priority=1, retain=spans)], "what was of one wait is over"
    async with kept(SessionStore(tmp_path), passed=20.0) as k:
        assert await told(k) == before | {"expected_wait": None, "deadline": None}


async def test_what_is_said_while_a_turn_runs_counts_from_its_end(tmp_path: Path) -> None:
    store = MemoryStore()
    async with kept(store) as k:
        await a_wait(k)
        call = (await k.rig.session("mine"))["pending_tool_calls"][0]["id"]
        k.rig.engine.reply = held = say(hermes("now", "{}"), hold_at=3)
        body = {"call_id": call, "content": "x"}
        turn = asyncio.create_task(k.rig.post("/agentserve/sessions/mine/tool_results", body))
        await settled(lambda: k.rig.engine.live)
        await hint(k, expected_wait=7, priority=2)
        at_that_moment = killed(k)
        held.release.set()
        assert (await turn).status_code == 200
        whole, before = killed(k), await told(k)
        assert before["expected_wait"] == 7
    async with kept(whole) as k:  # the head that has the turn is older than its end
        assert await told(k) == before
    async with kept(at_that_moment, passed=3.0) as k:
        assert (await k.rig.session("mine"))["history"][-1]["reason"] == "the server was started again"
        assert (await told(k))["expected_wait"] == 7, "the wait before it goes on, with what was said"
        assert (await told(k))["priority"] == 2


async def test_a_receipt_waits_for_the_disk_and_is_not_given_without_it() -> None:
    async with kept() as k:
        await a_wait(k)
        k.store.open.clear()
        saying = asyncio.create_task(k.rig.post(PATH, ALL))
        await settled(lambda: k.rig.engine.news)
        assert not saying.done()
        k.store.open.set()
        assert (await saying).status_code == 200
        before, news = await told(k), list(k.rig.engine.news)
        k.store.error = FULL
        refused = await k.rig.post(CHAT, {"messages": [user("z")]})
        assert refused.status_code == 503
        refused = await k.rig.post(PATH, {"priority": -2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert (await told(k), k.rig.engine.news) == (before, news), "it is as if it had not been said"


async def test_a_session_that_is_finished_stays_so() -> None:
    store = MemoryStore()
    async with kept(store) as k:
        await k.rig.chat([user("a")], session_id="mine")
        await hint(k, final=True)
        left = killed(k)
    async with kept(left) as k:
        found = await k.rig.session("mine")
        assert (found["devalued"], found["hints"]["final"]) == ("finished", True)
        await k.rig.chat([user("a"), said("Hello!"), user("b")], session_id="mine")
        found = await k.rig.session("mine")
        assert (found["turns"], found["devalued"], found["hints"]["final"]) == (2, None, False)


async def test_what_is_rejected_is_not_written() -> None:
    async with kept() as k:
        await a_wait(k)
        groups = len(k.store.groups)
        await hint(k, priority="high", nonsense=1)
        assert len(k.store.groups) == groups


async def test_nothing_is_written_of_a_session_that_has_no_turn_yet() -> None:
    async with kept() as k:
        k.rig.engine.reply = held = say("Hello!", hold_at=2)
        turn = asyncio.create_task(k.rig.chat([user("a")], session_id="mine"))
        await settled(lambda: k.rig.engine.live)
        await hint(k, priority=2)
        assert not k.store.records
        held.release.set()
        await turn
        left = killed(k)
    async with kept(left) as k:
        assert (await told(k))["priority"] == 2


def as_before(store: SessionStore, key: bytes, head: bytes) -> Put:
    """A head as versions before wrote it: they knew nothing of hints."""
    fields = msgspec.msgpack.decode(head)
    assert "said" in fields
    del fields["said"]
    return Put(Table.HEADS, key, msgspec.msgpack.encode(fields))


async def test_a_directory_that_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    async with kept(SessionStore(tmp_path)) as k:
        await a_wait(k)
        await hint(k, **ALL)
        before = await k.rig.session("mine")
    store = SessionStore(tmp_path)
    heads = {key: stored.head for key, stored in store.read().items() if stored.head}
    store.write([as_before(store, key, head) for key, head in heads.items()])
    store.close()
    async with kept(SessionStore(tmp_path)) as k:
        nothing = msgspec.to_builtins(Hints())
        assert before["waiting_for"] == ["weather"]
        changed = {"hints": nothing, "pages": 0, "computed_tokens": 0, "as_of": None}
        assert (k.journal.skipped, await k.rig.session("mine")) == (0, before | changed)
        await hint(k, **ALL)
    async with kept(SessionStore(tmp_path)) as k:
        assert await told(k) == before["hints"]


async def test_a_clock_that_was_set_back_makes_no_deadline_further_than_a_client_may() -> None:
    async with kept(passed=1e9) as k:
        await a_wait(k)
        await hint(k, deadline=60)
        left = killed(k)
    async with kept(left) as k:
        assert (await told(k))["deadline"] == pytest.approx(1e9 + 1e6)


async def test_what_was_made_of_a_cache_mark_is_taken_back_after_a_restart(tmp_path: Path) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": [user("a")], "session_id": "mine"}
    async with kept(SessionStore(tmp_path)) as k:
        await k.rig.post("/v1/messages", body | {"cache_control": {"type": "ephemeral", "ttl": "1h"}})
        assert (await told(k))["priority"] == 1
    async with kept(SessionStore(tmp_path)) as k:
        assert (await told(k))["priority"] == 1
        messages = [user("a"), said("Hello!"), user("b")]
        assert (await k.rig.post("/v1/messages", body | {"messages": messages})).status_code == 200
        assert (await told(k))["priority"] == 0
