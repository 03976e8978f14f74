"""What a start makes of the records that are there."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import pytest

from agentserve.clock import VirtualClock
from agentserve.server.sessions.changes import Put
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.environment import Table
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.session_record import Claim, committed_turn
from agentserve.types import SessionId, SessionState
from tests.api_rig import user
from tests.journal_rig import kept, turns_on
from tests.session_stores import MemoryStore


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
    directory.keep(directory._sessions[key])
    assert journal._writer.close(30)
    found, journal = a_directory(store)
    assert (found._sessions[key].created, found._waits[key]) == (0.0, 0.0)
    assert journal._writer.close(30)


def words_on_disk(store: MemoryStore) -> int:
    return sum(len(content) for (table, _), content in store.records.items() if table is Table.WORDS)


async def test_a_start_reads_words_within_a_bound_and_those_used_last() -> None:
    store = MemoryStore()
    async with kept(store) as k:
        for i in range(6):
            await k.rig.chat([user(f"{i}" + "x" * 1000)], session_id=f"n{i}")
        one = words_on_disk(store) // 6
    clock = VirtualClock()
    journal = Journal(store, b"text", clock, clock.now, most_words=2 * one + one // 2)  # type: ignore[arg-type]
    names = {session.key: session.public_id for session, _ in journal.sessions()}
    assert [names[transcript.session] for transcript in journal.transcripts] == ["n4", "n5"]
    await journal.close()
    assert words_on_disk(store) <= 2 * one + one // 2
    assert len(names) == 6  # the sessions are there, whose clients send their words


async def test_words_that_have_no_room_in_memory_have_none_on_disk() -> None:
    async with kept() as k:
        transcripts = k.rig.context.chronicle.transcripts
        transcripts._held.most_size = 5000
        for i in range(6):
            await k.rig.chat([user(f"{i}" + "x" * 1000)], session_id=f"n{i}")
        await k.journal.ready()
    assert words_on_disk(k.store) <= 5000


async def test_settings_are_bounded_and_so_is_what_siblings_keep() -> None:
    async with kept() as k:
        body = {"messages": [user("x")], "chat_template_kwargs": {"x": "y" * 70_000}}
        reply = await k.rig.post("/v1/chat/completions", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template_kwargs")
        assert not k.rig.engine.submits
        k.rig.context.chronicle.transcripts._held.most_size = 8 * 10_000
        await k.rig.chat([user("x" * 1500)], n=12)
        assert len(k.rig.context.chronicle.transcripts) == 4
    written = [len(c.content) for group in k.store.groups for c in group if isinstance(c, Put)]
    assert sum(size for size in written if size > 1500) < 10_000
    assert words_on_disk(k.store) < 10_000
