"""Block weights in the kernels' layout, and products with them, against their exact values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.blocks import FORMATS, BlockMatrix, expand
from kernels.ops import Activations
from kernels.reference import ReferenceOps, rounded_operands
from kernels.triton import block_layout
from kernels.triton.block_layout import pack
from kernels.triton.block_products import BlockProduct, rounded
from kernels.triton.products import LooseLinear, prepare
from kernels.triton.tiles import TiledLinear, alike, cancelling_rows
from tests.triton.test_embedding import same_bits
from tests.triton.test_products import CPU, UNIT, assert_alone_as_in_company, every_tile, excess, normal
from tests.unit.test_kernels_blocks import EXTREME, HALVES, random_bytes, rows_of

KINDS: tuple[Activations, ...] = ("float", "int8")


def matrix(*runs: tuple[str, int], width: int, seed: int = 0) -> BlockMatrix:
    made = [rows_of(name, random_bytes(name, out, width, seed + at)) for at, (name, out) in enumerate(runs)]
    return BlockMatrix(tuple(made), width)


def width_of(name: str) -> int:
    return FORMATS[name].weights + 64 * (FORMATS[name].weights == 32)  # 96: half of the last pair is missing


@pytest.fixture
def two_panels_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_layout, "_AT_ONCE", 2 * 64 * 256)


@pytest.mark.usefixtures("two_panels_at_a_time")
@pytest.mark.parametrize("name", FORMATS)
def test_layouts_keep_every_number(name: str) -> None:
    width = 256
    weight = matrix((name, 60), (name, 150), width=width)
    product, expected = BlockProduct(weight, None, torch.float32, "float"), expand(weight, torch.float32)
    assert same_bits(product.dense(), expected)
    assert torch.equal(product.rows_of_weight([63, 64, 209]), expected[[63, 64, 209]])
    (run,) = product.runs
    assert weight.nbytes / 210 <= run.nbytes / 256 <= weight.nbytes / 210 * 1.03


@pytest.mark.parametrize("name", FORMATS)
def test_extreme_scales_and_all_bytes(name: str) -> None:
    width = FORMATS[name].weights
    raw = np.random.default_rng(3).integers(0, 256, (64, FORMATS[name].row_bytes(width)), dtype=np.uint8)
    for place, at in enumerate(HALVES[name]):
        few = raw[place * len(EXTREME) :][: len(EXTREME)]
        few[:, at : at + 2] = EXTREME[:, None].view(np.uint8)
    weight = BlockMatrix((rows_of(name, raw),), width)
    with np.errstate(all="ignore"):
        assert same_bits(
            BlockProduct(weight, None, torch.float32, "float").dense(), expand(weight, torch.float32)
        )


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_products(name: str, activations: Activations) -> None:
    weight = matrix((name, 9), width=width_of(name), seed=1)
    for dtype in (torch.float32, torch.float16):
        x, bias = normal(3, weight.width, seed=2).to(dtype), normal(9, seed=3).to(dtype)
        found = prepare(weight, bias, dtype, activations)(x)
        assert found.dtype == dtype
        if activations == "int8":
            taken, numbers = rounded_operands(x), expand(weight, torch.float32)
        else:
            taken, numbers = x, expand(weight, dtype)
        assert excess(found, taken, numbers, bias) < 1
        assert excess(found, taken, numbers.roll(1, 1), bias) > 10, "the bound can fail"
        expected = ReferenceOps(CPU).linear(weight, bias, dtype=dtype, activations=activations)(x)
        assert float((found - expected).float().norm() / expected.float().norm()) < 8 * UNIT[dtype]


@pytest.mark.parametrize("activations", KINDS)
def test_every_tile_and_number_of_rows(activations: Activations) -> None:
    """Formats in turns: runs end inside panels; neighbours in one format become one."""
    weight = matrix(("Q4_1", 60), ("Q4_1", 9), ("Q8_0", 3), ("Q5_1", 0), ("Q5_0", 1), width=64)
    dtype = torch.float16
    runs = [(run.name, run.first, run.out) for run in pack(weight)]
    assert runs == [("Q4_1", 0, 69), ("Q8_0", 69, 3), ("Q5_0", 72, 1)]
    bias = normal(73, seed=3).to(dtype)
    numbers = expand(weight, torch.float32 if activations == "int8" else dtype)
    for linear in every_tile(BlockProduct(weight, bias, dtype, activations)):
        x = normal(linear.tiles[0].rows - 3, 64, seed=4).to(dtype)
        taken = rounded_operands(x) if activations == "int8" else x
        assert excess(linear(x), taken, numbers, bias) < 1


@pytest.mark.parametrize(("name", "activations"), [("Q6_K", "float"), ("Q5_1", "int8")])
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, activations: Activations) -> None:
    product = BlockProduct(matrix((name, 5), width=width_of(name)), None, torch.float16, activations)
    tiles = alike(product)
    assert len(tiles) > 1
    assert tiles == product.tiles or activations == "float", "whole numbers have no order"
    assert_alone_as_in_company(TiledLinear(product, tiles), cancelling_rows(product))


def test_a_width_in_parts() -> None:
    """Added by another kernel or by the same program: the same bits."""
    product = BlockProduct(matrix(("Q4_0", 3), width=1024), normal(3), torch.float32, "float")
    small, large = every_tile(product)
    x = normal(2, 1024, seed=5)
    found = small(x)
    assert excess(found, x, expand(matrix(("Q4_0", 3), width=1024), torch.float32), normal(3)) < 1
    assert torch.equal(large(x), found)


def test_operands_in_8_bits() -> None:
    x = normal(3, 80, seed=2) * 10  # the last pair is short
    x[1, :32] = 0
    x[1, 32:64] *= 1e-38  # too small for a scale
    x[2, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5])  # half to even
    x[2, 8:32] = 0
    operands = rounded(x)
    assert operands.x.shape == (3, 128)
    assert not operands.x[:, 80:].any()
    numbers = (operands.x.view(3, 4, 32).float() * operands.scales.T[:, :, None]).view(3, 128)[:, :80]
    assert torch.equal(numbers, rounded_operands(x))
    expected = operands.x.view(3, 4, 32).sum(-1) * operands.scales.T
    assert torch.equal(operands.spreads.T, expected)


def test_codes_see_products_after_their_rounding() -> None:
    """Values close to the middle of two codes, where a product that is not rounded would fall elsewhere."""
    x = torch.full((1, 32 * 64), 0.0)
    for group in range(64):
        most = 1.0 + group / 7
        inverse = torch.tensor(127.0) / torch.tensor(most)
        x[0, group * 32] = most
        codes = torch.arange(31) + 0.5
        x[0, group * 32 + 1 : group * 32 + 32] = codes / inverse
    operands = rounded(x)
    assert torch.equal(operands.x.view(64, 32).float() * operands.scales, rounded_operands(x).view(64, 32))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("activations", KINDS)
def test_what_is_not_finite_stays_in_its_row(activations: Activations) -> None:
    weight = matrix(("Q4_1", 6), ("Q6_K", 6), width=256)
    linear = prepare(weight, None, torch.float32, activations)
    x = normal(5, 256, seed=3)
    expected = linear(x)
    x[1, 40] = float("nan")
    x[3, 70] = -float("inf")
    found = linear(x)
    assert not found[[1, 3]].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], expected[[0, 2, 4]])


def test_the_library_takes_many_rows_where_that_is_allowed() -> None:
    weight, bias = matrix(("Q8_0", 5), width=64), normal(5)
    linear = prepare(weight, bias, torch.float32, "float", exact=False)
    assert isinstance(linear, LooseLinear)
    x = normal(200, 64, seed=2)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, expand(weight, torch.float32), bias))
    assert isinstance(prepare(weight, bias, torch.float32, "int8", exact=False), TiledLinear)


def test_what_is_refused() -> None:
    weight = matrix(("Q8_0", 5), width=64)
    with pytest.raises(ValueError, match="needs the dtype"):
        prepare(weight, None, None, "float")
    linear = prepare(weight, None, torch.float32, "float")
    wrong: Tensor = normal(3, 64).half()
    with pytest.raises(ValueError, match="operands must be"):
        linear(wrong)
