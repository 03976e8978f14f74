"""Attention in Triton's interpreter: the reference's values, and bits that are a token's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels.ops import AttentionShape, Span
from kernels.triton import attention_plan
from kernels.triton.attention import choice_for
from kernels.triton.attention_plan import DecodeLayout, TritonAttention
from tests.triton.attention_rig import SMALL, WIDE, Pool, expected, queries, run, tables_of

# The interpreter is slow: examples that fail are not made smaller.
_PHASES = (Phase.explicit, Phase.generate)
F32, F16, I8 = torch.float32, torch.float16, torch.int8


@pytest.mark.parametrize(
    ("step", "pages", "heads", "dim", "slots", "window", "tolerance"),
    [
        (F32, F32, (6, 2), 64, 32, None, 2e-6),
        (F32, F32, (7, 1), 80, 16, 37, 2e-6),
        (F32, I8, (3, 1), 96, 16, 21, 2e-6),
        (F32, F16, (1, 1), 256, 16, None, 2e-6),
        (F16, F16, (4, 1), 128, 128, None, 2e-3),
        (F16, F32, (2, 2), 64, 32, 50, 2e-3),
        (F16, I8, (3, 1), 64, 16, None, 2e-3),
    ],
)
def test_values_are_the_reference_ones(
    step: torch.dtype,
    pages: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    slots: int,
    window: int | None,
    tolerance: float,
) -> None:
    shape = AttentionShape(*heads, dim, slots, window)
    pool = Pool.of(shape, pages)
    spans = [Span(0, 1, 70), Span(1, 7, 30), Span(8, 1, 4), Span(9, 1, 70)]
    tables = [pool.sequence(shape, tokens, seed=tokens, step=step) for tokens in (71, 37, 5)]
    tables.append(tables[0])
    q = queries(shape, 10, step)
    choice = SMALL if slots > 16 else WIDE
    found = run(shape, spans, tables, q, pool.kv, choice)
    wanted = expected(shape, spans, tables, q, pool.kv)
    assert found.dtype == step
    torch.testing.assert_close(found.to(F32), wanted, rtol=0, atol=tolerance)


@settings(max_examples=5, deadline=None, phases=_PHASES)
@given(
    tokens=st.integers(2, 75),
    cut=st.data(),
    window=st.sampled_from([None, None, 19, 33]),
    group=st.sampled_from([1, 3, 4]),
    kind=st.sampled_from([(F32, F32), (F16, F16), (F16, I8)]),
)
def test_chunks_are_the_whole_are_single_tokens(
    tokens: int, cut: st.DataObject, window: int | None, group: int, kind: tuple[torch.dtype, torch.dtype]
) -> None:
    step, pages = kind
    shape = AttentionShape(group, 1, 16, 16, window)
    pool = Pool.of(shape, pages)
    table = pool.sequence(shape, tokens, seed=1, step=step)
    q = queries(shape, tokens, step)
    whole = run(shape, [Span(0, tokens, 0)], [table], q, pool.kv)
    torch.testing.assert_close(
        whole.to(F32),
        expected(shape, [Span(0, tokens, 0)], [table], q, pool.kv),
        rtol=0,
        atol=2e-6 if step == F32 else 4e-3,
    )
    at = cut.draw(st.integers(1, tokens - 1))
    parts = [Span(0, at, 0), Span(at, tokens - at, at)]
    assert torch.equal(run(shape, parts, [table] * 2, q, pool.kv), whole)
    rows = cut.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=4, unique=True))
    singles = [Span(i, 1, row) for i, row in enumerate(rows)]
    assert torch.equal(run(shape, singles, [table] * len(rows), q[rows], pool.kv), whole[rows])


@settings(max_examples=4, deadline=None, phases=_PHASES)
@given(
    shared=st.integers(1, 6),
    tails=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    window=st.sampled_from([None, 70]),
    pages=st.sampled_from([F32, I8]),
)
def test_shared_pages_are_read_once_and_change_nothing(
    shared: int, tails: list[int], window: int | None, pages: torch.dtype
) -> None:
    shape = AttentionShape(4, 1, 16, 16, window)
    pool = Pool.of(shape, pages)
    prefix = pool.sequence(shape, shared * 16, seed=1, step=F32)
    ends = [shared * 16 + tail for tail in tails]
    tables = [pool.sequence(shape, end, seed=2 + i, step=F32, behind=prefix) for i, end in enumerate(ends)]
    private = Pool.of(shape, pages, pages=96, seed=5)
    own = []
    for i, end in enumerate(ends):  # the same numbers in pages that nobody shares
        table = private.sequence(shape, shared * 16, seed=1, step=F32)
        own.append(private.sequence(shape, end, seed=2 + i, step=F32, behind=table))
    spans = [Span(i, 1, end - 1) for i, end in enumerate(ends)]
    q = queries(shape, len(ends), F32)
    together = TritonAttention(shape, spans, tables_of(tables), choice=SMALL)
    apart = TritonAttention(shape, spans, tables_of(own), choice=SMALL)
    if window is None:
        whole = shared // 2  # segments
        items = -(-len(ends) // 4)  # of four tokens each
        assert together.shared_keys == whole * 32 * (len(ends) - items)
    assert apart.shared_keys == 0
    assert torch.equal(together(q, pool.kv), apart(q, private.kv))
    for i in (0, len(ends) - 1):
        alone = run(shape, [Span(0, 1, ends[i] - 1)], [tables[i]], q[i : i + 1], pool.kv)
        assert torch.equal(together(q, pool.kv)[i : i + 1], alone)


@pytest.mark.parametrize("pages", [F16, I8])
def test_what_is_not_seen_has_no_influence(pages: torch.dtype) -> None:
    """Slots that nobody wrote are NaN in every test; here another layer, what is behind a window, and
    tables' ends that name pages with anything in them."""
    shape = AttentionShape(2, 1, 16, 16, window=20)
    pool = Pool.of(shape, pages)
    table = pool.sequence(shape, 60, seed=3, step=F16)
    q = queries(shape, 1, F16)
    span = [Span(0, 1, 59)]
    before = run(shape, span, [table], q, pool.kv)
    bad = pool.free.pop()
    after = run(shape, span, [[bad, bad, *table[2:], bad, bad]], q, pool.kv)
    assert before.isfinite().all()
    assert torch.equal(before, after)


def test_what_is_seen_and_not_finite_shows() -> None:
    shape = AttentionShape(2, 1, 16, 16)
    pool = Pool.of(shape, I8)
    table = pool.sequence(shape, 40, seed=3, step=F32)
    q = queries(shape, 2, F32)
    pool.kv[table[1], 1, 3, 0, 16:] = -1  # V of position 19 has a scale that is NaN
    found = run(shape, [Span(0, 1, 18), Span(1, 1, 19)], [table] * 2, q, pool.kv)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_segments_merged_in_registers_are_those_merged_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(3, 1, 16, 16)
    pool = Pool.of(shape, F32)
    table = pool.sequence(shape, 90, seed=1, step=F32)
    q = queries(shape, 4, F32)
    spans = [Span(0, 1, 89), Span(1, 3, 80)]
    parted = run(shape, spans, [table] * 2, q, pool.kv)
    monkeypatch.setattr(attention_plan, "SCRATCH_BYTES", 0)
    whole = TritonAttention(shape, spans, tables_of([table] * 2), choice=SMALL)
    assert torch.equal(whole(q, pool.kv), parted)


@settings(max_examples=3, deadline=None, phases=_PHASES)
@given(
    steps=st.lists(st.lists(st.integers(-1, 75), min_size=0, max_size=4), min_size=1, max_size=3),
    window=st.sampled_from([None, 33]),
)
def test_a_layout_is_filled_again_and_again(steps: list[list[int]], window: int | None) -> None:
    shape = AttentionShape(4, 1, 16, 16, window)
    pool = Pool.of(shape, F32)
    table = pool.sequence(shape, 76, seed=1, step=F32)
    other = pool.sequence(shape, 76, seed=2, step=F32, behind=table[:2])
    first = DecodeLayout(
        1, 6, shape, torch.device("cpu"), dtype=F32, choice=SMALL
    )  # of little scratch memory
    layout = DecodeLayout(4, 6, shape, torch.device("cpu"), dtype=F32, choice=SMALL, beside=first)
    q = queries(shape, 4, F32)
    for positions in steps:
        tables = [(table, other)[i % 2] for i in range(len(positions))]
        layout.fill(positions, tables_of(tables) if tables else torch.zeros((0, 0), dtype=torch.int64))
        found = layout(q, pool.kv)
        for i, position in enumerate(positions):
            if position >= 0:
                alone = run(shape, [Span(0, 1, position)], tables[i : i + 1], q[i : i + 1], pool.kv)
                assert torch.equal(found[i : i + 1], alone)


def test_int8_pages_of_an_odd_group_have_smaller_items_in_chunks_and_recorded_steps() -> None:
    shape = AttentionShape(7, 1, 80, 16)
    assert [choice_for(shape, F16, kept).tiles["BLOCK_M"] for kept in (F16, I8)] == [64, 32]
    pool = Pool.of(shape, I8)
    tables = tables_of([pool.sequence(shape, 20, seed=3, step=F16)])
    q = queries(shape, 6, F16)
    spans = [Span(0, 6, 14)]  # 42 queries: two items, and one if laid out for pages that are not int8
    found = TritonAttention(shape, spans, tables, I8)(q, pool.kv)
    torch.testing.assert_close(
        found.to(F32), expected(shape, spans, tables.tolist(), q, pool.kv), rtol=0, atol=2e-3
    )
    layout = DecodeLayout(1, 2, shape, torch.device("cpu"), dtype=F16, kv_dtype=I8)
    layout.fill([19], tables)
    assert torch.equal(layout(q[5:], pool.kv), found[5:])
    with pytest.raises(ValueError, match="another dtype"):
        TritonAttention(shape, spans, tables)(q, pool.kv)


def test_what_does_not_fit_is_refused() -> None:
    shape = AttentionShape(2, 1, 16, 16)
    kv = Pool.of(shape, F32).kv
    q = queries(shape, 2, F32)
    with pytest.raises(ValueError, match="too short"):
        TritonAttention(shape, [Span(0, 1, 16)], torch.zeros((1, 1), dtype=torch.int64))
    attention = TritonAttention(shape, [Span(0, 2, 3)], torch.zeros((1, 1), dtype=torch.int64), choice=SMALL)
    with pytest.raises(ValueError, match="at least 2 rows"):
        attention(q[:1], kv)
    with pytest.raises(ValueError, match="another shape"):
        attention(q, kv[:, :, :8])
    with pytest.raises(ValueError, match="one run of memory"):
        attention(q, kv.transpose(2, 3).contiguous().transpose(2, 3))
    layout = DecodeLayout(2, 1, shape, torch.device("cpu"), dtype=F32, choice=SMALL)
    with pytest.raises(ValueError, match="different heads"):
        DecodeLayout(1, 1, AttentionShape(4, 1, 16, 16), torch.device("cpu"), beside=layout)
    with pytest.raises(ValueError, match="3 rows"):
        layout.fill([0, 0, 0], torch.zeros((3, 1), dtype=torch.int64))
    with pytest.raises(ValueError, match="must be contiguous"):
        layout(q[:1], kv)
