"""Forks, exclusive leases and expiry in the session directory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.sessions.directory import DirectoryFull
from agentserve.types import SessionState, TurnId
from tests.directory_rig import Harness, keys_of


def check(h: Harness) -> None:
    """The books agree; calls of a fork are found at the session that made them, if that is still there."""
    directory = h.directory
    sessions = list(directory._sessions.values())
    assert directory.size_bytes == sum(session.cost for session in sessions)
    points = {(s.tenant, point, s.key) for s in sessions for point in s.points}
    assert points == {(t, p, key) for (t, p), names in directory._lineages.points.items() for key in names}
    for (_, call), key in directory._lineages.calls.items():
        assert call in directory._sessions[key].issued
    cut = Counter((s.tenant, call) for s in sessions for call, runs in s.issued.items() if not runs)
    assert cut == directory._lineages.cut
    waiting = {s.key for s in sessions if s.state is SessionState.WAITING_TOOL and s.running is None}
    assert waiting == directory._waits.keys()


def test_only_the_next_turn_of_this_very_session_is_leased() -> None:
    h = Harness()
    first = h.turn("u", "a")
    session = first.session
    assert h.directory.extend(session, keys_of(["u", "a"]), 9.0) is None  # nothing new
    assert h.directory.extend(session, keys_of(["u", "b", "t"]), 9.0) is None
    lease = h.directory.extend(session, keys_of(["u", "a", "t"]), 9.0)
    assert lease is not None
    assert (lease.session, lease.turn, lease.spliced) == (session, 2, session.replies)
    assert h.directory.extend(session, keys_of(["u", "a", "t"]), 9.0) is None  # one runs
    h.commit(lease, "u", "a", "t", "b")
    h.directory.close(session)
    assert h.directory.extend(session, keys_of(["u", "a", "t", "b", "u"]), 9.0) is None
    check(h)


def test_a_fork_has_what_its_parent_had_there() -> None:
    h = Harness()
    h.turn("u", "a")
    parent = h.turn("u", "a", "v", "b", calls=("c1", "c2")).session
    late = h.directory.fork(parent, 4, list(parent.pending.values()), 9.0)
    assert (late.chain, late.length, late.committed) == (parent.chain, parent.length, 2)
    assert (late.replies, late.family, late.parent) == (parent.replies, late.key, parent.public_id)
    assert list(late.pending) == ["c1", "c2"]
    assert late.state is SessionState.WAITING_TOOL
    early = h.directory.fork(parent, 2, [], 9.0)
    assert (early.chain, early.length, early.committed) == (parent.chain[:2], 20, 1)
    assert (list(early.replies), early.state) == ([1], SessionState.IDLE)
    for messages in (-1, 0, 1, 3, 5):
        with pytest.raises(ValueError):
            h.directory.fork(parent, messages, [], 9.0)
    check(h)


def test_a_fork_that_gets_its_results_leaves_its_parent_waiting() -> None:
    h = Harness()
    parent = h.turn("u", "a", calls=("c",)).session
    child = h.directory.fork(parent, 2, list(parent.pending.values()), 9.0)
    h.turn("u", "a", "t", "b", named=child.public_id, calls=())
    assert (child.pending, list(parent.pending)) == ({}, ["c"])
    assert parent.state is SessionState.WAITING_TOOL
    h.directory.close(child)
    again = h.begin("u", "a", "t", calls=("c",))
    assert again.session is parent
    check(h)


def test_a_fork_outlives_its_parent() -> None:
    h = Harness()
    parent = h.turn("u", "a", calls=("c",)).session
    child = h.directory.fork(parent, 2, list(parent.pending.values()), 9.0)
    h.directory.close(parent)
    check(h)
    assert h.turn("u", "a", "t", "b", named=child.public_id).session is child
    h.directory.close(child)
    check(h)
    assert (h.directory.size_bytes, h.directory._lineages.calls) == (0, {})


def test_a_fork_never_puts_its_own_parent_out() -> None:
    h = Harness(max_sessions=2)
    parent = h.turn("u", "a").session
    other = h.turn("w", "b").session
    child = h.directory.fork(parent, 2, [], 9.0)
    assert h.directory.find(parent.key) is parent
    assert h.directory.find(other.key) is None
    busy = [h.begin("u", "a", "x", named=session.public_id) for session in (parent, child)]
    with pytest.raises(DirectoryFull):
        h.directory.fork(parent, 2, [], 9.0)
    assert all(h.directory.holds(lease) for lease in busy)
    check(h)


def test_a_rolled_back_first_turn_leaves_a_fork_as_it_was() -> None:
    h = Harness()
    parent = h.turn("u", "a", calls=("c",)).session
    child = h.directory.fork(parent, 2, list(parent.pending.values()), 9.0)
    lease = h.begin("u", "a", "t", named=child.public_id)
    assert not h.directory.rollback(lease, 10.0, "cancelled")
    assert (child.state, child.epoch, list(child.pending)) == (SessionState.WAITING_TOOL, 1, ["c"])
    check(h)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fork", ["never began", "rolled back", "is as far"])
def test_nobody_gets_into_a_fork_who_does_not_name_it(named: bool, fork: str) -> None:
    """A client whose connection broke sends its request again, and its session has the turn already: it
    gets a sibling of that session, though a fork rests where the request goes on."""
    h = Harness()
    parent = h.turn("u", "a", calls=("c",)).session
    child = h.directory.fork(parent, 2, list(parent.pending.values()), 9.0)
    told = ["u", "a", "t"]
    if fork == "rolled back":
        h.directory.rollback(h.begin(*told, named=child.public_id), 10.0, "cancelled")
    h.turn(*told, "b", named=parent.public_id)
    if fork == "is as far":  # and says the same
        h.turn(*told, "b", named=child.public_id)
        told += ["b", "v"]
        h.turn(*told, "d", named=parent.public_id)
    who = {"named": parent.public_id} if named else {"past": ("c",)}
    again = h.begin(*told, **who)
    assert again.opened
    assert again.copied_from is parent
    assert child.running is None
    mine = h.begin(*told, named=child.public_id)
    assert (mine.session, again.session.family) == (child, parent.family)
    check(h)


def test_without_a_name_or_a_call_a_fork_is_not_found() -> None:
    h = Harness()
    parent = h.turn("u", "a").session
    child = h.directory.fork(parent, 2, [], 9.0)
    h.turn("u", "a", "v", "b", named=child.public_id)
    assert h.begin("u", "a", "v", "b", "w").session is parent
    sibling = h.begin("u", "a", "x", named=child.public_id)
    assert sibling.copied_from is child
    assert sibling.session.family == child.key
    check(h)


def test_who_is_idle_for_too_long_is_forgotten() -> None:
    h = Harness()
    old, runs, waits = (
        h.turn("u", "a").session,
        h.turn("v", "b").session,
        h.turn("w", "c", calls=("c",)).session,
    )
    h.begin("v", "b", "x")
    fresh = h.turn("x", "d").session
    h.directory.expire(fresh.active + 1, fresh.active + 1 - waits.active)
    assert [h.directory.find(s.key) is None for s in (old, runs, waits, fresh)] == [True, False, False, False]
    assert h.directory.take_evicted() == [old.key]
    check(h)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["turn", "call", "answer", "fork", "close", "undo"]), st.integers(0, 9)),
        max_size=40,
    )
)
def test_random_families_keep_their_books(steps: list[tuple[str, int]]) -> None:
    h = Harness(max_sessions=6)
    said: dict[str, list[str]] = {}  # public id -> messages
    for number, (what, which) in enumerate(steps):
        known = {name: said[name] for name in said if h.directory.get("t", name)}
        if not known or (what == "turn" and which == 0):
            lease = h.turn(f"u{number}", f"a{number}")
            said[lease.session.public_id] = [f"u{number}", f"a{number}"]
            continue
        name = sorted(known)[which % len(known)]
        session = h.directory.get("t", name)
        assert session is not None
        messages = [*known[name], f"u{number}", f"a{number}"]
        if what == "fork":
            pending = list(session.pending.values())
            child = h.directory.fork(session, len(known[name]), pending, h.now)
            said[child.public_id] = known[name]
        elif what == "close":
            h.directory.close(session)
        elif what == "undo":
            lease = h.directory.extend(session, keys_of(messages[:-1]), h.now)
            assert lease is not None
            h.directory.rollback(lease, h.now, "undone")
        else:
            calls = (f"c{number}",) if what == "call" else ()
            lease = h.begin(*messages[:-1], named=name, calls=tuple(session.pending))
            assert lease.session is session  # named, at its tip and at rest: nobody else's
            assert h.commit(lease, *messages, calls=calls)
            said[name] = messages
            assert session.last_turn == lease.turn >= TurnId(1)
        check(h)
