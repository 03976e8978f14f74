"""Tokens looked up by kernels against `expand_rows`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.blocks import FORMATS, BlockMatrix, BlockRows, expand_rows
from kernels.triton.embedding import embed
from tests.unit.test_kernels_blocks import EXTREME, HALVES, random_bytes, rows_of

DTYPES = [torch.float32, torch.float16]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    nan = expected.isnan()
    kind = torch.int32 if expected.dtype == torch.float32 else torch.int16
    equal = found.view(kind) == expected.view(kind)
    return found.dtype == expected.dtype and bool((equal | (nan & found.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers(dtype: torch.dtype) -> None:
    table = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.tensor([3, 0, 8, 3])
    assert torch.equal(embed(table, tokens, dtype), table[tokens])
    assert torch.equal(embed(table, tokens, torch.float32), table[tokens].float())
    assert embed(table, tokens[:0], dtype).shape == (0, 300)
    assert torch.equal(embed(table[1:, 1:], tokens - 1 + (tokens == 0).long(), dtype)[0], table[3, 1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_blocks(name: str, dtype: torch.dtype) -> None:
    """All codes and sub-scales, over more than one program's part of a row, with a part that is not full."""
    width = 768 if FORMATS[name].weights == 256 else 288
    matrix = BlockMatrix((rows_of(name, random_bytes(name, 5, width)),), width)
    tokens = torch.tensor([4, 0, 2])
    assert same_bits(embed(matrix, tokens, dtype), expand_rows(matrix, tokens, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_extreme_scales(name: str) -> None:
    width = FORMATS[name].weights
    for at in HALVES[name]:
        raw = random_bytes(name, len(EXTREME), width)
        raw[:, at : at + 2] = EXTREME[:, None].view(np.uint8)
        matrix = BlockMatrix((rows_of(name, raw),), width)
        tokens = torch.arange(len(EXTREME))
        with np.errstate(all="ignore"):
            assert same_bits(embed(matrix, tokens, torch.float32), expand_rows(matrix, tokens, torch.float32))


def test_rows_in_several_formats_at_any_address() -> None:
    """The second run begins at no aligned address, the third has bytes between its rows."""
    spaced = torch.from_numpy(random_bytes("Q8_0", 4, 96))[:, : FORMATS["Q8_0"].row_bytes(64)]
    runs = (
        rows_of("Q4_1", random_bytes("Q4_1", 7, 64)),
        BlockRows(FORMATS["Q5_0"], torch.from_numpy(random_bytes("Q5_0", 6, 64))[1:]),
        BlockRows(FORMATS["Q8_0"], spaced),
    )
    assert runs[1].data.data_ptr() % 16
    matrix = BlockMatrix(runs, 64)
    tokens = torch.tensor([11, 0, 6, 7, 15, 0, 12, 3])
    assert same_bits(embed(matrix, tokens, torch.float32), expand_rows(matrix, tokens, torch.float32))
