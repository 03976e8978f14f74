"""Prices follow what is measured, whatever is measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.prices import PriceBook, PriceSettings, eliminate, starting_prices
from tiering.types import Move

START = starting_prices(65536, 16)


def test_start_values_are_the_prices_until_something_is_measured() -> None:
    assert PriceBook(START).prices() == START
    assert START.load == (1e-4, 65536 / 4e9)


def test_a_move_is_learned_as_fixed_and_per_block() -> None:
    book = PriceBook(START)
    for i in range(400):
        blocks = 1 + i * 7 % 64
        book.moved(Move.FETCH, blocks, 0.002 + 0.0005 * blocks)
    fixed, per_block = book.prices().fetch
    assert fixed == pytest.approx(0.002, rel=0.02)
    assert per_block == pytest.approx(0.0005, rel=0.02)
    assert book.prices().load == START.load  # each move has a price of its own


def test_moves_of_one_size_alone_are_priced_right_at_that_size() -> None:
    book = PriceBook(START)
    for _ in range(400):
        book.moved(Move.LOAD, 10, 0.03)
    prices = book.prices()
    assert prices.seconds(prices.load, 10) == pytest.approx(0.03, rel=0.02)


def test_one_stalled_copy_moves_a_price_little_and_a_lasting_change_moves_it_all() -> None:
    book = PriceBook(START)
    for i in range(200):
        book.moved(Move.SAVE, 1 + i % 32, 0.001 * (1 + i % 32))
    before = book.prices().seconds(book.prices().save, 16)
    book.moved(Move.SAVE, 16, 30.0)
    after = book.prices().seconds(book.prices().save, 16)
    assert before == pytest.approx(0.016, rel=0.02)
    assert after < 1.1 * before
    for i in range(600):
        book.moved(Move.SAVE, 1 + i % 32, 0.1 * (1 + i % 32))
    assert book.prices().seconds(book.prices().save, 16) == pytest.approx(1.6, rel=0.05)


def test_prefill_is_learned_by_length_and_position() -> None:
    book = PriceBook(START)
    true = (0.01, 2e-4, 3e-8)
    for i in range(600):
        start, count = 512 * (i % 9), 32 + 37 * (i % 13)
        pairs = count * start + count * (count + 1) // 2
        book.stepped([(start, count)], true[0] + true[1] * count + true[2] * pairs)
    prices = book.prices()
    expected = true[0] + true[1] * 512 + true[2] * (512 * 2048 + 512 * 513 // 2)
    assert prices.recompute(2048, 512) == pytest.approx(expected, rel=0.02)
    assert prices.prefill == pytest.approx(true, rel=0.2)


def test_steps_of_single_tokens_say_nothing_about_prefill() -> None:
    book = PriceBook(START)
    for _ in range(50):
        book.stepped([(1000, 1)] * 8, 5.0)
        book.stepped([(1000, 1)] * 64, 5.0)
        book.stepped([], 5.0)
    assert book.prices().prefill == START.prefill
    book.stepped([(1000, 1)] * 8 + [(0, 16)], 5.0)
    assert book.prices().prefill != START.prefill


def test_dropping_has_no_price_and_no_blocks_say_nothing() -> None:
    book = PriceBook(START)
    book.moved(Move.DROP, 5, 1.0)
    book.moved(Move.LOAD, 0, 1.0)
    book.moved(Move.LOAD, -3, 1.0)
    assert book.prices() == START


MEASURED = st.tuples(
    st.sampled_from(list(Move)),
    st.integers(-2, 10_000),
    st.one_of(st.floats(), st.floats(0, 100)),
)


@settings(deadline=None)
@given(st.lists(MEASURED, max_size=60))
def test_prices_are_finite_and_never_negative(measured: list[tuple[Move, int, float]]) -> None:
    book = PriceBook(START)
    for move, blocks, seconds in measured:
        book.moved(move, blocks, seconds)
        book.stepped([(blocks, 64), (-1, 5)], seconds)
    prices = book.prices()
    for line in (prices.save, prices.load, prices.write, prices.fetch, prices.prefill):
        assert all(math.isfinite(value) and value >= 0 for value in line)
    assert prices.seconds(prices.load, 8) <= prices.seconds(prices.load, 9)
    assert prices.recompute(0, 100) <= prices.recompute(0, 101) <= prices.recompute(50, 101)


def test_a_linear_system() -> None:
    assert eliminate([[0.0, 2.0, 4.0], [3.0, 0.0, 9.0]]) == [3.0, 2.0]
    assert eliminate([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) is None


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="outlier"):
        PriceBook(START, PriceSettings(outlier=1.0))
    with pytest.raises(ValueError, match="positive"):
        starting_prices(0, 16)


def test_what_computing_costs_may_be_told() -> None:
    """By whoever knows how long steps take: from then on steps teach nothing, moves do."""
    book = PriceBook(START)
    book.predicted((0.1, 0.02, 0.003))
    book.stepped([(0, 64)], 9.0)
    book.moved(Move.LOAD, 10, 1.0)
    prices = book.prices()
    assert prices.prefill == (0.1, 0.02, 0.003)
    assert prices.load != START.load
    assert prices.recompute(10, 2) == pytest.approx(0.1 + 0.04 + 0.003 * (20 + 3))
