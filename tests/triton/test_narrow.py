"""Triton's products with FP8 and 4-bit weights: against expanded numbers, and bits alone and in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.blocks import expand, expand_rows
from kernels.narrow import GroupedMatrix, NarrowMatrix, ScaledMatrix
from kernels.triton.embedding import embed
from kernels.triton.narrow_products import NarrowProduct, cases, prepare_narrow, run_of, split_of, step_of
from kernels.triton.products import prepare
from tests.unit.test_kernels_narrow import drawn, grouped, ordered, scaled

TIGHT = {torch.float32: 1e-6, torch.float16: 1e-3}
"""Of the largest result: sums in float32; in float16 the rounding at the end."""

MATRICES: dict[str, NarrowMatrix] = {
    "fp8-blocks": scaled(70, 160, 24, 64),
    "fp8-rows": scaled(33, 72, 1, 72),
    "fp8-rows-unaligned": scaled(5, 51, 1, 51),
    "fp8-tensor": scaled(40, 256, 40, 256),
    "int4-groups": grouped(50, 160, 64),
    "int4-small-groups": grouped(24, 96, 32),
    "int4-rows": grouped(70, 96, 96),
    "int4-rows-long": grouped(16, 160, 160),
    "int4-order": grouped(40, 256, 128, ordered(256)),
}


def tokens(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype) / inputs**0.5


@pytest.mark.parametrize("dtype", TIGHT)
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_those_of_the_numbers(name: str, dtype: torch.dtype) -> None:
    matrix = MATRICES[name]
    bias = torch.linspace(-1, 1, matrix.shape[0]).to(dtype)
    x = tokens(37, matrix.shape[1], dtype)
    exact = x.double() @ expand(matrix, torch.float64).T
    for given, expected in ((None, exact), (bias, exact + bias.double())):
        found = prepare_narrow(matrix, given, dtype)(x)
        assert found.dtype == dtype
        assert found.shape == expected.shape
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < TIGHT[dtype]


@pytest.mark.parametrize(
    ("matrix", "dtype"),
    [
        (scaled(40, 96, 24, 64), torch.float32),
        (scaled(20, 96, 24, 64), torch.float16),
        (scaled(20, 72, 1, 72), torch.float16),
        (grouped(40, 96, 64), torch.float32),
        (grouped(20, 96, 64), torch.float16),
        (grouped(20, 96, 32, ordered(96)), torch.float32),
    ],
)
def test_a_row_alone_or_in_company_has_the_same_bits(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    product = prepare_narrow(matrix, None, dtype)
    x = tokens(67, matrix.shape[1], dtype)
    together = product(x)
    for start, end in ((0, 1), (66, 67), (3, 8), (31, 64)):
        assert torch.equal(product(x[start:end].clone()), together[start:end])
        assert torch.equal(product(x[start:end]), together[start:end]), "a view, perhaps not aligned"
    order = torch.randperm(67, generator=torch.Generator().manual_seed(0))
    assert torch.equal(product(x[order]), together[order])
    company = x.clone()
    company[1:] = torch.nan
    assert torch.equal(product(company)[:1], together[:1])


def test_every_fp8_code_in_every_dtype() -> None:
    """One operand of 1 at a time takes single codes out: each is exact, small numbers too."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes[codes % 128 == 127] = 0
    matrix = ScaledMatrix(codes, torch.ones(1, 1), 8, 32)
    for dtype in TIGHT:
        found = prepare_narrow(matrix, None, dtype)(torch.eye(32, dtype=dtype))
        assert torch.equal(found.T.to(torch.float32), expand(matrix, torch.float32))


def test_every_4_bit_code_with_every_zero() -> None:
    codes = drawn(16, 16, below=256)
    zeros = torch.arange(16, dtype=torch.uint8)[None]
    matrix = GroupedMatrix(codes, torch.ones(1, 16, dtype=torch.float16), zeros, 32)
    for dtype in TIGHT:
        found = prepare_narrow(matrix, None, dtype)(torch.eye(32, dtype=dtype))
        assert torch.equal(found.T.to(torch.float32), expand(matrix, torch.float32))


def test_no_rows_and_wrong_ones() -> None:
    product = prepare_narrow(MATRICES["int4-groups"], None, torch.float32)
    assert product(torch.empty(0, 160)).shape == (0, 50)
    for x in (torch.empty(2, 96), torch.empty(2, 160, dtype=torch.float16), torch.empty(160)):
        with pytest.raises(ValueError, match="operands"):
            product(x)


@pytest.mark.parametrize(
    ("matrix", "dtype"),
    [
        (scaled(9, 530, 24, 32), torch.float32),
        (scaled(9, 1050, 1, 1050), torch.float32),
        (grouped(9, 544, 32), torch.float16),
        (grouped(9, 1056, 1056), torch.float32),
    ],
)
def test_parts_by_programs_of_their_own_show_in_no_bit(matrix: NarrowMatrix, dtype: torch.dtype) -> None:
    product = NarrowProduct(matrix, torch.linspace(-1, 1, 9).to(dtype), dtype)
    assert split_of(*matrix.shape, run_of(matrix), dtype).parts == 2
    x = tokens(19, matrix.shape[1], dtype)
    first = product.tiles[0]
    assert first.apart
    apart, together, larger = (torch.empty(19, 9, dtype=dtype) for _ in range(3))
    product.multiply(x, apart, first)
    product.multiply(x, together, replace(first, apart=False))
    assert torch.equal(apart, together)
    product.multiply(x, larger, product.tiles[-1])
    assert torch.allclose(larger.float(), apart.float(), rtol=1e-3, atol=1e-3)


def test_the_dispatch_knows_these_weights() -> None:
    for name in ("fp8-blocks", "int4-order"):
        matrix = MATRICES[name]
        x = tokens(3, matrix.shape[1], torch.float32)
        expected = prepare_narrow(matrix, None, torch.float32)(x)
        assert torch.equal(prepare(matrix, None, torch.float32, "float")(x), expected)
        with pytest.raises(ValueError, match="int8 activations are for block weights only"):
            prepare(matrix, None, torch.float32, "int8")


def test_tokens_are_looked_up_in_such_embeddings() -> None:
    rows = torch.tensor([4, 0, 2, 4])
    for name in ("fp8-blocks", "int4-order"):
        expected = expand_rows(MATRICES[name], rows, torch.float16)
        assert torch.equal(embed(MATRICES[name], rows, torch.float16), expected)


def test_steps_do_not_reach_over_runs_of_scales() -> None:
    runs = (32, 64, 96, 128, 192, 256, 300)
    assert [step_of(256, run, torch.float16) for run in runs] == [32, 64, 32, 128, 64, 128, 128]
    assert [step_of(256, run, torch.float32) for run in runs] == [32, 64, 32, 64, 64, 64, 64]


def test_cases_name_every_argument_once() -> None:
    for capability in (80, 90):
        listed = list(cases(capability))
        assert len({case.name for case in listed}) == len(listed) > 0
        for case in listed:
            given = [*case.signature, *case.constants, *case.choice.tiles]
            assert sorted(given) == sorted(case.kernel.arg_names)
            assert case.constants.get("HARDWARE", capability >= 89) == (capability >= 89)
