"""Pages as bytes, in Triton's interpreter, beside torch's indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.ops import KV_TAILS, kv_width
from kernels.triton.pages import copy_page, gather_pages, scatter_pages


def pool(dtype: torch.dtype, *sizes: int) -> Tensor:
    """Random bytes as `[pages, layers, 2, slots, kv_heads, kv_width]`: NaN of every kind are among them."""
    *outer, dim = sizes
    shape = (*outer, kv_width(dim, dtype))
    count = torch.Size(shape).numel() * dtype.itemsize
    random = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=random)
    return raw.view(dtype).view(shape)


def raw(storage: Tensor) -> Tensor:
    """`[pages, bytes]`."""
    return storage.view(storage.shape[0], -1).view(torch.uint8)


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(list(KV_TAILS)),
    layers=st.integers(1, 3),
    page_slots=st.sampled_from([1, 4, 16]),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 4, 5, 16]),
    data=st.data(),
)
def test_copy_page(
    dtype: torch.dtype, layers: int, page_slots: int, heads: int, dim: int, data: st.DataObject
) -> None:
    """Tokens of any number of bytes: those of 16 move as vectors, of odd numbers as bytes."""
    storage = pool(dtype, 5, layers, 2, page_slots, heads, dim)
    source, target, slots = (data.draw(st.integers(0, most)) for most in (4, 4, page_slots))
    expected = raw(storage).clone().view(dtype).view(storage.shape)
    expected[target, :, :, :slots] = expected[source, :, :, :slots].clone()
    copy_page(storage, source, target, slots)
    assert torch.equal(raw(storage), raw(expected))


@pytest.mark.parametrize("slots", [16, 15])
def test_pages_larger_than_a_block(slots: int) -> None:
    storage = pool(torch.float16, 3, 1, 2, 16, 8, 128)
    before = raw(storage).clone()
    copy_page(storage, 2, 0, slots)
    assert torch.equal(storage[0, :, :, :slots].view(torch.int16), storage[2, :, :, :slots].view(torch.int16))
    assert torch.equal(raw(storage)[1:], before[1:])
    if slots < 16:
        untouched = before.view(torch.float16).view(storage.shape)[0, :, :, slots:]
        assert torch.equal(storage[0, :, :, slots:].view(torch.int16), untouched.view(torch.int16))


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(list(KV_TAILS)),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 16, 20]),
    ids=st.lists(st.integers(0, 6), max_size=8),
)
def test_gather_pages(dtype: torch.dtype, heads: int, dim: int, ids: list[int]) -> None:
    storage = pool(dtype, 7, 2, 2, 4, heads, dim)
    before = raw(storage).clone()
    out = torch.full((len(ids) + 1, before.shape[1]), 171, dtype=torch.uint8)
    gather_pages(storage, torch.tensor(ids, dtype=torch.int64), out[:-1])
    assert torch.equal(out[:-1], before[ids])
    assert out[-1].eq(171).all(), "nothing goes behind the last page"
    assert torch.equal(raw(storage), before)


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(list(KV_TAILS)),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 16, 20]),
    ids=st.lists(st.integers(0, 6), max_size=7, unique=True),
)
def test_scatter_pages(dtype: torch.dtype, heads: int, dim: int, ids: list[int]) -> None:
    storage = pool(dtype, 7, 2, 2, 4, heads, dim)
    expected = raw(storage).clone()
    source = torch.randint(0, 256, (len(ids), expected.shape[1]), dtype=torch.uint8)
    expected[ids] = source
    scatter_pages(storage, torch.tensor(ids, dtype=torch.int64), source)
    assert torch.equal(raw(storage), expected)


def test_many_pages_larger_than_a_block_there_and_back() -> None:
    storage = pool(torch.float16, 5, 1, 2, 16, 5, 72)
    before, ids = raw(storage).clone(), torch.tensor([3, 0, 4])
    staging = torch.empty(3, before.shape[1], dtype=torch.uint8)
    gather_pages(storage, ids, staging)
    raw(storage)[ids] = 0
    scatter_pages(storage, ids, staging)
    assert before.shape[1] > 1024 * 16
    assert torch.equal(raw(storage), before)


def test_what_cannot_be_moved_is_refused() -> None:
    odd = pool(torch.float16, 3, 1, 2, 1, 1, 2)
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="pages of 8 bytes are no whole number of vectors of 16"):
        gather_pages(odd, ids, torch.empty(1, 8, dtype=torch.uint8))
    even = pool(torch.float16, 3, 1, 2, 2, 1, 8)
    for shape, dtype in (((1, 48), torch.uint8), ((2, 64), torch.uint8), ((1, 64), torch.int8)):
        with pytest.raises(ValueError, match="1 pages of 64 bytes need as many contiguous uint8"):
            scatter_pages(even, ids, torch.empty(shape, dtype=dtype))
    with pytest.raises(ValueError, match="contiguous uint8"):
        gather_pages(even, ids.expand(2), torch.empty(64, 2, dtype=torch.uint8).T)
    with pytest.raises(ValueError, match="contiguous memory only"):
        copy_page(even[::2], 0, 1, 1)
