"""Weights of a session's own blocks: at most 1, falling, and the same as a plain reading of the ranges."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiering.policy.base import Span
from tiering.retention import UNNAMED_PRIORITY, runs_of, weight_at

SPANS = st.lists(
    st.builds(
        lambda start, length, priority: Span(start, None if length is None else start + length, priority),
        st.integers(0, 100),
        st.none() | st.integers(1, 60),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=6,
).map(tuple)


def test_nothing_said_weighs_nothing_down() -> None:
    assert runs_of(None, 10, 16) == ()
    assert weight_at((), 7) == 1.0
    assert runs_of(0.5, 0, 16) == ()


def test_a_share_keeps_the_beginning() -> None:
    assert runs_of(0.5, 9, 16) == ((5, 1.0), (9, 0.0))
    assert runs_of(1.0, 9, 16) == ((9, 1.0),)
    assert runs_of(0.0, 9, 16) == ((9, 0.0),)
    assert runs_of(1e-9, 9, 16) == ((1, 1.0), (9, 0.0))


def test_what_is_in_no_range_has_the_usual_priority() -> None:
    assert runs_of((Span(0, 32, 100),), 4, 16) == ((2, 1.0), (4, UNNAMED_PRIORITY / 100))
    assert runs_of((Span(32, None, 0),), 4, 16) == ((2, 1.0), (4, 0.0))


def test_the_head_is_worth_what_hangs_on_it() -> None:
    assert runs_of((Span(0, 32, 1), Span(32, 64, 80)), 6, 16) == ((4, 1.0), (6, UNNAMED_PRIORITY / 80))


def test_a_block_is_in_a_range_if_one_of_its_tokens_is() -> None:
    assert runs_of((Span(0, 33, 70), Span(33, None, 7)), 4, 16) == ((3, 1.0), (4, 0.1))


def test_priorities_compare_a_sessions_blocks_with_each_other_alone() -> None:
    assert runs_of((Span(0, None, 100),), 4, 16) == runs_of((Span(0, None, 1),), 4, 16) == ((4, 1.0),)
    assert runs_of((Span(0, None, 0),), 4, 16) == ((4, 0.0),)  # none of it is worth keeping


@given(SPANS, st.integers(1, 40), st.integers(1, 8))
def test_weights_are_those_of_the_plain_reading(spans: tuple[Span, ...], blocks: int, size: int) -> None:
    def wanted(block: int) -> int:
        tokens = range(block * size, (block + 1) * size)
        hits = [
            span.priority
            for span in spans
            if any(span.start <= token < (math.inf if span.end is None else span.end) for token in tokens)
        ]
        return max(hits, default=UNNAMED_PRIORITY)

    runs = runs_of(spans, blocks, size)
    own = [wanted(block) for block in range(blocks)]
    most = max(own)
    for block in range(blocks):
        expected = max(own[block:]) / most if most else 0.0
        assert weight_at(runs, block) == expected
    weights = [weight for _, weight in runs]
    assert weights == sorted(weights, reverse=True)
    assert all(0 <= weight <= 1 for weight in weights)
    assert runs[-1][0] == blocks
    assert weight_at(runs, blocks + 5) == weights[-1]
