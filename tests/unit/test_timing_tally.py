"""Counting what a step consists of: by windows, by shared prefixes, and one by one as at once."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.plan import Chunk, PageCopy, SampleSpec
from agentserve.core.timing.features import pairs
from agentserve.core.timing.tally import EVERYTHING, Attention, Tally, load_of, shared_tokens
from agentserve.types import KVGroup, Sampling, SessionId, TurnId

GREEDY = Sampling(temperature=0.0)
WINDOW = 10
GROUPS = (KVGroup("full", (0,), 400), KVGroup("window", (1, 2, 3), 800, window=WINDOW))
MIXED = Attention(GROUPS, page_size=4)


def chunk(start: int, count: int, pages: list[int], sampling: Sampling | None = GREEDY) -> Chunk:
    tokens = array("i", range(count))
    sample = SampleSpec(sampling, tokens, count, count) if sampling is not None else None
    return Chunk(SessionId("s"), TurnId(1), 0, start, tokens, (array("i", pages),) * 2, sample)


@given(st.integers(0, 60), st.integers(1, 60))
def test_a_window_is_counted_token_by_token(start: int, count: int) -> None:
    """A quarter of the layers sees everything, three quarters the last tokens."""
    positions = range(start, start + count)
    seen = sum(0.25 * (p + 1) + 0.75 * min(p + 1, WINDOW) for p in positions)
    assert MIXED.pairs(start, count) == pytest.approx(seen)
    first = max(0, start + 1 - WINDOW)
    assert MIXED.reach(start, count) == pytest.approx(0.25 * (start + count) + 0.75 * (start + count - first))
    assert MIXED.seen(start + 1) == pytest.approx(MIXED.pairs(start, 1))
    assert EVERYTHING.pairs(start, count) == pairs(start, count) == sum(p + 1 for p in positions)


def test_copies_count_by_the_bytes_of_their_group() -> None:
    tally = Tally(MIXED)
    tally.copy([PageCopy(0, 1, 2, 3), PageCopy(1, 1, 2, 3)])
    assert tally.load().copies == 2
    assert tally.load().copied == 3 * 400 / 4 + 3 * 800 / 4


def test_rows_are_counted_by_how_their_token_is_picked() -> None:
    load = load_of(
        [
            chunk(8, 1, [1, 2, 3]),
            chunk(8, 1, [4, 5, 6], Sampling(temperature=0.7)),
            chunk(0, 8, [7, 8], None),
            chunk(0, 5, [9, 10], Sampling(temperature=0.0, grammar="g")),
        ],
        [],
        EVERYTHING,
    )
    assert (load.decodes, load.chunks, load.tokens, load.rows) == (2, 2, 13, 15)
    assert (load.samples, load.drawn, load.masked) == (3, 1, 1)
    assert (load.context, load.read) == (18, 18)
    assert load.pairs == pairs(0, 8) + pairs(0, 5)
    assert load.reach == 13


def test_a_prefix_that_decodes_share_is_read_once() -> None:
    rows = [chunk(10, 1, [1, 2, 3]), chunk(11, 1, [1, 2, 4]), chunk(9, 1, [1, 2, 5]), chunk(9, 1, [6, 7, 8])]
    load = load_of(rows, [], Attention((KVGroup("full", (0,), 1), KVGroup("second", (1,), 1)), page_size=4))
    assert load.context == 11 + 12 + 10 + 10
    assert load.read == load.context - 2 * 8
    mixed = load_of(rows, [], MIXED)
    assert mixed.context - mixed.read == 0.25 * 2 * 8, "layers with a window share nothing that counts"


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(1, 16)),
        min_size=1,
        max_size=6,
    )
)
def test_no_more_is_shared_than_rows_have_in_common(rows: list[tuple[list[int], int]]) -> None:
    tables = [(array("i", pages), length) for pages, length in rows]
    saved = shared_tokens(tables, 4)
    distinct: dict[tuple[int, ...], int] = {}
    for pages, length in rows:  # tokens that must be read at least: of every distinct prefix the longest
        for block in range(-(-length // 4)):
            key = tuple(pages[: block + 1])
            distinct[key] = max(distinct.get(key, 0), min(4, length - 4 * block))
    total = sum(length for _, length in rows)
    assert 0 <= saved <= total - sum(distinct.values())


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 90)), max_size=8))
def test_one_by_one_is_as_at_once(shape: list[tuple[int, int]]) -> None:
    tally = Tally(MIXED)
    for start, count in shape[:-1]:
        tally.chunk(start, count, None)
    if not shape:
        return
    start, count = shape[-1]
    ahead = tally.with_chunk(start, count, GREEDY)
    tally.chunk(start, count, GREEDY)
    assert tally.load() == ahead
    assert (ahead.decodes + ahead.chunks, ahead.rows) == (len(shape), sum(count for _, count in shape))
