"""Hints: every field is answered, hostile values are rejected, nothing ever raises."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.hints import (
    AT_NEXT_REST,
    AT_TURNS_END,
    FIELDS,
    IF_IT_GOES_ON,
    MOST_FIELDS,
    MOST_SECONDS,
    Receipt,
    Said,
    Status,
    hear,
    receive,
)
from tiering.policy.base import Hints, Span

HOSTILE = [math.nan, math.inf, -math.inf, "5", b"5", [], {}, object(), 10**400, -(10**400), 1j, Decimal(5)]


def test_what_is_in_bounds_is_accepted_as_it_is() -> None:
    raw = {"expected_wait": 2.5, "deadline": 10, "priority": 1, "final": False, "retain": 0.5}
    hints, receipts = receive(raw, 100.0)
    assert hints == Hints(expected_wait=2.5, deadline=110.0, priority=1, final=False, retain=0.5)
    assert list(receipts) == list(raw)
    assert all(receipt.status is Status.ACCEPTED and not receipt.reason for receipt in receipts.values())
    assert receipts["deadline"].value == 10  # in the client's own terms
    assert receive({}, 5.0) == (Hints(), {})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("expected_wait", 1e300, MOST_SECONDS),
        ("deadline", 1e300, MOST_SECONDS),
        ("priority", 10**9, 2),
        ("priority", -(10**9), -2),
        ("retain", 7, 1.0),
    ],
)
def test_what_is_too_much_is_clipped_and_says_to_what(name: str, value: float, kept: float) -> None:
    hints, receipts = receive({name: value}, 0.0)
    assert receipts[name].status is Status.CLIPPED
    assert receipts[name].value == kept == getattr(hints, name)
    assert "must be" in receipts[name].reason


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_hostile_values_are_rejected(name: str, value: object) -> None:
    hints, receipts = receive({name: value}, 0.0)
    assert receipts[name].status is Status.REJECTED
    assert receipts[name].reason
    assert hints == Hints()


@pytest.mark.parametrize(
    ("name", "value"),
    [("expected_wait", -1.0), ("deadline", -0.1), ("retain", -1), ("priority", 0.5), ("priority", True),
     ("expected_wait", True), ("final", 1), ("final", "true"), ("colour", 3)],
)  # fmt: skip
def test_what_makes_no_sense_is_rejected(name: str, value: object) -> None:
    hints, receipts = receive({name: value}, 0.0)
    assert receipts[name].status is Status.REJECTED
    assert hints == Hints()


def test_null_takes_a_hint_back() -> None:
    hints, receipts = receive({"expected_wait": None}, 0.0)
    assert hints == Hints()
    assert receipts["expected_wait"] == Receipt(Status.ACCEPTED, None, "taken back")


def test_a_final_session_is_not_waited_for() -> None:
    hints, receipts = receive({"expected_wait": 3.0, "final": True, "deadline": 9.0}, 0.0)
    assert hints == Hints(final=True)
    assert [receipts[name].status for name in ("expected_wait", "deadline")] == [Status.DEFERRED] * 2
    assert receipts["final"].status is Status.ACCEPTED


def test_a_body_of_a_thousand_fields_is_answered_in_bounds() -> None:
    _, receipts = receive({"x" * 10_000 + str(i): i for i in range(1000)}, 0.0)
    assert len(receipts) <= MOST_FIELDS
    assert max(map(len, receipts)) <= 64


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), ANYTHING, max_size=8),
    st.floats(0, 1e9),
)
def test_whatever_is_said_hints_are_in_bounds(raw: dict[str, object], now: float) -> None:
    hints, receipts = receive(raw, now)
    assert set(receipts) == set(raw)
    assert hints.expected_wait is None or 0 <= hints.expected_wait <= MOST_SECONDS
    assert hints.deadline is None or now <= hints.deadline <= now + MOST_SECONDS
    assert -2 <= hints.priority <= 2
    assert hints.retain is None or isinstance(hints.retain, tuple) or 0 <= hints.retain <= 1
    assert all(r.reason for r in receipts.values() if r.status is not Status.ACCEPTED)


# --- how long what was said holds -------------------------------------------------------------


NOTHING = Said()


def said(raw: dict[str, object], now: float, before: Said = NOTHING, *, running: bool = False) -> Said:
    return hear(before, raw, now, running=running).said


def test_a_wait_that_was_said_counts_down_and_is_over_with_the_next_turn() -> None:
    told = said({"expected_wait": 10, "deadline": 60, "priority": 1}, 100.0)
    assert told.hints(100.0) == Hints(expected_wait=10.0, deadline=160.0, priority=1)
    assert told.hints(104.0).expected_wait == 6.0  # a second park in the same wait: what is left of it
    assert told.hints(111.0).expected_wait is None  # it was wrong
    assert told.completed(120.0).hints(120.0) == Hints(priority=1)


def test_what_is_said_while_a_turn_runs_is_about_the_wait_after_it() -> None:
    before = said({"expected_wait": 3, "deadline": 5}, 90.0)
    heard = hear(
        before, {"expected_wait": 10, "deadline": 60, "priority": 9, "final": False}, 100.0, running=True
    )
    assert {name: r.status for name, r in heard.receipts.items()} == {
        "expected_wait": Status.DEFERRED, "deadline": Status.DEFERRED, "priority": Status.CLIPPED,
        "final": Status.DEFERRED,
    }  # fmt: skip
    assert all(receipt.reason.endswith(AT_TURNS_END) for receipt in heard.receipts.values())
    after = heard.said.completed(130.0)
    assert after.hints(130.0) == Hints(expected_wait=10.0, deadline=160.0, priority=2)
    assert after.hints(135.0).expected_wait == 5.0
    assert after.completed(140.0).hints(140.0) == Hints(priority=2)


def test_a_turn_that_came_to_nothing_leaves_the_wait_before_it() -> None:
    before = said({"expected_wait": 20, "deadline": 50}, 100.0)
    assert before.rolled_back(105.0).hints(105.0) == Hints(expected_wait=15.0, deadline=150.0)
    meanwhile = said({"expected_wait": 2}, 103.0, before, running=True)
    assert meanwhile.rolled_back(105.0).hints(105.0) == Hints(expected_wait=2.0, deadline=150.0)
    assert meanwhile.rolled_back(105.0).completed(110.0).hints(110.0) == Hints()
    last = said({"final": True}, 103.0, before, running=True)
    assert not last.final
    assert last.rolled_back(105.0).final


def test_fields_that_are_not_named_stay_and_null_takes_them_back() -> None:
    told = said({"priority": 2, "retain": 0.5, "expected_wait": 9}, 0.0)
    told = said({"retain": None}, 1.0, told)
    assert told.hints(1.0) == Hints(expected_wait=8.0, priority=2)
    told = said(
        {"priority": "high", "expected_wait": None}, 2.0, told
    )  # rejected: as if it had not been said
    assert told.hints(2.0) == Hints(priority=2)
    told = said({"expected_wait": 0, "priority": None}, 3.0, told)
    assert told.hints(3.0) == Hints(expected_wait=0.0)


def test_taking_back_while_a_turn_runs_reaches_the_wait_before_it_too() -> None:
    before = said({"expected_wait": 20, "final": True}, 100.0)
    back = said({"expected_wait": None, "final": False}, 101.0, before, running=True)
    assert back.rolled_back(102.0).hints(102.0) == Hints()
    assert back.completed(102.0).hints(102.0) == Hints()


def test_a_session_that_goes_on_after_all_gets_what_was_deferred() -> None:
    heard = hear(Said(), {"final": True, "expected_wait": 5}, 0.0)
    assert heard.receipts["expected_wait"] == Receipt(Status.DEFERRED, 5.0, IF_IT_GOES_ON)
    assert heard.said.hints(0.0) == Hints(final=True)
    assert heard.said.completed(50.0).hints(50.0) == Hints(expected_wait=5.0)
    later = hear(heard.said, {"deadline": 7}, 1.0)
    assert later.receipts["deadline"].status is Status.DEFERRED
    assert said({"final": None}, 2.0, later.said).hints(2.0) == Hints(expected_wait=3.0, deadline=8.0)


def test_final_while_a_turn_runs_is_of_its_end() -> None:
    told = said({"final": True}, 10.0, running=True)
    assert not told.final
    assert told.completed(11.0).final
    assert not told.completed(11.0).completed(20.0).final


def test_only_a_wait_that_was_said_just_now_is_news() -> None:
    heard = hear(Said(), {"expected_wait": 10}, 5.0)
    assert heard.news == Hints(expected_wait=10.0)
    again = hear(heard.said, {"priority": 1}, 6.0)
    assert again.news == Hints(priority=1)
    assert again.said.hints(6.0) == Hints(expected_wait=9.0, priority=1)


def test_where_no_worker_has_the_session_what_lasts_is_deferred() -> None:
    heard = hear(Said(), {"priority": 1, "retain": 9, "deadline": 4, "priorty": 1}, 0.0, held=False)
    assert heard.receipts["priority"] == Receipt(Status.DEFERRED, 1, AT_NEXT_REST)
    assert heard.receipts["retain"].status is Status.CLIPPED
    assert heard.receipts["retain"].reason.endswith(AT_NEXT_REST)
    assert heard.receipts["deadline"].status is Status.ACCEPTED
    assert heard.receipts["priorty"].status is Status.REJECTED


# --- ranges -----------------------------------------------------------------------------------


def test_ranges_are_taken_as_they_are() -> None:
    raw = [
        {"start": 0, "end": 512, "priority": 100},
        {"start": 512, "end": None, "priority": 5.0},
        {"start": 9, "priority": 0},
    ]
    hints, receipts = receive({"retain": raw}, 0.0)
    spans = (Span(0, 512, 100), Span(512, None, 5), Span(9, None, 0))
    assert (hints.retain, receipts["retain"]) == (spans, Receipt(Status.ACCEPTED, spans))


@pytest.mark.parametrize(
    ("span", "kept", "why"),
    [
        ({"start": 0, "end": 10**30, "priority": 1}, Span(0, 2**31 - 1, 1), "end must be 0 to"),
        ({"start": 1, "priority": 10**9}, Span(1, None, 100), "priority must be 0 to 100"),
        ({"start": 1, "priority": -7}, Span(1, None, 0), "priority must be 0 to 100"),
        ({"start": 1, "priority": 3, "duration_ms": 5}, Span(1, None, 3), "alone"),
    ],
)
def test_a_range_that_is_too_much_is_clipped(span: dict[str, object], kept: Span, why: str) -> None:
    hints, receipts = receive({"retain": [span]}, 0.0)
    assert hints.retain == receipts["retain"].value == (kept,)
    assert receipts["retain"].status is Status.CLIPPED
    assert why in receipts["retain"].reason


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([], "1 to 16"),
        ([{"start": 0, "priority": 1}] * 17, "1 to 16"),
        ([5], "[0]"),
        ([{"start": 0, "priority": 1}, {"start": 5, "end": 5, "priority": 1}], "[1].end must be greater"),
        ([{"start": -1, "priority": 1}], "[0].start must not be negative"),
        ([{"start": 0}], "[0].priority"),
        ([{"start": True, "priority": 1}], "[0].start"),
        ([{"start": math.nan, "priority": 1}], "[0].start"),
        ([{"start": 0, "end": "9", "priority": 1}], "[0].end"),
        ([{"start": 0, "priority": math.inf}], "[0].priority"),
    ],
)
def test_ranges_that_make_no_sense_are_rejected_and_say_where(spans: list[object], why: str) -> None:
    hints, receipts = receive({"retain": spans}, 0.0)
    assert hints == Hints()
    assert receipts["retain"].status is Status.REJECTED
    assert why in receipts["retain"].reason
