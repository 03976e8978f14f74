"""A row's bits do not depend on its company, its place, its pages, or the number of threads."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.ops import CpuOps
from kernels.invariant import cancelling
from kernels.ops import AttentionShape
from tests.cpu_builds import attend_pieces, builds, normal, threads

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


ops = builds()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "out"), [(576, 192), (1536, 64), (80, 48), (33, 7)])
def test_linear_rows(ops: CpuOps, dtype: torch.dtype, width: int, out: int) -> None:
    """Cancelling operands leave nothing but the order of additions to see."""
    x, weight = cancelling((300, width, out), dtype, CPU)
    linear = ops.linear(weight[0])
    with threads(1):
        alone = linear(x[0, :1])
    for count in (*range(1, 45), 83, 84, 85, 127, 168, 169, 300):
        with threads(1 + count % 2):
            found = linear(x[0, :count])
        assert torch.equal(found, alone.expand(count, -1)), count


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_rows(ops: CpuOps, dtype: torch.dtype) -> None:
    x, weight = normal(40, 2 * 37).to(dtype), normal(37, seed=1).to(dtype)
    angles = normal(40, 9, seed=2)
    heads = normal(40, 3, 18, seed=3).to(dtype)
    whole = (
        ops.silu_mul(x),
        ops.rms_norm(x[:, :37], weight, 1e-5),
        ops.add_rms_norm(x[:, :37], x[:, 37:], weight, 1e-5)[0],
        ops.rope(heads, angles.cos(), angles.sin()),
    )
    with threads(2):
        for row in range(40):
            at = slice(row, row + 1)
            alone = (
                ops.silu_mul(x[at]),
                ops.rms_norm(x[at, :37], weight, 1e-5),
                ops.add_rms_norm(x[at, :37], x[at, 37:], weight, 1e-5)[0],
                ops.rope(heads[at], angles[at].cos(), angles[at].sin()),
            )
            for one, many in zip(alone, whole, strict=True):
                assert torch.equal(one[0], many[row]), row


class Histories:
    """Random sequences in one pool; sequences of one family begin with the same pages."""

    LENGTH = 1200

    def __init__(self, ops: CpuOps, dtype: torch.dtype, window: int | None, seed: int) -> None:
        order = random.Random(seed)
        self.shape = AttentionShape(6, 2, 16, 16, window)
        self.ops = ops
        count, pages = 4, -(-self.LENGTH // 16)
        free = order.sample(range(count * pages), count * pages)
        self.kv = torch.full((count * pages, 2, 16, 2, 16), float("nan"), dtype=dtype)
        self.tables = torch.tensor(free).view(count, pages)
        shared = order.choice((0, 16, 512, 1040))
        self.tables[1:3, : shared // 16] = self.tables[0, : shared // 16]
        at = torch.arange(self.LENGTH)
        self.k, self.v = normal(2, count, self.LENGTH, 2, 16, seed=seed).to(dtype)
        self.k[1:3, :shared], self.v[1:3, :shared] = self.k[0, :shared], self.v[0, :shared]
        for number in range(count):
            slots = self.tables[number, at // 16] * 16 + at % 16
            ops.write_kv(self.kv, slots, self.k[number], self.v[number])
        self.q = normal(count, self.LENGTH, 6, 16, seed=seed + 1).to(dtype)

    def run(self, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attention of each (sequence, first, end), all in one step."""
        return attend_pieces(self.ops, self.shape, self.tables, self.q, self.kv, pieces)


piece = st.tuples(
    st.integers(0, 3), st.integers(0, Histories.LENGTH - 1), st.sampled_from((1, 1, 1, 2, 17, 70, 300))
)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(
    pieces=st.lists(piece, min_size=1, max_size=9), seed=st.integers(0, 2**16), thread_count=st.integers(1, 2)
)
def test_attention_rows(
    ops: CpuOps,
    dtype: torch.dtype,
    window: int | None,
    pieces: list[tuple[int, int, int]],
    seed: int,
    thread_count: int,
) -> None:
    histories = Histories(ops, dtype, window, seed)
    cut = [(number, first, min(first + rows, Histories.LENGTH)) for number, first, rows in pieces]
    with threads(thread_count):
        together = histories.run(cut)
    with threads(1):
        for (number, first, end), rows in zip(cut, together, strict=True):
            for at in {first, (first + end) // 2, end - 1}:
                (alone,) = histories.run([(number, at, at + 1)])
                assert torch.equal(alone[0], rows[at - first]), (number, at)


def test_another_key_has_other_bits(ops: CpuOps) -> None:
    """The comparison above can fail: one changed key shows in every row that sees it."""
    histories = Histories(ops, torch.bfloat16, None, 3)
    (before,) = histories.run([(0, 700, 720)])
    histories.ops.write_kv(histories.kv, histories.tables[0, :1] * 16, histories.k[3, :1], histories.v[3, :1])
    (after,) = histories.run([(0, 700, 720)])
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
