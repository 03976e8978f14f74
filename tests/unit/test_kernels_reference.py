"""Each reference operation against its definition, and the rules that make rows independent."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.invariant import RowRule, cancelling, choose_rule, random_rows
from kernels.ops import AttentionShape, Span
from kernels.paged_attention import TILE
from kernels.reference import ReferenceLinear, ReferenceOps
from tests.cpu_builds import normal

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.fixture(scope="module")
def ops() -> ReferenceOps:
    return ReferenceOps(CPU)


def test_the_backend_names_itself_and_its_rounding(ops: ReferenceOps) -> None:
    assert ops.name == "reference"
    assert torch.__version__ in ops.numerics
    assert f"threads-{torch.get_num_threads()}" in ops.numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops: ReferenceOps, dtype: torch.dtype, biased: bool) -> None:
    weight, x = normal(40, 24).to(dtype), normal(9, 24, seed=1).to(dtype)
    bias = normal(40, seed=2).to(dtype) if biased else None
    wide = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    found = ops.linear(weight, bias)(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wide, atol=1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(576, 192), (1536, 64), (80, 48), (33, 7)])
def test_linear_rows_do_not_depend_on_their_company(
    ops: ReferenceOps, dtype: torch.dtype, width: int, out: int
) -> None:
    """Cancelling operands leave nothing but the order of additions to see."""
    x, weight = cancelling((700, width, out), dtype, CPU)
    linear = ops.linear(weight[0])
    alone = linear(x[0, :1])
    for count in (*range(1, 40), 63, 64, 65, 127, 200, 511, 512, 513, 700):
        found = linear(x[0, :count].clone())
        assert torch.equal(found, alone.expand(count, -1)), count


def test_large_weights_go_in_slabs(ops: ReferenceOps) -> None:
    weight = normal(8, 16)
    sliced = ReferenceLinear(weight, None, RowRule(4, False, 8))
    x = normal(21, 16, seed=3)
    assert torch.allclose(sliced(x), F.linear(x, weight), atol=1e-6)


def test_rules_from_the_fastest_to_the_certain() -> None:
    sample = random_rows(64, 8, CPU)[0]

    def counts(allowed: Sequence[int]) -> RowRule:
        """A function that is only right when given one of the allowed row counts."""
        return choose_rule(lambda x: x if x.shape[-2] in allowed else x + x.shape[-2], sample)

    assert counts(range(1000)) == RowRule(1, False, 64)
    assert counts(range(0, 1000, 4)) == RowRule(4, False, 64)
    assert counts(range(0, 1000, 16)) == RowRule(16, False, 64)
    assert counts([16]) == RowRule(16, True, 64)

    def by_place(x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[-2])[:, None]

    assert choose_rule(by_place, sample) == RowRule(1, True, 64)


@pytest.mark.parametrize(
    "rule", [RowRule(1, False, 8), RowRule(4, False, 8), RowRule(16, True, 64), RowRule(1, True, 8)]
)
def test_a_rule_keeps_rows_in_order(rule: RowRule) -> None:
    x = normal(2, 37, 5)
    assert torch.equal(rule.apply(lambda part: part * 2, x), x * 2)


def test_cancelling_operands_cancel() -> None:
    x, weight = cancelling((3, 33, 5), torch.bfloat16, CPU, batch=2)
    assert torch.equal(x.double() @ weight.double().transpose(1, 2), torch.zeros(2, 3, 5, dtype=torch.double))
    assert x.abs().sum() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(ops: ReferenceOps, dtype: torch.dtype) -> None:
    x, weight = (normal(5, 3, 24) * 3).to(dtype), normal(24, seed=1).to(dtype)
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_add_rms_norm(ops: ReferenceOps) -> None:
    x, residual, weight = normal(5, 24), normal(5, 24, seed=1), normal(24, seed=2)
    normed, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-6))


def test_rope_turns_pairs_and_keeps_lengths(ops: ReferenceOps) -> None:
    x = normal(4, 2, 8)
    angles = normal(4, 4, seed=1)
    found = ops.rope(x, angles.cos(), angles.sin())
    for pair in range(4):
        turned = (
            torch.complex(x[..., pair], x[..., pair + 4])
            * torch.polar(torch.ones(4), angles[:, pair])[:, None]
        )
        assert torch.allclose(found[..., pair], turned.real, atol=1e-6)
        assert torch.allclose(found[..., pair + 4], turned.imag, atol=1e-6)


def test_silu_mul(ops: ReferenceOps) -> None:
    x = normal(6, 20) * 4
    assert torch.allclose(ops.silu_mul(x), F.silu(x[:, :10]) * x[:, 10:], atol=1e-6)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert torch.equal(ops.silu_mul(extreme), torch.tensor([[0.0, 200.0]]))


def test_write_kv_and_copy_page(ops: ReferenceOps) -> None:
    storage = torch.full((5, 2, 2, 4, 3, 8), NAN)
    k, v = normal(3, 3, 8), normal(3, 3, 8, seed=1)
    ops.write_kv(storage[:, 1], torch.tensor([4 * 4 + 3, 0, 2 * 4 + 1]), k, v)
    assert torch.equal(storage[4, 1, 0, 3], k[0])
    assert torch.equal(storage[0, 1, 1, 0], v[1])
    assert torch.equal(storage[2, 1, 1, 1], v[2])
    assert int((~storage.isnan()).sum()) == 2 * k.numel()
    ops.copy_page(storage, 4, 1, 3)
    assert storage[1].isnan().all(), "slot 3 is not among the first three"
    ops.copy_page(storage, 4, 1, 4)
    assert torch.equal(storage[1, 1, :, 3], storage[4, 1, :, 3])


def naive(q: Tensor, k: Tensor, v: Tensor, position: int, window: int | None) -> Tensor:
    """Attention of rows at `position ..` over keys at 0 .., in float64: `[rows, heads * dim]`."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.empty(rows, heads, dim, dtype=torch.double)
    for row in range(rows):
        at = position + row
        low = 0 if window is None else max(0, at - window + 1)
        for head in range(heads):
            keys, values = k[low : at + 1, head // group].double(), v[low : at + 1, head // group].double()
            weights = torch.softmax(keys @ q[row, head].double() / dim**0.5, dim=0)
            out[row, head] = weights @ values
    return out.view(rows, -1)


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_attention(ops: ReferenceOps, heads: int, kv_heads: int, window: int | None) -> None:
    """Spans of all kinds in one step; unwritten slots, foreign pages and released entries hold NaN."""
    dim, slots, pages = 8, 16, 400
    order = random.Random(heads)
    free = order.sample(range(1, pages), pages - 1)
    kv = torch.full((pages, 2, slots, kv_heads, dim), NAN)
    sizes = [(0, 1), (0, 130), (127, 1), (128, 1), (129, 70), (2047, 3), (2100, 1), (5, 66)]
    longest = -(-max(start + rows for start, rows in sizes) // slots)
    tables = torch.zeros(len(sizes), longest, dtype=torch.int64)
    spans, row, expected = [], 0, []
    q = normal(sum(rows for _, rows in sizes), heads, dim)
    for number, (start, rows) in enumerate(sizes):
        k, v = normal(2, start + rows, kv_heads, dim, seed=number)
        for index in range(-(-(start + rows) // slots)):
            page = free.pop()
            tables[number, index] = page
            part = slice(index * slots, (index + 1) * slots)
            kv[page, 0, : len(k[part])], kv[page, 1, : len(v[part])] = k[part], v[part]
        if window is not None:
            tables[number, : max(0, start - window + 1) // slots] = 0  # page 0 is nobody's
        spans.append(Span(row, rows, start))
        expected.append(naive(q[row : row + rows], k, v, start, window))
        row += rows
    found = ops.attention(AttentionShape(heads, kv_heads, dim, slots, window), spans, tables)(q, kv)
    assert torch.allclose(found.double(), torch.cat(expected), atol=1e-5)


def test_attention_survives_extreme_scores(ops: ReferenceOps) -> None:
    """Scores of several thousand over two segments: no overflow, all weight on the largest key."""
    dim, slots, length = 8, 16, 16 * TILE + 5
    kv = torch.zeros(-(-length // slots), 2, slots, 1, dim)
    kv[:, 0] = -3000.0
    kv[3, 0, 2] = 3000.0
    kv[:, 1] = 1.0
    kv[3, 1, 2] = 7.0
    tables = torch.arange(kv.shape[0])[None]
    attention = ops.attention(AttentionShape(1, 1, dim, slots), [Span(0, 1, length - 1)], tables)
    assert torch.equal(attention(torch.ones(1, 1, dim), kv), torch.full((1, dim), 7.0))


def test_a_page_size_that_does_not_divide_a_tile_is_refused(ops: ReferenceOps) -> None:
    with pytest.raises(ValueError, match="page size 24"):
        ops.attention(AttentionShape(1, 1, 8, 24), [Span(0, 1, 0)], torch.zeros(1, 1, dtype=torch.int64))
