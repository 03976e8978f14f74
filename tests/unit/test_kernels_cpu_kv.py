"""KV pages of every dtype on the CPU: any page size, and rows whose bits depend on nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.attention import CpuAttention, pages_of
from kernels.cpu.ops import CpuOps
from kernels.ops import AttentionShape, Span, kv_width
from tests.cpu_builds import attend_pieces, builds, threads
from tests.kv_pages import KV_DTYPES, STEPS, Step, normal, poison

PAIRS = pytest.mark.parametrize(("step", "kv"), [(step, kv) for step in STEPS for kv in KV_DTYPES])
SIZES = [(0, 1), (127, 1), (129, 40), (300, 3), (5, 66), (270, 1)]


ops = builds()


@PAIRS
@pytest.mark.parametrize("slots", [1, 7, 15, 48, 128])
def test_attention_page_sizes(ops: CpuOps, step: torch.dtype, kv: torch.dtype, slots: int) -> None:
    """Right, and the same bits as with pages of 16."""
    given = Step(ops, step, kv, AttentionShape(3, 1, 16, slots, 200), SIZES)
    found = given.run()
    bound = 1e-5 if step == torch.float32 else 1.4e-2
    assert float((found.double() - given.exact(kv)).abs().max()) < bound
    assert torch.equal(found, Step(ops, step, kv, AttentionShape(3, 1, 16, 16, 200), SIZES).run())


@PAIRS
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 256])
def test_attention_dims(ops: CpuOps, step: torch.dtype, kv: torch.dtype, dim: int) -> None:
    given = Step(ops, step, kv, AttentionShape(6, 2, dim, 16), SIZES)
    bound = 1e-5 if step == torch.float32 else 1.4e-2
    assert float((given.run().double() - given.exact(kv)).abs().max()) < bound


class Histories:
    """Random sequences in one pool, written in chunks; some begin with the same pages."""

    LENGTH = 600

    def __init__(
        self, ops: CpuOps, step: torch.dtype, kv: torch.dtype, slots: int, window: int | None, seed: int
    ) -> None:
        self.ops = ops
        self.shape = AttentionShape(6, 2, 16, slots, window)
        order = random.Random(seed)
        count, pages = 3, -(-self.LENGTH // slots)
        self.tables = torch.tensor(order.sample(range(count * pages), count * pages)).view(count, pages)
        shared = order.choice((0, 512, 560)) // slots
        self.tables[1, :shared] = self.tables[0, :shared]
        self.k, self.v = normal(2, count, self.LENGTH, 2, 16, seed=seed).to(step)
        same = shared * slots
        self.k[1, :same], self.v[1, :same] = self.k[0, :same], self.v[0, :same]
        self.kv = torch.empty((count * pages, 2, slots, 2, kv_width(16, kv)), dtype=kv)
        poison(self.kv)
        for number in range(count):
            at = 0
            while at < self.LENGTH:
                end = min(self.LENGTH, at + order.choice((1, 3, 40, 200)))
                place = torch.arange(at, end)
                slot = self.tables[number, place // slots] * slots + place % slots
                ops.write_kv(self.kv, slot, self.k[number, at:end], self.v[number, at:end])
                at = end
        self.q = normal(count, self.LENGTH, 6, 16, seed=seed + 1).to(step)

    def run(self, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of each (sequence, first, end), all in one step."""
        return attend_pieces(self.ops, self.shape, self.tables, self.q, self.kv, pieces)


piece = st.tuples(
    st.integers(0, 2), st.integers(0, Histories.LENGTH - 1), st.sampled_from((1, 1, 1, 2, 17, 70, 200))
)


@PAIRS
@settings(max_examples=10, deadline=None)
@given(
    pieces=st.lists(piece, min_size=1, max_size=7),
    seed=st.integers(0, 2**16),
    slots=st.sampled_from((1, 7, 16, 16, 128)),
    window=st.sampled_from((None, None, 150)),
)
def test_attention_rows(
    ops: CpuOps,
    step: torch.dtype,
    kv: torch.dtype,
    pieces: list[tuple[int, int, int]],
    seed: int,
    slots: int,
    window: int | None,
) -> None:
    """Together on two threads, and alone on one."""
    histories = Histories(ops, step, kv, slots, window, seed)
    cut = [(number, first, min(first + rows, Histories.LENGTH)) for number, first, rows in pieces]
    with threads(2):
        together = histories.run(cut)
    with threads(1):
        for (number, first, end), rows in zip(cut, together, strict=True):
            for at in {first, (first + end) // 2, end - 1}:
                (alone,) = histories.run([(number, at, at + 1)])
                assert torch.equal(alone[0], rows[at - first]), (number, at)


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_another_key_has_other_bits(ops: CpuOps, kv: torch.dtype) -> None:
    """The comparison above can fail: one changed key shows in every row that sees it."""
    histories = Histories(ops, torch.bfloat16, kv, 16, None, 3)
    (before,) = histories.run([(0, 580, 600)])
    ops.write_kv(histories.kv, histories.tables[0, :1] * 16, histories.k[2, :1] * 4, histories.v[2, :1])
    (after,) = histories.run([(0, 580, 600)])
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_rows_with_the_same_pages_read_them_once(ops: CpuOps, kv: torch.dtype) -> None:
    """A shared segment is found (and read as one task of many rows); a row's bits are those it has alone."""
    slots, rows, dim = 16, 5, 16
    storage = torch.empty((60, 2, slots, 1, kv_width(dim, kv)), dtype=kv)
    poison(storage)
    tables = torch.arange(36).repeat(rows, 1)
    tables[:, 34] = torch.arange(36, 36 + rows)
    at = torch.arange(60 * slots)
    k, v = normal(2, len(at), 1, dim).bfloat16()
    ops.write_kv(storage, at, k, v)
    q = normal(rows, 3, dim).bfloat16()
    shape = AttentionShape(3, 1, dim, slots)
    spans = [Span(row, 1, 546 + row) for row in range(rows)]
    attention = ops.attention(shape, spans, tables)
    assert isinstance(attention, CpuAttention)
    assert attention.shared_keys == (rows - 1) * 512
    together = attention(q, storage)
    for row in range(rows):
        alone = ops.attention(shape, [Span(0, 1, 546 + row)], tables[row : row + 1])
        assert torch.equal(alone(q[row : row + 1], storage)[0], together[row]), row


@PAIRS
@pytest.mark.parametrize("slots", [1, 5, 7])
def test_copy_of_odd_pages(ops: CpuOps, step: torch.dtype, kv: torch.dtype, slots: int) -> None:
    """Copies answer like the original, and what follows them is still poison: it can be written on."""
    dim = 24
    shape = AttentionShape(2, 2, dim, slots)
    storage = torch.empty((5, 2, 2, slots, 2, kv_width(dim, kv)), dtype=kv)
    poison(storage)
    k, v = normal(2, 2 * slots, 2, dim).to(step)
    q = normal(1, 2, dim).to(step)
    for layer in range(2):
        ops.write_kv(storage[:, layer], torch.arange(2 * slots) + slots, k, v)
    table = torch.tensor([[1]])
    for count in range(1, slots + 1):
        poison(storage[3:])
        ops.copy_page(storage, 1, 4, count)
        rest = torch.arange(count, slots)
        for layer in range(2):
            pages = storage[:, layer]
            whole = ops.attention(shape, [Span(0, 1, slots - 1)], table)(q, pages)
            first = ops.attention(shape, [Span(0, 1, count - 1)], table)(q, pages)
            assert torch.equal(ops.attention(shape, [Span(0, 1, count - 1)], table + 3)(q, pages), first)
            if count < slots:
                assert ops.attention(shape, [Span(0, 1, count)], table + 3)(q, pages).isnan().all()
            ops.write_kv(pages, rest + 4 * slots, k[count:slots], v[count:slots])
            assert torch.equal(ops.attention(shape, [Span(0, 1, slots - 1)], table + 3)(q, pages), whole)


def test_pages_that_cannot_be(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match=r"KV pages cannot be torch\.int16"):
        ops.copy_page(torch.zeros(2, 1, 2, 16, 1, 16, dtype=torch.int16), 0, 1, 4)
    with pytest.raises(ValueError, match="even head dimension, not 15"):
        pages_of(torch.zeros(2, 2, 16, 1, 19, dtype=torch.int8))
