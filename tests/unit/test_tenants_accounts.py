"""Limits: buckets, accounts, what is refused and what it costs, in a time that the tests say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.server.tenants.accounts import Accounts, OverLimit
from agentserve.server.tenants.buckets import Bucket
from agentserve.tenant_limits import TenantLimits, TenantsConfig


class Time:
    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def accounts(time: Time | None = None, **limits: int) -> Accounts:
    return Accounts(TenantsConfig(TenantLimits(**limits)), time or Time())


def test_a_bucket_fills_evenly_and_never_over() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert (bucket.level(0.0), bucket.wait(1, 0.0)) == (0.0, 1.0)
    assert bucket.level(10.0) == pytest.approx(10)
    bucket.take(20, 10.0)  # more than there is
    assert bucket.wait(1, 10.0) == pytest.approx(11)
    assert bucket.full_in(10.0) == pytest.approx(70)
    assert bucket.level(10_000.0) == 60
    assert bucket.level(5_000.0) == 60  # a clock that goes back takes and gives nothing


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=40))
def test_no_more_is_taken_than_there_was(per_minute: int, steps: list[tuple[float, int]]) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for seconds, count in steps:
        now += seconds
        if not (wait := bucket.wait(count, now)):
            bucket.take(count, now)
            taken += count
        elif count <= per_minute:
            now += wait
            assert bucket.wait(count, now) < 1e-6  # it is as long as it says
        assert taken <= per_minute * (1 + now / 60) + 1e-6


def test_requests_per_minute() -> None:
    time = Time()
    book = accounts(time, requests_per_minute=2)
    book.request("a")
    book.request("a")
    with pytest.raises(OverLimit) as refused:
        book.request("a")
    assert (refused.value.limit, refused.value.wait) == ("requests", 30)
    book.request("b")  # nobody else's
    for _ in range(5):  # what is refused costs nothing
        with pytest.raises(OverLimit):
            book.request("a")
    time.at += 30
    book.request("a")
    assert (book.tallies["a"].requests, book.tallies["a"].refused) == (9, 6)


def test_tokens_are_paid_for_afterwards() -> None:
    time = Time()
    book = accounts(time, tokens_per_minute=600)
    book.check_turn("a")
    book.spent("a", 500, 0)
    book.check_turn("a")
    book.spent("a", 0, 400)
    with pytest.raises(OverLimit) as refused:
        book.check_turn("a")
    assert (refused.value.limit, refused.value.wait) == ("tokens", 31)
    book.check_turn("b")
    time.at += 31
    book.check_turn("a")
    (standing,) = book.standings("a")
    assert (standing.of, standing.limit, standing.remaining) == ("tokens", 600, 10)
    assert standing.reset == pytest.approx(59)


def test_turns_at_once_are_all_or_none() -> None:
    book = accounts(concurrent_turns=3)
    book.begin("a", 2)
    with pytest.raises(OverLimit) as refused:
        book.begin("a", 2)
    assert refused.value.limit == "turns"
    book.check_turn("a")
    book.begin("a", 1)
    with pytest.raises(OverLimit):
        book.check_turn("a")
    book.begin("b", 3)
    book.end("a", 3)
    book.begin("a", 3)


def test_without_limits_nothing_is_refused_or_told() -> None:
    book = accounts()
    for _ in range(100):
        book.request("a")
        book.check_turn("a")
        book.begin("a", 10)
        book.spent("a", 10**6, 10**6)
    assert book.standings("a") == []


def test_accounts_at_rest_are_forgotten_and_those_in_debt_are_not() -> None:
    time = Time()
    book = accounts(time, requests_per_minute=60, tokens_per_minute=60)
    book.begin("runs", 1)
    book.spent("owes", 10_000, 0)
    for i in range(5000):
        time.at += 1
        book.request(f"t{i}")
    assert len(book) < 2100
    with pytest.raises(OverLimit):
        book.check_turn("owes")
    book.end("runs", 1)
    time.at += 100_000
    book.check_turn("owes")


class Said:
    """Limits that an admin changes."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute

    def of(self, tenant: str) -> TenantLimits:
        return TenantLimits(requests_per_minute=self.per_minute, tokens_per_minute=self.per_minute)


@pytest.mark.parametrize(
    ("before", "spent", "after", "left"),
    [
        (50, 0, 600, 600),  # what is added is there at once
        (50, 50, 600, 550),  # what was spent stays spent
        (50, 80, 600, 520),
        (600, 0, 50, 50),
        (600, 20, 50, 30),
        (600, 600, 50, 0),  # no debts of what was within the old limit
        (600, 700, 50, -100),
        (600, 90, 600, 510),
    ],
)
def test_a_limit_that_changes(before: int, spent: int, after: int, left: int) -> None:
    said = Said(before)
    book = Accounts(said, Time())
    book.spent("a", spent, 0)
    said.per_minute = after
    _, tokens = book.standings("a")
    assert (tokens.limit, tokens.remaining) == (after, max(left, 0))
    assert tokens.reset == pytest.approx((after - left) * 60 / after)


def test_a_raised_limit_lets_in_who_had_spent_the_old_one() -> None:
    said = Said(50)
    book = Accounts(said, Time())
    for _ in range(50):
        book.request("a")
    with pytest.raises(OverLimit):
        book.request("a")
    said.per_minute = 600
    for _ in range(550):
        book.request("a")
    with pytest.raises(OverLimit):
        book.request("a")
