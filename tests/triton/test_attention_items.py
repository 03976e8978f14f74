"""How attention is cut into items: every token meets every segment that it sees, once, in its own pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops import Span
from kernels.triton.attention_items import ENTRY, HEADER, ITEM, PARTS, Cut, Plan, blocks_of, plan

SEGMENT, SLOTS = 32, 16


def sections(found: Plan, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Items, entries, parts of rows and tables of a plan."""
    packed, head = found.packed, found.packed[:HEADER]
    count, items, entries, parts, tables, columns = head[:6].tolist()
    assert count == found.items
    return (
        packed[items : items + count * ITEM].reshape(-1, ITEM),
        packed[entries:tables].reshape(-1, ENTRY),
        packed[parts : parts + rows * PARTS].reshape(-1, PARTS),
        packed[tables:].reshape(-1, columns) if columns else packed[tables:].reshape(0, 0),
    )


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 150), st.booleans()), max_size=8),
    tokens=st.integers(1, 5),
    window=st.sampled_from([None, 1, 20, 64]),
    partials=st.sampled_from([0, 6, 30, 10_000]),
    kv_heads=st.sampled_from([1, 256]),
)
def test_each_token_meets_its_segments_once_in_its_own_pages(
    lengths: list[tuple[int, int, bool]], tokens: int, window: int | None, partials: int, kv_heads: int
) -> None:
    spans, row = [], 0
    for count, position, _ in lengths:
        spans.append(Span(row, count, position))
        row += count
    tables = np.arange(len(spans) * 10, dtype=np.int64).reshape(-1, 10)
    for number, (_, _, shared) in enumerate(lengths):
        if shared:
            tables[number, :5] = 1000 + np.arange(5)
    found = plan(
        blocks_of(spans, tokens), tables, row, Cut(tokens, SEGMENT, SLOTS, kv_heads, window, partials)
    )
    assert found.partials <= partials
    items, entries, parts, kept = sections(found, row)
    assert np.array_equal(kept, tables)
    seen: dict[int, list[tuple[int, int, int]]] = {}  # of a row: segments and where their part goes
    for first, count, table, begin, end, low, high, _ in items.tolist():
        assert 1 <= count <= tokens
        for at, position, partial, _ in entries[first : first + count].tolist():
            seen.setdefault(at, []).append((begin, end, partial))
            own = next(i for i, span in enumerate(spans) if span.row <= at < span.row + span.rows)
            assert position == spans[own].position + at - spans[own].row
            oldest = 0 if window is None else max(0, position - window + 1)
            keys = range(max(oldest, begin * SEGMENT), min(position + 1, end * SEGMENT))
            assert not keys or (low <= keys[0] and keys[-1] < high)
            pages = {key // SLOTS for key in keys}
            assert all(tables[table, page] == tables[own, page] for page in pages)
    used = []
    for span in spans:
        for at in range(span.row, span.row + span.rows):
            position = span.position + at - span.row
            met = sorted(seen[at])
            first, count = parts[at].tolist()
            assert met[0][0] * SEGMENT <= (0 if window is None else max(0, position - window + 1))
            assert met[-1][1] * SEGMENT > position
            assert all(a[1] == b[0] for a, b in pairwise(met))
            if met[0][2] < 0:
                assert (len(met), count) == (1, 0)
                continue
            assert [part for _, _, part in met] == list(range(first, first + count))
            assert all(end == begin + 1 for begin, end, _ in met)
            used.extend(range(first, first + count))
    assert sorted(used) == list(range(found.partials))


def test_rows_with_the_same_pages_share_items_and_others_do_not() -> None:
    same = np.arange(8, dtype=np.int64)
    other = same.copy()
    other[3] = 99  # the second segment is its own
    tables = np.stack((same, same, other, same))
    spans = [Span(i, 1, position) for i, position in enumerate((127, 100, 127, 95))]
    found = plan(blocks_of(spans, 8), tables, 4, Cut(8, SEGMENT, SLOTS, 1, None, 100))
    items, entries, _, _ = sections(found, 4)
    rows = {(int(item[3]), *sorted(entries[item[0] : item[0] + item[1], 0].tolist())) for item in items}
    # Row 1 sees a part of segment 3 only, and the last of row 3 is whole.
    assert rows == {(0, 0, 1, 2, 3), (1, 0, 1, 3), (1, 2), (2, 0, 1, 2, 3), (3, 0, 2), (3, 1)}
    assert found.shared_keys == SEGMENT * (3 + 2 + 3 + 1)


def test_segments_that_pages_do_not_fill_are_not_shared() -> None:
    tables = np.zeros((2, 4), dtype=np.int64) + np.arange(4)
    spans = [Span(0, 1, 90), Span(1, 1, 90)]
    found = plan(blocks_of(spans, 8), tables, 2, Cut(8, SEGMENT, 24, 1, None, 100))
    assert (found.items, found.shared_keys) == (6, 0)
