"""Norms and the MLP's gate, in Triton's interpreter, beside the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.reference import ReferenceOps
from kernels.triton import norms
from tests.cpu_builds import normal

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and infinities
REFERENCE = ReferenceOps(torch.device("cpu"))
DTYPES = [torch.float32, torch.float16]
WIDTHS = [1, 7, 33, 576, norms.WIDEST, 2 * norms.WIDEST + 3]
NAN, INF = float("nan"), float("inf")


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of additions, which may move a rounding before the weight and one after it."""
    return found.dtype == expected.dtype and torch.allclose(
        found.double(), expected.double(), rtol=2e-6 if found.dtype == torch.float32 else 2e-3, atol=1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = (normal(3, width) * 5).to(dtype), normal(width, seed=1).to(dtype)
    assert close(norms.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_that_lie_inside_wider_rows(dtype: torch.dtype) -> None:
    x, weight = normal(3, 7, 24).to(dtype), normal(24, seed=1).to(dtype)
    found = norms.rms_norm(x[:, 2:5], weight, 1e-6)
    assert found.shape == (3, 3, 24)
    assert close(found, REFERENCE.rms_norm(x[:, 2:5], weight, 1e-6))


def test_roundings_are_those_of_the_reference() -> None:
    """Squares of 1 and 7 add up exactly in any order; 0.2 in fp16 differs from what a late rounding keeps."""
    x = torch.tensor([[1.0, 7.0, -7.0, -1.0] * 10], dtype=torch.float16)
    weight = normal(40, seed=1).to(torch.float16)
    found = norms.rms_norm(x, weight, 0.0)
    assert torch.equal(found, REFERENCE.rms_norm(x, weight, 0.0))
    late = (x.float() * 0.2 * weight.float()).to(torch.float16)
    assert not torch.equal(found, late), "the two roundings can be told from one"
    again, total = norms.add_rms_norm(x / 2, x / 2, weight, 0.0)
    assert torch.equal(total, x)
    assert torch.equal(again, found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, residual = normal(3, width).to(dtype), (normal(3, width, seed=1) * 5).to(dtype)
    weight, given = normal(width, seed=2).to(dtype), residual.clone()
    expected = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    normed, total = norms.add_rms_norm(x, given, weight, 1e-6)
    assert torch.equal(total, expected[1])
    assert total.data_ptr() == given.data_ptr()
    assert close(normed, expected[0])


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    x, residual = (
        torch.full((1, 8), 1.0, dtype=torch.float16),
        torch.full((1, 8), 2048.0, dtype=torch.float16),
    )
    ones = torch.ones(8, dtype=torch.float16)
    normed, total = norms.add_rms_norm(x, residual, ones, 0.0)
    assert total.eq(2048).all(), "2049 is no fp16"
    assert normed.eq(1).all()


def test_rows_with_gaps_are_not_added() -> None:
    x = normal(3, 16)
    with pytest.raises(ValueError, match="contiguous"):
        norms.add_rms_norm(x[:, :8], x[:, 8:], torch.ones(8), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 1027])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    x = (normal(3, 2 * width) * 4).to(dtype)
    assert close(norms.silu_mul(x), REFERENCE.silu_mul(x))


def test_silu_of_extremes() -> None:
    x = torch.tensor([[-200.0, 200.0, NAN, 0.0, 1.0, 1.0, 1.0, INF]])
    found = norms.silu_mul(x)
    assert torch.equal(found[:, :2], torch.tensor([[0.0, 200.0]]))
    assert found[:, 2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, norms.WIDEST + 40])
def test_a_rows_bits_do_not_hang_on_its_company(dtype: torch.dtype, width: int) -> None:
    x = normal(6, width).to(dtype)
    x[1], x[4] = NAN, INF
    weight = normal(width, seed=1).to(dtype)
    together = norms.rms_norm(x, weight, 1e-6)
    added, _ = norms.add_rms_norm(x, x.flip(0).contiguous(), weight, 1e-6)
    both = torch.cat((x, x.roll(1, dims=1)), dim=1)
    gated = norms.silu_mul(both)
    for row in (0, 3, 5):
        alone = slice(row, row + 1)
        assert torch.equal(norms.rms_norm(x[alone].clone(), weight, 1e-6)[0], together[row])
        assert torch.equal(norms.silu_mul(both[alone].clone())[0], gated[row])
    for row in (2, 3):
        again, _ = norms.add_rms_norm(x[row : row + 1].clone(), x[5 - row : 6 - row].clone(), weight, 1e-6)
        assert torch.equal(again[0], added[row])


def test_no_rows() -> None:
    empty, weight = torch.empty(0, 16), torch.ones(16)
    assert norms.rms_norm(empty, weight, 1e-6).shape == (0, 16)
    assert norms.add_rms_norm(empty, empty.clone(), weight, 1e-6)[0].shape == (0, 16)
    assert norms.silu_mul(empty).shape == (0, 8)
