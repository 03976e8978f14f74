"""The session directory: identity and lineage."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.sessions.session_record import common
from agentserve.types import SessionState
from tests.directory_rig import Harness, keys_of


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


@given(st.lists(st.sampled_from("ab"), max_size=8), st.lists(st.sampled_from("ab"), max_size=8))
def test_common_prefix_equals_the_plain_loop(left: list[str], right: list[str]) -> None:
    plain = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    expected = min(len(left), len(right)) if plain is None else plain
    assert common(keys_of(left), keys_of(right)) == expected
