"""What a step sends and fetches: one run of memory each way, and the same values."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from agentserve.executor.transfers import packed, to_device, to_host, unpacked

CPU = torch.device("cpu")


def parts_of(seed: int) -> list[Tensor]:
    order = random.Random(seed)
    shapes = [(order.randint(0, 9),) * order.randint(1, 2) for _ in range(order.randint(1, 6))]
    return [torch.randint(-(2**40), 2**40, shape) for shape in shapes]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_packed_comes_out_again_each_part_where_kernels_want_it(seed: int) -> None:
    parts = parts_of(seed)
    flat, starts = packed(parts)
    found = unpacked(flat, parts, starts)
    for part, copy in zip(parts, found, strict=True):
        assert torch.equal(part, copy)
        assert (copy.data_ptr() - flat.data_ptr()) % 16 == 0
        assert copy.is_contiguous()
        assert not copy.numel() or copy.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_on_the_cpu_nothing_is_copied() -> None:
    parts = parts_of(1)
    assert [part.data_ptr() for part in to_device(parts, CPU)] == [part.data_ptr() for part in parts]
    assert [part.data_ptr() for part in to_host(parts)] == [part.data_ptr() for part in parts]
    assert to_host([]) == []


def test_to_another_device_it_is_one_copy() -> None:
    """The meta device has no bytes: that all parts share one memory is what can be seen there."""
    parts = [torch.arange(5), torch.arange(6).view(2, 3)]
    found = to_device(parts, torch.device("meta"))
    assert [part.shape for part in found] == [part.shape for part in parts]
    assert [part.storage_offset() for part in found] == [0, 6]
    assert len({part.untyped_storage()._cdata for part in found}) == 1
