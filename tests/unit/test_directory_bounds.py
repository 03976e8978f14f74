"""The session directory: the ends of turns and waits, bounds, what the books say after any history."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.sessions.departures import Left
from agentserve.server.sessions.directory import DirectoryFull
from agentserve.server.sessions.session_record import Lease, committed_turn
from agentserve.types import SessionState, TurnId
from tests.directory_rig import Harness, keys_of
from tiering.policy.base import Departure


def test_rollback_leaves_the_session_as_it_was() -> None:
    h = Harness()
    h.turn("u1", "call", calls=("c1",))
    lease = h.begin("u1", "call", "r1", calls=("c1",))
    session = lease.session
    before = (session.chain, session.length, set(session.pending), session.committed)
    h.directory.note(session, lease.turn, SessionState.DECODING, 5.0)
    assert h.directory.rollback(lease, 6.0, "the client left") is False
    assert (session.chain, session.length, set(session.pending), session.committed) == before
    assert session.state is SessionState.WAITING_TOOL
    assert session.epoch == 1
    assert session.history[-1].reason == "the client left"
    retry = h.begin("u1", "call", "r1", calls=("c1",))
    assert (retry.session, retry.turn) == (session, TurnId(lease.turn + 1))
    h.check()


def test_a_session_without_a_committed_turn_vanishes_on_rollback() -> None:
    h = Harness()
    lease = h.begin("u1", named="brief")
    assert h.directory.rollback(lease, 2.0, "cancelled") is True
    assert h.directory.get("t", "brief") is None
    assert len(h.directory) == 0
    assert h.directory.size_bytes == 0


def test_closing_makes_the_running_lease_void() -> None:
    h = Harness()
    lease = h.begin("u1", named="mine")
    h.directory.close(lease.session)
    assert h.commit(lease, "u1", "a1") is False
    assert h.directory.rollback(lease, 3.0, "late") is True
    again = h.begin("u1", named="mine")
    assert again.session is not lease.session
    assert again.key != lease.key
    h.check()


def test_tenants_do_not_meet() -> None:
    h = Harness()
    mine = h.turn("u1", "a1", named="x", tenant="a", calls=("c1",))
    theirs = h.begin("u1", "a1", "u2", named="x", tenant="b")
    assert theirs.session is not mine.session
    assert h.begin("u1", "a1", "u2", tenant="b").session is not mine.session
    assert h.begin("u1", "a1", "r", calls=("c1",), tenant="b").session is not mine.session


def test_the_oldest_idle_session_is_evicted_and_waiting_ones_last() -> None:
    h = Harness(max_sessions=3)
    waiting = h.turn("w", "call", calls=("c1",))
    idle = h.turn("i", "a")
    running = h.begin("r")
    h.turn("new", "a")
    assert h.directory.take_evicted() == [idle.key]
    h.turn("newer", "a")
    h.begin("newest")
    assert waiting.key in h.directory.take_evicted() + [s.key for s in h.directory.sessions("t")]
    assert h.commit(running, "r", "a")
    assert len(h.directory) == 3
    h.check()


def test_a_wait_that_nobody_answers_ends_and_its_place_can_be_taken() -> None:
    h = Harness(max_sessions=2, max_wait=10)
    dead = h.turn("w", "call", calls=("c1",))
    h.directory.note(dead.session, dead.turn, SessionState.DECODING, h.now)  # stale: it has ended
    assert dead.session.engine_turn is None
    h.turn("i", "a")
    h.now += 20
    fresh = h.begin("new")
    assert h.directory.take_evicted() == [dead.key]
    assert [(left.key, left.why) for left in h.directory.departures.take()] == [
        (dead.key, Departure.ABANDONED)
    ]
    assert fresh.session.key != dead.key
    h.check()


def test_a_result_that_comes_after_the_wait_is_still_taken() -> None:
    h = Harness(max_wait=10)
    lease = h.begin("u1")
    h.directory.note(lease.session, lease.turn, SessionState.DECODING, h.now)
    h.commit(lease, "u1", "call", calls=("c1",))
    h.now += 5
    h.directory.end_waits(h.now)
    assert lease.session.state is SessionState.WAITING_TOOL
    h.now += 20
    h.directory.end_waits(h.now)
    assert (lease.session.state, lease.session.history[-1].reason) == (SessionState.IDLE, "no result came")
    left = Left(lease.key, Departure.ABANDONED, "no result came", h.now, waited=True)
    assert h.directory.departures.take() == [left]
    assert h.directory.departures.take() == []
    h.check()
    late = h.begin("u1", "call", "r1", calls=("c1",))
    assert late.session is lease.session
    h.check()


def test_results_that_come_through_a_sibling_end_the_wait_of_the_session_that_asked() -> None:
    h = Harness()
    asked = h.begin("u1")
    h.directory.note(asked.session, asked.turn, SessionState.DECODING, h.now)
    h.commit(asked, "u1", "calls", calls=("c1", "c2"))
    one = h.begin("rewritten", "x", calls=("c1",))
    assert one.copied_from is asked.session
    assert asked.session.state is SessionState.WAITING_TOOL  # the sibling may still fail
    h.commit(one, "rewritten", "x", "a")
    assert list(asked.session.pending) == ["c2"]
    assert asked.session.state is SessionState.WAITING_TOOL
    two = h.begin("again", "y", calls=("c2",), named="elsewhere")
    h.commit(two, "again", "y", "b")
    assert (asked.session.pending, asked.session.state) == ({}, SessionState.IDLE)
    assert asked.session.history[-1].reason == "answered in elsewhere"
    reason = "answered in elsewhere"
    assert h.directory.departures.take() == [
        Left(asked.key, Departure.SUPERSEDED, reason, h.now, waited=True)
    ]
    h.check()


def test_a_sibling_knows_how_many_tokens_it_shares_at_least() -> None:
    h = Harness()
    first = h.turn("u1", "a1")
    h.turn("u1", "a1", "u2", "a2")
    assert first.session.length == 40
    assert h.begin("u1", "a1", "u2 edited").shared == 20
    assert h.begin("u1", "a1", "u2", "a2", "u3").shared == 0  # goes on in the session itself
    assert h.begin("u1", "a1", "u2", "a2", "u4").shared == 40


def test_a_directory_full_of_running_turns_refuses() -> None:
    h = Harness(max_sessions=2)
    h.begin("a")
    h.begin("b")
    with pytest.raises(DirectoryFull):
        h.begin("c")
    h.check()


def test_bytes_are_bounded() -> None:
    h = Harness(max_bytes=20_000)
    for i in range(50):
        lease = h.begin(f"u{i}")
        turn = committed_turn(
            lease,
            reply=keys_of([f"u{i}", "a"])[-1],
            length=500,
            generated=array("i", range(500)),
            calls=[],
            now=float(i),
        )
        h.directory.commit(lease, turn)
        assert h.directory.size_bytes <= 20_000
        h.check()
    assert 0 < len(h.directory) < 10


def test_history_is_bounded_and_ignores_stale_turns() -> None:
    h = Harness(history=4)
    lease = h.begin("u")
    for i in range(10):
        state = SessionState.DECODING if i % 2 else SessionState.PREEMPTED
        h.directory.note(lease.session, lease.turn, state, float(i))
    assert [step.at for step in lease.session.history] == [6.0, 7.0, 8.0, 9.0]
    h.commit(lease, "u", "a")
    h.directory.note(lease.session, lease.turn, SessionState.DECODING, 11.0)
    assert lease.session.state is SessionState.IDLE


def test_generated_ids_that_do_not_spell_the_reply_are_not_spliced() -> None:
    h = Harness()
    lease = h.begin("u1")
    reply = keys_of(["u1", "a1"])[-1]
    h.directory.commit(lease, committed_turn(lease, reply=reply, length=0, generated=None, calls=[], now=1.0))
    assert h.begin("u1", "a1", "u2").spliced == {}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=40))
def test_the_books_agree_after_any_history(steps: list[tuple[int, int, bool]]) -> None:
    """Random turns on few lineages, some committed, some rolled back, some left running."""
    h = Harness(max_sessions=6)
    running: list[tuple[Lease, list[str]]] = []
    lineages: list[list[str]] = [[]]
    for pick, action, tool in steps:
        messages = [*lineages[pick % len(lineages)], f"u{pick}"]
        if action == 0 and running:
            lease, _ = running.pop()
            h.directory.rollback(lease, h.now, "cancelled")
        elif action == 1 and running:
            lease, asked = running.pop(0)
            reply = [*asked, "a"]
            if h.commit(lease, *reply, calls=(f"c{h.now}",) if tool else ()):
                lineages.append(reply)
        elif action == 2 and (session := next(iter(h.directory.sessions("t")), None)):
            h.directory.close(session)
        else:
            try:
                lease = h.begin(*messages)
            except DirectoryFull:
                continue
            running.append((lease, messages))
        h.check()
    assert all(lease.session.running == lease.turn for lease, _ in running if h.directory.holds(lease))
