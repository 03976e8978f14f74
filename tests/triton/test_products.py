"""Products against the reference; one row's bits alone and in all company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kernels.ops import Linear
from kernels.reference import ReferenceOps
from kernels.triton.launch import Choice
from kernels.triton.plain_products import PlainProduct
from kernels.triton.products import Checked, LooseLinear, prepare
from kernels.triton.tiles import Product, Tile, TiledLinear, alike, cancelling_rows, split

CPU = torch.device("cpu")
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def excess(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The largest error in units of what one rounding of the result and those of the sums allow."""
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    sums = x.double().abs() @ weight.double().abs().T + 1e-30
    return float(
        ((found.double() - exact).abs() / (UNIT[found.dtype] * exact.abs() + 4 * 2.0**-24 * sums)).max()
    )


def every_tile(product: Product) -> Sequence[TiledLinear]:
    return [TiledLinear(product, (tile,)) for tile in product.tiles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("out", "width"), [(1, 8), (70, 96)])
def test_plain_weights_against_float64_and_the_reference(out: int, width: int, dtype: torch.dtype) -> None:
    weight, bias = normal(out, width, dtype=dtype), normal(out, seed=1, dtype=dtype)
    for given in (None, bias):
        for linear in every_tile(PlainProduct(weight, given)):
            for rows in (1, 17, 70):
                x = normal(rows, width, seed=rows, dtype=dtype)
                found = linear(x)
                assert found.dtype == dtype
                assert excess(found, x, weight, given) < 1
                expected = ReferenceOps(CPU).linear(weight, given)(x)
                assert torch.allclose(found, expected, rtol=2 * UNIT[dtype], atol=2e-5 * width**0.5)
    assert excess(found, x, weight.roll(1, 1), bias) > 10, "the bound can fail"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    """The width is in parts here: small tiles leave adding them to another kernel, large ones do it."""
    width = 544 if dtype == torch.float32 else 1056
    product = PlainProduct(normal(66, width, dtype=dtype), normal(66, seed=1, dtype=dtype))
    assert product.split.parts > 1
    tiles = alike(product)
    assert len(tiles) > 1
    assert {tile.apart for tile in tiles} == {False, True}
    assert_alone_as_in_company(TiledLinear(product, tiles), cancelling_rows(product))


def assert_alone_as_in_company(linear: Linear, x: Tensor) -> None:
    alone = {row: linear(x[row][None])[0] for row in (5, 11)}
    assert all(float(result.abs().max()) > 0 for result in alone.values())
    for rows in (35,):
        found = linear(x.repeat(5, 1)[3 : 3 + rows])
        for at in range(rows):
            assert (at + 3) % 16 not in alone or torch.equal(found[at], alone[(at + 3) % 16]), (rows, at)


def test_a_row_of_nan_leaves_others_as_they_are() -> None:
    weight = normal(40, 96, dtype=torch.float16)
    for linear in every_tile(PlainProduct(weight, None)):
        rows = 20
        x = normal(rows, 96, seed=3, dtype=torch.float16)
        expected = linear(x)
        x[7] = float("nan")
        x[2, 5] = float("inf")
        found = linear(x)
        assert found[7].isnan().all()
        assert not found[2].isfinite().any()
        others = [row for row in range(rows) if row not in (2, 7)]
        assert torch.equal(found[others], expected[others])


def test_operands_that_begin_anywhere() -> None:
    weight = normal(24, 72)
    linear, x = prepare(weight, None, None, "float"), normal(9, 73)
    expected = linear(x[:, 1:].clone())
    assert torch.equal(linear(x[:, 1:]), expected)
    assert torch.equal(
        linear(x.flatten()[1 : 1 + 8 * 72].view(8, 72)), linear(x.flatten()[1:577].clone().view(8, 72))
    )
    assert linear(x[:0, 1:]).shape == (0, 24)


def test_what_is_refused() -> None:
    weight = normal(24, 72)
    with pytest.raises(ValueError, match="for block weights only"):
        prepare(weight, None, None, "int8")
    with pytest.raises(ValueError, match=r"weights are torch.float32, their operands torch.float16"):
        prepare(weight, None, torch.float16, "float")
    linear = prepare(weight, None, None, "float")
    for wrong in (normal(3, 71), normal(3, 72).half(), normal(72)):
        with pytest.raises(ValueError, match="operands must be"):
            linear(wrong)


def test_the_library_takes_many_rows_where_that_is_allowed() -> None:
    weight, bias = normal(24, 72), normal(24, seed=1)
    linear, exact = prepare(weight, bias, None, "float", exact=False), prepare(weight, bias, None, "float")
    assert isinstance(linear, LooseLinear)
    x = normal(200, 72, seed=2)
    assert torch.equal(linear(x[:70]), exact(x[:70]))
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight, bias))


@dataclass
class Faulty:
    """A product whose tiles differ, as instructions of a device might make them: one adds backwards."""

    weight: Tensor
    wrong: int
    runs: list[int] = field(default_factory=list)
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        self.out, self.width = self.weight.shape
        self.dtype, self.device, self.shape = self.weight.dtype, CPU, ("faulty",)
        self.tiles = tuple(replace(tile, apart=False) for tile in PlainProduct(self.weight, None).tiles)

    def dense(self) -> Tensor:
        return self.weight

    def rows_of_weight(self, outs: Sequence[int]) -> Tensor:
        return self.weight[list(outs)]

    def multiply(self, x: Tensor, y: Tensor, tile: Tile) -> None:
        self.runs.append(tile.rows)
        sums = torch.zeros(x.shape[0], self.out)
        for column in range(self.width):
            at = self.width - 1 - column if tile.rows == self.wrong else column
            sums += x[:, at, None].float() * self.weight[None, :, at].float()
        y.copy_(sums)


def test_tiles_that_are_not_alike_are_left_out() -> None:
    """The probe must see another order of additions through the rounding of results to 16 bits."""
    weight = normal(40, 96, dtype=torch.bfloat16)
    assert [tile.rows for tile in alike(Faulty(weight, wrong=0))] == [16, 32, 64, 128]
    for wrong in (32, 64, 128):
        faulty = Faulty(weight, wrong)
        left = [tile for tile in faulty.tiles if tile.rows != wrong]
        assert list(alike(faulty)) == left
        assert set(faulty.runs) == {16, 32, 64, 128}
    assert [tile.rows for tile in alike(Faulty(weight, wrong=16))] == [16]


def test_shapes_are_checked_once() -> None:
    checked: Checked = {}
    prepare(normal(24, 72), None, None, "float", checked=checked)
    prepare(normal(24, 72, seed=5), None, None, "float", checked=checked)
    assert len(checked) == 1
    tile = Tile(32, 64, 1 << 31, False, Choice(warps=2))
    checked = dict.fromkeys(checked, (tile,))
    linear = prepare(normal(24, 72), None, None, "float", checked=checked)
    assert isinstance(linear, TiledLinear)
    assert linear.tiles == (tile,)
    prepare(normal(24, 72), normal(24), None, "float", checked=checked)
    assert len(checked) == 2


def test_how_a_width_is_split() -> None:
    for out, width, step in (
        (4096, 4096, 64),
        (576, 1536, 64),
        (128256, 4096, 64),
        (5, 40, 64),
        (64, 9999, 32),
    ):
        plan = split(out, width, step, 64)
        steps = -(-width // step)
        assert plan.parts * plan.steps >= steps > (plan.parts - 1) * plan.steps, "no part is empty"
        assert plan.parts == 1 or plan.steps >= 8
    assert split(4096, 4096, 64, 64).parts == 4
    assert split(128256, 4096, 64, 64).parts == 1
