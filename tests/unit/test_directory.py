"""The session directory: identity, lineage, commit and rollback, bounds."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.sessions.departures import Left
from agentserve.server.sessions.directory import DirectoryFull, SessionDirectory
from agentserve.server.sessions.session_record import Claim, Lease, committed_turn, common
from agentserve.types import SessionState, TurnId
from tiering.policy.base import Departure


def keys_of(messages: Sequence[str]) -> tuple[bytes, ...]:
    found, key = [], b""
    for message in messages:
        key = hashlib.sha256(key + message.encode()).digest()
        found.append(key)
    return tuple(found)


class Harness:
    def __init__(self, **bounds: int) -> None:
        count = itertools.count(1)
        self.directory = SessionDirectory(lambda: f"s{next(count)}", **bounds)
        self.now = 0.0

    def begin(
        self,
        *messages: str,
        named: str | None = None,
        calls: tuple[str, ...] = (),
        past: tuple[str, ...] = (),
        tenant: str = "t",
    ) -> Lease:
        self.now += 1
        return self.directory.begin(Claim(tenant, named, calls, keys_of(messages), past), self.now)

    def commit(self, lease: Lease, *messages: str, calls: tuple[str, ...] = (), ids: str = "xy") -> bool:
        """`messages`: the request's messages and the reply."""
        self.now += 1
        turn = committed_turn(
            lease,
            reply=keys_of(messages)[-1],
            length=10 * len(messages),
            generated=array("i", list(ids.encode())),
            calls=[(call, "tool", "{}") for call in calls],
            now=self.now,
        )
        return self.directory.commit(lease, turn)

    def turn(self, *messages: str, calls: tuple[str, ...] = (), **who: object) -> Lease:
        lease = self.begin(*messages[:-1], **who)
        assert self.commit(lease, *messages, calls=calls)
        return lease

    def check(self) -> None:
        directory = self.directory
        sessions = list(directory._sessions.values())
        assert directory.size_bytes == sum(session.cost for session in sessions)
        assert {s.key for s in directory._public.values()} == {s.key for s in sessions}
        points = {(s.tenant, point, s.key) for s in sessions for point in s.points}
        indexed = {(t, p, key) for (t, p), names in directory._lineages.points.items() for key in names}
        assert points == indexed
        calls = {(s.tenant, call): s.key for s in sessions for call in s.issued}
        assert all(s.pending.keys() <= s.issued.keys() for s in sessions)
        assert calls == directory._lineages.calls
        waiting = {s.key for s in sessions if s.state is SessionState.WAITING_TOOL and s.running is None}
        assert waiting == directory._waits.keys()
        assert list(directory._waits.values()) == sorted(directory._waits.values())
        assert all(s.pending for s in sessions if s.key in waiting)


def test_a_request_that_extends_the_last_turn_goes_on_in_its_session() -> None:
    h = Harness()
    first = h.turn("u1", "a1")
    second = h.begin("u1", "a1", "u2")
    assert second.session is first.session
    assert (first.turn, second.turn) == (1, 2)
    assert second.spliced == {1: array("i", list(b"xy"))}
    assert not second.opened
    h.commit(second, "u1", "a1", "u2", "a2", ids="zz")
    third = h.begin("u1", "a1", "u2", "a2", "u3")
    assert third.spliced == {1: array("i", list(b"xy")), 3: array("i", list(b"zz"))}
    h.check()


def test_an_exact_repeat_of_a_first_turn_is_a_new_session() -> None:
    h = Harness()
    first = h.turn("u1", "a1")
    again = h.begin("u1")
    assert again.session is not first.session
    assert (again.session.parent, again.opened) == (None, True)


def test_two_strangers_with_the_same_history_do_not_share_a_session() -> None:
    h = Harness()
    h.turn("u1", "a1")
    h.turn("u1", "a1")
    third = h.begin("u1", "a1", "u2")
    fourth = h.begin("u1", "a1", "u2")
    assert third.session is not fourth.session
    assert third.session.parent is None
    assert fourth.session.parent is None


def test_a_request_while_a_turn_runs_becomes_a_sibling() -> None:
    h = Harness()
    first = h.turn("u1", "a1")
    running = h.begin("u1", "a1", "u2")
    sibling = h.begin("u1", "a1", "u3")
    assert running.session is first.session
    assert sibling.session is not first.session
    assert sibling.copied_from is first.session
    assert sibling.session.parent == first.session.public_id
    assert sibling.spliced == running.spliced
    assert h.commit(sibling, "u1", "a1", "u3", "b")
    assert h.commit(running, "u1", "a1", "u2", "c")
    assert h.begin("u1", "a1", "u3", "b", "u4").session is sibling.session
    assert h.begin("u1", "a1", "u2", "c", "u4").session is running.session
    h.check()


def test_an_edited_history_becomes_a_sibling_that_keeps_the_common_part() -> None:
    h = Harness()
    first = h.turn("u1", "a1", named="mine")
    h.turn("u1", "a1", "u2", "a2", named="mine")
    edited = h.begin("u1", "a1", "u2 edited", named="mine")
    assert edited.copied_from is first.session
    assert edited.session.parent == "mine"
    assert set(edited.spliced) == {1}
    rewritten = h.begin("u1", "a1 rewritten", "u2", named="mine")
    assert rewritten.spliced == {}
    assert rewritten.session.parent == "mine"


def test_a_longer_request_that_left_the_last_turn_is_a_sibling_too() -> None:
    h = Harness()
    h.turn("u1", "a1")
    first = h.turn("u1", "a1", "u2", "a2")
    other = h.begin("u1", "a1", "other", "a2", "u3")
    assert other.copied_from is first.session
    assert set(other.spliced) == {1}


def test_subagents_that_share_an_id_each_keep_their_own_lineage() -> None:
    h = Harness()
    one = h.turn("u1", "a1", named="shared")
    two = h.turn("v1", "b1", named="shared")
    assert two.session is not one.session
    assert two.session.parent == "shared"
    again_two = h.turn("v1", "b1", "v2", "b2", named="shared")
    again_one = h.turn("u1", "a1", "u2", "a2", named="shared")
    assert again_two.session is two.session
    assert again_one.session is one.session


def test_a_name_beats_a_longer_lineage_elsewhere() -> None:
    h = Harness()
    h.turn("u1", "a1")
    lease = h.begin("u1", "a1", "u2", named="other")
    assert lease.session.public_id == "other"
    assert (lease.opened, lease.spliced) == (True, {})


def test_a_named_session_is_not_left_for_another_lineage() -> None:
    h = Harness()
    h.turn("u1", "a1")
    mine = h.turn("x", "y", named="mine")
    lease = h.begin("u1", "a1", "u2", named="mine")
    assert lease.copied_from is mine.session
    assert lease.spliced == {}


def test_tool_results_find_the_session_that_asked() -> None:
    h = Harness()
    asked = h.turn("u1", "call", calls=("c1", "c2"))
    assert asked.session.state is SessionState.WAITING_TOOL
    assert [call.id for call in asked.session.pending.values()] == ["c1", "c2"]
    answered = h.begin("u1", "call", "r1", "r2", calls=("c1", "c2"))
    assert answered.session is asked.session
    h.commit(answered, "u1", "call", "r1", "r2", "done")
    assert answered.session.state is SessionState.IDLE
    assert not answered.session.pending
    rewritten = h.turn("u1", "call again", calls=("c9",))
    sibling = h.begin("something else", "x", calls=("c9",))
    assert sibling.copied_from is rewritten.session
    h.check()


def test_an_answered_call_still_says_whose_history_it_is() -> None:
    h = Harness()
    ours = h.begin("u1", named="agentA")
    h.commit(ours, "u1", "call", calls=("c1",), ids="aa")
    theirs = h.begin("u1", named="agentB")
    h.commit(theirs, "u1", "call", calls=("c2",), ids="bb")
    h.commit(h.begin("u1", "call", "r1", named="agentA", calls=("c1",)), "u1", "call", "r1", "a2")
    again = h.begin("u1", "call", "r1", calls=("c1",), past=("c1",))
    assert again.session.parent == "agentA"
    assert again.spliced == {1: array("i", list(b"aa"))}
    assert theirs.session.pending.keys() == {"c2"}
    h.check()


def test_a_later_question_goes_to_the_family_of_its_calls() -> None:
    h = Harness()
    for name, call in (("agentA", "c1"), ("agentB", "c2")):
        h.turn("u1", "call", named=name, calls=())
        lease = h.begin("u1", "call", "u2", named=name)
        h.commit(lease, "u1", "call", "u2", "call2", calls=(call,))
        lease = h.begin("u1", "call", "u2", "call2", "r", named=name, calls=(call,))
        h.commit(lease, "u1", "call", "u2", "call2", "r", "a")
    goes_on = h.begin("u1", "call", "u2", "call2", "r", "a", "u3", past=("c1",))
    assert goes_on.session.public_id == "agentA"
    h.check()


def test_calls_are_forgotten_with_their_session() -> None:
    h = Harness()
    first = h.turn("u1", "call", calls=("c1",))
    before = h.directory.size_bytes
    h.turn("u1", "call", "r1", "a2", named="s1", calls=())
    assert h.directory.size_bytes > before
    h.directory.close(first.session)
    assert not h.directory._lineages.calls
    assert h.begin("u1", "call", "r1", calls=("c1",)).session is not first.session


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


@given(st.lists(st.sampled_from("ab"), max_size=8), st.lists(st.sampled_from("ab"), max_size=8))
def test_common_prefix_equals_the_plain_loop(left: list[str], right: list[str]) -> None:
    plain = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    expected = min(len(left), len(right)) if plain is None else plain
    assert common(keys_of(left), keys_of(right)) == expected


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
