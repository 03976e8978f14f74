"""Who is left behind: a session whose place another turn took, whose wait is over, whose client left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.sessions.departures import Left, why_left
from agentserve.server.sessions.session_record import Session
from agentserve.types import SessionState
from tests.directory_rig import Harness, keys_of
from tiering.hints import hear
from tiering.policy.base import Departure


def left(h: Harness) -> list[tuple[str, Departure]]:
    """Those that were left since, and still are."""
    found = h.directory.departures.take()
    sessions = [(each, h.directory.find(each.key)) for each in found]
    return [(each.key, each.why) for each, session in sessions if session and session.left is each.why]


def say(h: Harness, session: Session, **hints: object) -> None:
    heard = hear(session.said, hints, h.now, running=session.running is not None)
    h.directory.departures.hinted(session, heard.said, h.now)
    h.directory.departures.back(session, h.now)


# --- a turn elsewhere -------------------------------------------------------------------------


def test_a_history_that_was_made_shorter_leaves_the_old_one_behind() -> None:
    h = Harness()
    old = h.turn("sys", "u1", "a1", named="mine")
    h.turn("sys", "u1", "a1", "u2", "a2", named="mine")
    new = h.begin("sys", "summary", named="mine")
    assert left(h) == []  # the turn may still fail
    h.commit(new, "sys", "summary", "a")
    assert new.copied_from is old.session
    assert left(h) == [(old.key, Departure.COMPACTED)]
    again = h.begin("sys", "shorter still", named="mine")  # it is the compacted one that is replaced now
    h.commit(again, "sys", "shorter still", "b")
    assert left(h) == [(new.key, Departure.COMPACTED)]


def test_each_compaction_leaves_the_last_one_behind() -> None:
    h = Harness()
    h.turn("sys", "u1", "a1", "u2", "a2", named="mine")
    second = h.turn("sys", "summary", "a", named="mine")
    h.turn("sys", "summary", "a", "u", "b", named="mine")
    left(h)
    h.turn("sys", "summary of it", "c", named="mine")
    assert left(h) == [(second.key, Departure.COMPACTED)]


def test_a_changed_question_supersedes_the_branch_with_the_old_one() -> None:
    h = Harness()
    old = h.turn("u1", "a1", named="mine")
    h.turn("u1", "a1", "u2", "a2", named="mine")
    h.turn("u1", "a1", "u2 changed", "b2", named="mine")
    assert left(h) == [(old.key, Departure.SUPERSEDED)]


def test_calls_name_a_session_as_well_as_its_name_does() -> None:
    h = Harness()
    old = h.turn("u1", "call", calls=("c1",))
    h.turn("u1", "call", "r1", "a1", calls=())
    h.turn("u1", "call", "r1", "a1 changed", "u2", "b", past=("c1",))
    assert left(h) == [(old.key, Departure.SUPERSEDED)]


def test_a_history_without_a_name_may_be_of_two_clients() -> None:
    h = Harness()
    h.turn("sys", "u1", "a1", "u2", "a2")
    h.turn("sys", "u1", "a1", "u2 changed", "b2")
    h.turn("sys", "other", "c")
    assert left(h) == []


def test_subagents_leave_nobody_behind() -> None:
    h = Harness()
    main = h.turn("sys", "u1", "task", calls=("c1",), named="mine")
    one = h.begin("sys", "do this", named="mine")
    two = h.begin("sys", "do that", named="mine")
    h.commit(one, "sys", "do this", "done")
    h.commit(two, "sys", "do that", "done")
    h.turn("other sys", "title", "Title", named="mine")
    assert main.session.state is SessionState.WAITING_TOOL
    assert left(h) == []


def test_a_turn_that_fails_leaves_nobody_behind() -> None:
    h = Harness()
    old = h.turn("sys", "u1", "a1", "u2", "a2", named="mine")
    new = h.begin("sys", "summary", named="mine")
    h.directory.rollback(new, h.now, "failed", abandoned=True)
    assert left(h) == []
    assert old.session.left is None


def test_who_went_on_meanwhile_is_not_left() -> None:
    h = Harness()
    h.turn("sys", "u1", "a1", "u2", "a2", named="mine")
    new = h.begin("sys", "summary", named="mine")
    h.turn("sys", "u1", "a1", "u2", "a2", "u3", "a3", named="mine")
    h.commit(new, "sys", "summary", "a")
    assert left(h) == []


def test_choices_of_one_request_do_not_leave_each_other_behind() -> None:
    h = Harness()
    one = h.begin("u1", named="mine")
    two = h.directory.sibling(one.session, one.keys, h.now)
    h.commit(one, "u1", "a1")
    h.commit(two, "u1", "b1")
    assert left(h) == []


def test_results_in_a_sibling_supersede_the_one_that_asked() -> None:
    h = Harness()
    asked = h.turn("u1", "calls", calls=("c1", "c2"))
    one = h.begin("rewritten", "x", calls=("c1",))
    h.commit(one, "rewritten", "x", "a")
    assert left(h) == []  # it still waits for the other
    two = h.begin("rewritten", "x", "a", "y", calls=("c2",))
    h.commit(two, "rewritten", "x", "a", "y", "b")
    assert left(h) == [(asked.key, Departure.SUPERSEDED)]
    assert asked.session.heir == two.key


def test_whoever_goes_on_is_not_left_any_more() -> None:
    h = Harness()
    old = h.turn("u1", "a1", named="mine")
    h.turn("u1", "a1", "u2", "a2", named="mine")
    h.turn("u1", "a1", "u2 changed", "b2", named="mine")
    assert old.session.left is Departure.SUPERSEDED
    h.begin("u1", "a1", "u2", "a2", "u3", named="mine")
    assert old.session.left is None
    assert left(h) == []


def test_sessions_that_answer_each_others_calls_are_not_each_others_heirs() -> None:
    h = Harness()
    one = h.turn("a1", "a2", calls=("ca",), named="A").session
    other = h.turn("b1", "b2", calls=("cb",), named="B").session
    both = h.begin("a1", "a2", "r", named="A", calls=("ca", "cb"))
    h.commit(both, "a1", "a2", "r", "a4", calls=("ca2",))
    back = h.begin("b1", "b2", "r", named="B", calls=("ca2",))
    h.commit(back, "b1", "b2", "r", "b4")
    assert (one.heir, other.heir) == (None, None)
    other.heir, one.heir = one.key, other.key  # whoever may set them: a line has an end
    h.begin("a1", "zz", named="A")


def test_a_compaction_of_whoever_went_on_leaves_it_and_not_its_old_heir() -> None:
    h = Harness()
    old = h.turn("u1", "a1", named="mine")
    h.turn("u1", "a1", "u2", "a2", named="mine")
    heir = h.turn("u1", "a1", "u2 changed", "b2", named="mine")
    assert old.session.heir == heir.key
    h.turn("u1", "a1", "u2", "a2", "u3", "a3", named="mine")
    left(h)
    h.turn("u1", "a1", "u2", "a2", "u3 changed", "c3", named="mine")
    assert left(h) == [(old.key, Departure.SUPERSEDED)]


# --- waits, deadlines, clients that leave -----------------------------------------------------


def test_a_wait_that_is_over_is_abandoned_unless_its_result_came_just_then() -> None:
    h = Harness(max_wait=10)
    one = h.turn("u1", "call", calls=("c1",))
    h.now += 20
    late = h.begin("u1", "call", "r1", calls=("c1",))  # this very request finds the wait over
    assert late.session is one.session
    assert left(h) == []
    h.commit(late, "u1", "call", "r1", "a")
    assert left(h) == []


def test_a_deadline_that_passes_without_a_result_is_noted_once() -> None:
    h = Harness()
    lease = h.turn("u1", "call", calls=("c1",))
    say(h, lease.session, deadline=5)
    h.directory.end_deadlines(h.now + 4)
    assert left(h) == []
    for seconds in (5, 6, 7):
        h.directory.end_deadlines(h.now + seconds)
    assert left(h) == [(lease.key, Departure.ABANDONED)]
    assert lease.session.state is SessionState.WAITING_TOOL  # its result is still taken
    h.now += 10
    say(h, lease.session, priority=1)  # its client is there
    assert lease.session.left is None
    h.directory.end_deadlines(h.now)
    assert left(h) == []


def test_a_deadline_is_of_one_wait() -> None:
    h = Harness()
    lease = h.turn("u1", "call", calls=("c1",))
    say(h, lease.session, deadline=5)
    h.turn("u1", "call", "r1", "again", calls=("c2",))
    h.directory.end_deadlines(h.now + 100)
    assert left(h) == []


def test_who_leaves_in_mid_turn_is_abandoned_and_an_error_is_not() -> None:
    h = Harness()
    lease = h.turn("u1", "a1")
    for abandoned in (False, True):
        again = h.begin("u1", "a1", "u2")
        assert again.session is lease.session
        h.directory.rollback(again, h.now, "why", abandoned=abandoned)
        assert left(h) == ([(lease.key, Departure.ABANDONED)] if abandoned else [])


def test_final_ends_a_session_at_rest_at_once_and_a_running_one_with_its_turn() -> None:
    h = Harness()
    lease = h.turn("u1", "a1")
    say(h, lease.session, final=True)
    assert left(h) == [(lease.key, Departure.FINISHED)]
    going = h.begin("u1", "a1", "u2")
    say(h, lease.session, final=True)
    assert left(h) == []
    h.commit(going, "u1", "a1", "u2", "a2")
    assert left(h) == [(lease.key, Departure.FINISHED)]
    h.turn("u1", "a1", "u2", "a2", "u3", "a3")  # it was wrong, and is not believed for ever
    assert left(h) == []
    say(h, lease.session, final=True)
    say(h, lease.session, final=None)
    assert left(h) == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("s u a", "s u b", Departure.SUPERSEDED),
        ("s u a v b", "s x", Departure.COMPACTED),
        ("s u a v b", "s u x", Departure.COMPACTED),
        ("s u a v b", "s u a x", Departure.SUPERSEDED),
        ("s u a v b", "s u", Departure.COMPACTED),
        ("s u a v b", "t x", None),
        ("s u a v b", "s u a v b w", None),
        ("s u a", "s x y z w", Departure.SUPERSEDED),
    ],
)
def test_why(old: str, new: str, why: Departure | None) -> None:
    h = Harness()
    lease = h.turn(*old.split()[:3])
    if len(old.split()) > 3:
        h.turn(*old.split())
    assert why_left(lease.session, keys_of(new.split())) is why
    lease.session.running = lease.turn
    assert why_left(lease.session, keys_of(new.split())) is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["turn", "call", "answer", "fail", "leave", "compact", "edit", "final", "deadline", "wait"]
        ),
        st.integers(0, 7),
    ),
    max_size=25,
)


@given(STEPS)
def test_nobody_who_runs_is_left_and_all_who_are_left_were_told(steps: list[tuple[str, int]]) -> None:
    """Whatever happens: `left` is news exactly once, and is gone when the session goes on."""
    h = Harness(max_wait=30)
    histories: dict[str, list[str]] = {"a": ["sys", "u0"]}
    told: dict[str, Departure] = {}
    for number, (step, pick) in enumerate(steps):
        name = sorted(histories)[pick % len(histories)]
        past = histories[name]
        session = h.directory.get("t", name)
        match step:
            case "turn" | "call" | "answer" | "compact" | "edit":
                asked = {"compact": ["sys", f"sum{number}"], "edit": [*past[:-2], f"e{number}"]}.get(
                    step, [*past, f"u{number}"]
                )
                calls = tuple(session.pending) if session and step == "answer" else ()
                lease = h.begin(*asked, named=name, calls=calls)
                histories[name] = [*asked, f"a{number}"]
                h.commit(lease, *histories[name], calls=(f"c{number}",) if step == "call" else ())
            case "fail" | "leave":
                lease = h.begin(*past, f"u{number}", named=name)
                h.directory.rollback(lease, h.now, step, abandoned=step == "leave")
            case "final" | "deadline" if session is not None:
                say(h, session, **{step: True if step == "final" else pick})
            case _:
                h.now += 5 * pick
                h.directory.end_waits(h.now)
                h.directory.end_deadlines(h.now)
        for each in h.directory.departures.take():
            assert isinstance(each, Left)
            told[each.key] = each.why
        for known in h.directory.sessions("t"):
            if known.left is not None:
                assert known.running is None
                assert told[known.key] is known.left
        h.check()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=20))
def test_heirs_form_no_cycle_whoever_answers_whose_calls(steps: list[tuple[int, int, bool]]) -> None:
    h = Harness()
    histories = {name: [f"{name} asks", f"{name} calls"] for name in "ABC"}
    for name, history in histories.items():
        h.turn(*history, calls=(f"c{name}",), named=name)
    for number, (who, whose, edits) in enumerate(steps):
        one, other = "ABC"[who], "ABC"[whose]
        sessions = [h.directory.get("t", name) for name in (one, other)]
        calls = tuple(call for session in sessions if session for call in session.pending)
        past = histories[one]
        asked = [*past[:-1], f"e{number}"] if edits else [*past, f"r{number}"]
        lease = h.begin(*asked, named=one, calls=calls)
        histories[one] = [*asked, f"a{number}"]
        h.commit(lease, *histories[one], calls=(f"d{number}",))
        for session in h.directory.sessions("t"):
            line = [session.key]
            while session.heir is not None and (heir := h.directory.find(session.heir)) is not None:
                assert heir.key not in line
                line.append(heir.key)
                session = heir
        h.check()
