"""Hints: every field is answered, hostile values are rejected, nothing ever raises."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.hints import FIELDS, MOST_FIELDS, MOST_SECONDS, Receipt, Status, receive
from tiering.policy.base import Hints

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
    assert hints.retain is None or 0 <= hints.retain <= 1
    assert all(r.reason for r in receipts.values() if r.status is not Status.ACCEPTED)
