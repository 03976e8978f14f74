"""Heads between the qkv product and attention, in Triton's interpreter, beside the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.kv_formats import kept, scales_of
from kernels.ops import KV_TAILS, kv_width
from kernels.reference import ReferenceOps
from kernels.triton.heads import rope, rotate_and_write, write_kv
from tests.cpu_builds import normal
from tests.kv_pages import poison

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and infinities
REFERENCE = ReferenceOps(torch.device("cpu"))
KV_DTYPES = [torch.float32, torch.float16, torch.int8]  # the interpreter truncates where it makes bf16
SHAPES = [(9, 3, 16), (1, 1, 80), (28, 4, 96), (16, 16, 10), (2, 1, 2)]  # heads, kv_heads, dim
NAN, INF = float("nan"), float("inf")
EPS = 1e-5


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, in memory that holds NaN, too."""
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def close(found: Tensor, expected: Tensor) -> bool:
    """But for the order of additions in a norm, and for a * b + c rounded once."""
    tolerance = 5e-6 if found.dtype == torch.float32 else 4e-3
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def pages(dtype: torch.dtype, kv_heads: int, dim: int, count: int = 5) -> Tensor:
    """A poisoned pool of two layers, pages of four slots."""
    storage = torch.empty((count, 2, 2, 4, kv_heads, kv_width(dim, dtype)), dtype=dtype)
    poison(storage)
    return storage


@dataclass(frozen=True)
class Layer:
    """A layer's rows, and tables for RoPE."""

    heads: int
    kv_heads: int
    dim: int
    qkv: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def random(cls, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, rows: int = 6) -> Layer:
        angles = normal(40, dim // 2, seed=5) * 3
        qkv = normal(rows, (heads + 2 * kv_heads) * dim, seed=dim).to(dtype)
        return cls(heads, kv_heads, dim, qkv, angles.cos(), angles.sin())

    def norms(self) -> tuple[Tensor, Tensor]:
        return normal(self.dim, seed=7).to(self.qkv.dtype), normal(self.dim, seed=8).to(self.qkv.dtype)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: views of `qkv`."""
        rows = self.qkv.view(self.qkv.shape[0], -1, self.dim)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def run(
        self,
        norms: tuple[Tensor, Tensor] | None,
        positions: Tensor,
        rotary: bool,
        kv: Tensor,
        slots: Tensor,
        only: slice = slice(None),
    ) -> Tensor:
        q_norm, k_norm = norms or (None, None)
        sizes = (self.heads, self.kv_heads, self.dim)
        rows, tables = self.qkv[only].clone(), (self.cos, self.sin)
        at = positions[only].clone(), rotary, kv, slots[only].clone()
        return rotate_and_write(rows, q_norm, k_norm, EPS, *tables, *at, *sizes)


POSITIONS = torch.tensor([39, 0, 1, 17, 5, 3])
SLOTS = torch.tensor([3 * 4 + 3, -1, 0, 4 * 4 + 1, -9, 3 * 4 + 2])
WRITTEN = SLOTS >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_one_kernel_does_what_the_reference_does_in_four(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool, rotary: bool
) -> None:
    layer = Layer.random(heads, kv_heads, dim, dtype)
    storage, expected = pages(dtype, kv_heads, dim), pages(dtype, kv_heads, dim)
    norms = layer.norms() if normed else None
    found = layer.run(norms, POSITIONS, rotary, storage[:, 1], SLOTS)
    q, k, v = layer.parts()
    if norms is not None:
        q, k = REFERENCE.rms_norm(q, norms[0], EPS), REFERENCE.rms_norm(k, norms[1], EPS)
    if rotary:
        tables = layer.cos[POSITIONS], layer.sin[POSITIONS]
        q, k = REFERENCE.rope(q, *tables), REFERENCE.rope(k, *tables)
    REFERENCE.write_kv(expected[:, 1], SLOTS[WRITTEN], k[WRITTEN], v[WRITTEN])
    assert found.shape == q.shape
    assert found.dtype == dtype
    assert close(found, q)
    assert same(storage.isnan(), expected.isnan()), "what was poison is poison"
    assert same(storage[:, :, 1], expected[:, :, 1]), "V is kept as it is"
    assert close(storage.nan_to_num(), expected.nan_to_num())


def test_norms_round_where_the_reference_does() -> None:
    """Squares of 1 and 7 add up exactly in any order: what is left to see is where it is rounded."""
    layer = Layer.random(3, 1, 20, torch.float16)
    layer.qkv.copy_(torch.tensor([1.0, 7.0, -7.0, -1.0]).repeat(6, 25))
    q_norm, k_norm = layer.norms()
    storage = pages(torch.float16, 1, 20)
    found = layer.run((q_norm, k_norm), POSITIONS, False, storage[:, 0], SLOTS)
    q, k, _ = layer.parts()
    assert same(found, REFERENCE.rms_norm(q, q_norm, EPS))
    assert same(storage[3, 0, 0, 3], REFERENCE.rms_norm(k, k_norm, EPS)[0])
    late = q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + EPS) * q_norm.float()
    assert not same(found, late.half()), "two roundings can be told from one"


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [12, 80])
def test_pages_of_every_dtype_keep_what_was_turned(dtype: torch.dtype, kv: torch.dtype, dim: int) -> None:
    """Bit for bit: q's arithmetic is k's, so K is known from a layer whose q heads are the k heads."""
    layer = Layer.random(3, 3, dim, dtype)
    layer.qkv.view(6, 3, -1)[:, 1] = layer.qkv.view(6, 3, -1)[:, 0]
    storage, expected = pages(kv, 3, dim), pages(kv, 3, dim)
    norm = layer.norms()[0]
    turned = layer.run((norm, norm), POSITIONS, True, storage[:, 0], SLOTS)
    v = layer.parts()[2]
    REFERENCE.write_kv(expected[:, 0], SLOTS[WRITTEN], turned[WRITTEN], v[WRITTEN])
    assert same(storage, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(9, 16), (1, 80), (8, 6)])
def test_rope(dtype: torch.dtype, heads: int, dim: int) -> None:
    rows = normal(5, heads + 3, dim).to(dtype)
    angles = normal(5, dim // 2, seed=1)
    found = rope(rows[:, 2 : heads + 2], angles.cos(), angles.sin())
    expected = REFERENCE.rope(rows[:, 2 : heads + 2], angles.cos(), angles.sin())
    assert found.dtype == dtype
    assert close(found, expected)


def test_padding_rows_write_nothing_and_read_no_table() -> None:
    layer = Layer.random(2, 1, 8, torch.float32)
    storage = pages(torch.int8, 1, 8)
    before = storage.clone()
    nowhere = torch.full((6,), -1)
    found = layer.run(layer.norms(), nowhere, True, storage[:, 1], nowhere)
    assert same(storage, before)
    assert same(found, layer.run(layer.norms(), nowhere + 1, True, storage[:, 1], nowhere))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_rows_bits_do_not_hang_on_its_company_or_its_page(kv: torch.dtype) -> None:
    layer = Layer.random(9, 3, 20, torch.float32)
    layer.qkv[1], layer.qkv[4] = NAN, INF
    slots = torch.tensor([15, 1, 0, 17, 9, 14])
    together = pages(kv, 3, 20)
    out = layer.run(layer.norms(), POSITIONS, True, together[:, 1], slots)
    for row in (0, 3, 5):
        alone = pages(kv, 3, 20)
        moved = (slots + 8) % 20
        single = layer.run(layer.norms(), POSITIONS, True, alone[:, 0], moved, only=slice(row, row + 1))
        assert same(single[0], out[row])
        page, offset = divmod(int(slots[row]), 4)
        to_page, to_offset = divmod(int(moved[row]), 4)
        assert same(alone[to_page, 0, :, to_offset], together[page, 1, :, offset])


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=24, max_size=24),
    most=st.sampled_from([None, 1e-38, 1e-36, 1.0, 1e30]),
    kv=st.sampled_from(KV_DTYPES),
)
def test_any_float32_is_kept_as_the_rule_says(
    numbers: list[int], most: float | None, kv: torch.dtype
) -> None:
    """From any bits: subnormal numbers, NaN of every kind, infinities; or within a chosen magnitude."""
    x = torch.tensor([n - 2**32 if n >= 2**31 else n for n in numbers], dtype=torch.int32)
    values = x.view(torch.float32) if most is None else x.double().div(2**31).mul(most).float()
    v = values.view(2, 1, 12).flip(0).contiguous()
    storage, expected = pages(kv, 1, 12), pages(kv, 1, 12)
    slots = torch.tensor([6, 13])
    for write, memory in ((write_kv, storage), (REFERENCE.write_kv, expected)):
        write(memory[:, 1], slots, values.view(2, 1, 12), v)
    if kv == torch.int8:
        assert same(storage, expected)
    else:
        assert same(storage.isnan(), expected.isnan())
        assert same(storage.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_codes_are_rounded_half_to_even() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 125.5]).view(1, 1, 8)
    storage = pages(torch.int8, 1, 8)
    write_kv(storage[:, 0], torch.tensor([0]), x, x)
    assert storage[0, 0, 0, 0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, 126, 126]
    scales = scales_of(storage[:, 0], 8)
    assert scales is not None
    assert scales[0, :, 0].eq(1).all()


@pytest.mark.parametrize("kv", [torch.bfloat16, *KV_DTYPES])
def test_what_cannot_be_kept_is_nan(kv: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0]] * 4)
    x[1, 2], x[2, 3], x[3, 0] = INF, NAN, 65536.0
    storage = pages(kv, 1, 4)
    write_kv(storage[:, 1], torch.arange(4), x.view(4, 1, 4), x.view(4, 1, 4))
    expected = kept(x, kv)
    found = storage[0, 1, :, :, 0]
    for part in found:
        if kv == torch.int8:
            assert same(part, expected)
        else:
            assert same(part.float().nan_to_num(7.0, 8.0, 9.0), expected.float().nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("dtype", list(KV_TAILS))
def test_bf16_rows_are_kept_where_nothing_is_rounded(dtype: torch.dtype) -> None:
    """The interpreter widens bf16 faithfully, and truncates back: whole numbers are the same in both."""
    k = torch.arange(-12, 12, dtype=torch.float32).view(2, 1, 12).to(torch.bfloat16)
    storage, expected = pages(dtype, 1, 12), pages(dtype, 1, 12)
    slots = torch.tensor([19, 2])
    write_kv(storage[:, 0], slots, k, -k)
    REFERENCE.write_kv(expected[:, 0], slots, k, -k)
    assert same(storage, expected)


def test_pools_of_more_than_2_to_the_31_numbers() -> None:
    """A pool of which two pages are ever touched: memory that nobody writes is not there."""
    stride = 1 << 24
    storage = torch.empty(130 * stride, dtype=torch.int8)
    kv = storage.as_strided((130, 2, 4, 1, 12), (stride, 48, 12, 12, 1))
    x = normal(2, 1, 8)
    write_kv(kv, torch.tensor([129 * 4 + 3, 1]), x, -x)
    assert same(kv[129, 0, 3], kept(x[0], torch.int8))
    assert same(kv[0, 1, 1], kept(-x[1], torch.int8))


def test_pages_of_another_form_are_refused() -> None:
    x, slots = normal(1, 2, 6), torch.tensor([0])
    for wrong in (
        torch.empty(3, 2, 4, 1, 6),
        torch.empty(3, 2, 4, 2, 8),
        torch.empty(3, 1, 4, 2, 6),
        torch.empty(3, 2, 2, 4, 6).transpose(2, 3),
    ):
        with pytest.raises(ValueError, match="do not hold 2 heads of 6 numbers"):
            write_kv(wrong, slots, x, x)
    with pytest.raises(ValueError, match="int8 pages need heads of a multiple of 4 numbers, not 6"):
        write_kv(torch.empty(3, 2, 4, 2, 10, dtype=torch.int8), slots, x, x)
    with pytest.raises(ValueError, match="even head dimension, not 5"):
        rope(normal(1, 2, 5), torch.ones(1, 2), torch.ones(1, 2))


def test_no_rows() -> None:
    storage = pages(torch.float32, 1, 8)
    before, none = storage.clone(), torch.empty(0, dtype=torch.int64)
    layer = Layer.random(2, 1, 8, torch.float32)
    assert layer.run(None, none, True, storage[:, 0], none, only=slice(0, 0)).shape == (0, 2, 8)
    write_kv(storage[:, 0], none, torch.empty(0, 1, 8), torch.empty(0, 1, 8))
    assert same(storage, before)
