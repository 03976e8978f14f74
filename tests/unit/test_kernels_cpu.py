"""Each compiled operation against the reference or its definition, for every instruction set here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.attention import CpuAttention
from kernels.cpu.ops import CpuOps
from kernels.ops import AttentionShape, Span
from kernels.reference import ReferenceOps
from tests.cpu_builds import builds, normal
from tests.kv_pages import naive

CPU = torch.device("cpu")
NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


ops = builds()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


def test_the_backend_names_itself_and_its_rounding(ops: CpuOps) -> None:
    assert ops.name.startswith("cpu-")
    assert ops.name in ops.numerics
    assert len(ops.numerics) > len(ops.name) + 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 24, 40), (9, 33, 7), (15, 64, 32), (200, 80, 97), (3, 1, 1)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops: CpuOps, dtype: torch.dtype, rows: int, width: int, out: int, biased: bool) -> None:
    weight, x = normal(out, width).to(dtype), normal(rows, width, seed=1).to(dtype)
    bias = normal(out, seed=2).to(dtype) if biased else None
    wide = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    found = ops.linear(weight, bias)(x)
    assert found.dtype == dtype
    assert close(found, wide, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 33, 576])
def test_norms(ops: CpuOps, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = ((normal(7, width, seed=s) * 3).to(dtype) for s in range(3))
    weight = weight[0]
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert close(ops.rms_norm(x.view(7, 1, width), weight, 1e-5)[:, 0], expected, dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 48, 64])
def test_rope(ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    x = normal(5, 9, dim).to(dtype)
    angles = normal(5, dim // 2, seed=1)
    expected = ReferenceOps(CPU).rope(x[:, 2:6], angles.cos(), angles.sin())
    assert close(ops.rope(x[:, 2:6], angles.cos(), angles.sin()), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 10, 64])
def test_silu_mul(ops: CpuOps, dtype: torch.dtype, inner: int) -> None:
    x = (normal(6, 2 * inner) * 4).to(dtype)
    wide = x.double()
    assert close(ops.silu_mul(x), F.silu(wide[:, :inner]) * wide[:, inner:], dtype)
    extreme = torch.tensor([[-200.0, 200.0, 1.0, 1.0]], dtype=dtype)
    assert torch.allclose(ops.silu_mul(extreme).float(), torch.tensor([[0.0, 200.0]]))


def fill(
    ops: CpuOps, kv: Tensor, tables: Tensor, sizes: Sequence[tuple[int, int]], window: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Write a random history for every (start, rows), pages in a shuffled order; returns its K and V."""
    pages, _, slots, kv_heads, dim = kv.shape
    free = random.Random(len(sizes)).sample(range(1, pages), pages - 1)
    histories = []
    for number, (start, rows) in enumerate(sizes):
        k, v = normal(2, start + rows, kv_heads, dim, seed=number).to(kv.dtype)
        count = -(-(start + rows) // slots)
        for index in range(count):
            tables[number, index] = free.pop()
        at = torch.arange(start + rows)
        ops.write_kv(kv, tables[number, at // slots] * slots + at % slots, k, v)
        if window is not None:  # pages behind the window are released: page 0 is nobody's
            tables[number, : max(0, start - window + 1) // slots] = 0
        histories.append((k, v))
    return histories


SIZES = [(0, 1), (0, 130), (127, 1), (255, 1), (256, 1), (129, 70), (520, 3), (1100, 1), (5, 66), (510, 20)]


def run_attention(
    ops: CpuOps, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, slots: int, window: int | None
) -> None:
    """Spans of all kinds in one step; unwritten slots, foreign pages and released entries hold NaN."""
    longest = -(-max(start + rows for start, rows in SIZES) // slots)
    pages = 2 + sum(-(-(start + rows) // slots) for start, rows in SIZES)
    kv = torch.full((pages, 2, slots, kv_heads, dim), NAN, dtype=dtype)
    tables = torch.zeros(len(SIZES), longest, dtype=torch.int64)
    histories = fill(ops, kv, tables, SIZES, window)
    q = normal(sum(rows for _, rows in SIZES), heads, dim, seed=99).to(dtype)
    spans, row, expected = [], 0, []
    for (start, rows), (k, v) in zip(SIZES, histories, strict=True):
        spans.append(Span(row, rows, start))
        expected.append(naive(q[row : row + rows], k, v, start, window))
        row += rows
    found = ops.attention(AttentionShape(heads, kv_heads, dim, slots, window), spans, tables)(q, kv)
    assert found.dtype == dtype
    assert close(found, torch.cat(expected), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 50, 300])
def test_attention_windows(ops: CpuOps, dtype: torch.dtype, window: int | None) -> None:
    run_attention(ops, dtype, 6, 2, 16, 16, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", range(1, 9))
def test_attention_groups(ops: CpuOps, dtype: torch.dtype, group: int) -> None:
    run_attention(ops, dtype, 2 * group, 2, 32, 16, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 16, 24, 48, 64, 80, 96, 112, 128, 256])
def test_attention_dims(ops: CpuOps, dtype: torch.dtype, dim: int) -> None:
    run_attention(ops, dtype, 2, 1, dim, 16, 200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [1, 3, 4, 15, 32, 48, 64, 128])
def test_attention_page_sizes(ops: CpuOps, dtype: torch.dtype, slots: int) -> None:
    run_attention(ops, dtype, 3, 1, 16, slots, 300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_survives_extreme_scores(ops: CpuOps, dtype: torch.dtype) -> None:
    """Scores of several thousand over several segments: no overflow, all weight on the largest key."""
    dim, slots, length = 16, 16, 1029
    k = torch.full((length, 1, dim), -3000.0)
    v = torch.ones(length, 1, dim)
    k[50], v[50] = 3000.0, 7.0
    kv = torch.full((-(-length // slots), 2, slots, 1, dim), NAN, dtype=dtype)
    ops.write_kv(kv, torch.arange(length), k.to(dtype), v.to(dtype))
    tables = torch.arange(kv.shape[0])[None]
    attention = ops.attention(AttentionShape(1, 1, dim, slots), [Span(0, 1, length - 1)], tables)
    found = attention(torch.ones(1, 1, dim, dtype=dtype), kv)
    assert torch.equal(found.float(), torch.full((1, dim), 7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_value_is_not_hidden(ops: CpuOps, dtype: torch.dtype) -> None:
    """NaN in a visible slot reaches every row that sees it, and no other sequence."""
    kv = torch.full((4, 2, 16, 1, 16), NAN, dtype=dtype)
    k, v = normal(2, 40, 1, 16).to(dtype)
    v[5] = NAN
    ops.write_kv(kv, torch.arange(40), k, v)
    tables = torch.tensor([[0, 1], [2, 3]])
    spans = [Span(0, 1, 30), Span(1, 1, 7)]
    shape = AttentionShape(1, 1, 16, 16)
    found = ops.attention(shape, spans, tables)(normal(2, 1, 16).to(dtype), kv)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slots", "dim"), [(16, 16), (5, 8)])
def test_copy_page(ops: CpuOps, dtype: torch.dtype, slots: int, dim: int) -> None:
    """Every count of slots: the copy answers like the original, and nothing beyond it is touched."""
    shape = AttentionShape(2, 1, dim, slots)
    q = normal(1, 2, dim).to(dtype)
    storage = torch.full((4, 3, 2, slots, 1, dim), NAN, dtype=dtype)
    for layer in range(3):
        k, v = normal(2, slots, 1, dim, seed=layer).to(dtype)
        ops.write_kv(storage[:, layer], torch.arange(slots) + slots, k, v)
    for count in range(1, slots + 1):
        storage[2:] = NAN
        ops.copy_page(storage, 1, 3, count)
        assert storage[2].isnan().all()
        assert int(storage[3].isnan().sum()) == 3 * 2 * (slots - count) * dim
        for layer in range(3):
            answers = [
                ops.attention(shape, [Span(0, 1, count - 1)], torch.tensor([[page]]))(q, storage[:, layer])
                for page in (1, 3)
            ]
            assert torch.equal(*answers)


def test_rows_with_the_same_pages_read_them_once(ops: CpuOps) -> None:
    """Shared segments are found, and a row's bits are those it has alone."""
    dim, slots, shared, rows = 16, 16, 1100, 5
    kv = torch.full((220, 2, slots, 1, dim), NAN, dtype=torch.bfloat16)
    prefix = torch.arange(10, 10 + -(-shared // slots))
    tables = torch.zeros(rows, 81, dtype=torch.int64)
    spans = []
    for row in range(rows):
        own = torch.arange(90 + 25 * row, 90 + 25 * row + 12)
        tables[row, : len(prefix)] = prefix
        tables[row, shared // slots : shared // slots + 12] = own
        spans.append(Span(row, 1, shared + 20 * row))
    for row in range(rows):
        at = torch.arange(spans[row].position + 1)
        k, v = normal(2, len(at), 1, dim, seed=row).bfloat16()
        k[:shared], v[:shared] = normal(2, shared, 1, dim, seed=77).bfloat16()
        ops.write_kv(kv, tables[row, at // slots] * slots + at % slots, k, v)
    q = normal(rows, 3, dim).bfloat16()
    shape = AttentionShape(3, 1, dim, slots)
    attention = ops.attention(shape, spans, tables)
    assert isinstance(attention, CpuAttention)
    assert attention.shared_keys == (rows - 1) * 1024  # two whole segments of 512
    together = attention(q, kv)
    for row in range(rows):
        alone = ops.attention(shape, [Span(0, 1, spans[row].position)], tables[row : row + 1])
        assert isinstance(alone, CpuAttention)
        assert alone.shared_keys == 0
        assert torch.equal(alone(q[row : row + 1], kv)[0], together[row]), row


REFUSED: dict[str, tuple[Callable[[CpuOps], object], str]] = {
    "width": (lambda ops: ops.linear(torch.ones(4, 8))(torch.ones(2, 6)), r"operands must be \[any, 8\]"),
    "lanes": (
        lambda ops: ops.linear(torch.ones(4, 8))(torch.ones(8)),
        r"operands must be \[any, 8\], not \[8\]",
    ),
    "dtype": (
        lambda ops: ops.linear(torch.ones(4, 8))(torch.ones(2, 8).bfloat16()),
        r"operands must be torch\.float32, not torch\.bfloat16",
    ),
    "norm": (lambda ops: ops.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5), r"norm weights must be \[8\]"),
    "residual": (
        lambda ops: ops.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5),
        r"the residual must be \[2, 8\], not \[1, 8\]",
    ),
    "cosines": (
        lambda ops: ops.rope(torch.ones(3, 2, 8), torch.ones(2, 4), torch.ones(3, 4)),
        r"cosines must be \[3, 4\], not \[2, 4\]",
    ),
    "half": (
        lambda ops: ops.silu_mul(torch.ones(2, 8).half()),
        "must be bfloat16 or float32, not torch.float16",
    ),
    "slots": (
        lambda ops: ops.write_kv(
            KV, torch.zeros(3, dtype=torch.int32), torch.ones(3, 1, 8), torch.ones(3, 1, 8)
        ),
        r"slots must be torch\.int64, not torch\.int32",
    ),
    "values": (
        lambda ops: ops.write_kv(
            KV, torch.zeros(3, dtype=torch.int64), torch.ones(3, 1, 8), torch.ones(2, 1, 8)
        ),
        r"values must be \[3, 1, 8\], not \[2, 1, 8\]",
    ),
    "page": (
        lambda ops: ops.copy_page(KV[:, None], 0, 2, 4),
        "no copy of 4 slots of page 0 to 2 among 2 of 4",
    ),
    "tables": (
        lambda ops: ops.attention(SHAPE, [Span(0, 1, 0)], torch.zeros(2, 1, dtype=torch.int64)),
        r"page tables must be \[1, any\], not \[2, 1\]",
    ),
    "queries": (lambda ops: attended(ops, 1), "queries must be at least 2 rows, not 1"),
    "heads": (lambda ops: attended(ops, 2, heads=1), r"queries must be \[any, 2, 8\], not \[2, 1, 8\]"),
    "pages": (lambda ops: attended(ops, 2, KV[:, :, :2]), "KV pages are of another shape"),
}
SHAPE = AttentionShape(2, 1, 8, 4)
KV = torch.zeros(2, 2, 4, 1, 8)


def attended(ops: CpuOps, rows: int, kv: Tensor = KV, heads: int = 2) -> Tensor:
    attention = ops.attention(SHAPE, [Span(0, 2, 0)], torch.zeros(1, 1, dtype=torch.int64))
    return attention(torch.ones(rows, heads, 8), kv)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_read_out_of_bounds_is_refused(ops: CpuOps, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(ops)
    assert attended(ops, 2).shape == (2, 16), "what fits is not"
