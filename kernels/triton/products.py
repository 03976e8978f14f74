"""Matrix products: weights are prepared once, in the layout that the kernels read."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import BlockMatrix, Matrix
from kernels.ops import Activations, Linear, operand_dtype
from kernels.triton.block_products import BlockProduct
from kernels.triton.narrow_products import NarrowProduct
from kernels.triton.plain_products import PlainProduct
from kernels.triton.tiles import Product, Tile, TiledLinear, alike

Checked = MutableMapping[tuple[object, ...], tuple[Tile, ...]]
"""Tiles that were found alike, by `Product.shape`."""

_LIBRARY_ROWS = 192  # from here on the library's products are taken to be worth having


class LooseLinear:
    """A product that leaves many rows to torch's library: faster there, and rows without lasting bits.

    What is given up: a row's bits hang on how many rows come with it. A prompt prefilled in other chunks,
    or a prefix found in the cache instead of computed, may then lead to other tokens.

    Weights that are not numbers are expanded at each call, into memory that is free again after it: a
    lasting copy would take more memory than the codes themselves save.
    """

    def __init__(self, product: Product, tiled: TiledLinear) -> None:
        self._product = product
        self._tiled = tiled

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] < _LIBRARY_ROWS:
            return self._tiled(x)
        return F.linear(x, self._product.dense(), self._product.bias)


def numerics(exact: bool = True) -> str:
    """Names the order of all products' additions. Which tiles a device keeps does not show in any bit."""
    return "products-1" if exact else f"products-1 torch-{torch.__version__}-from-{_LIBRARY_ROWS}"


def prepare(
    weight: Matrix,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    activations: Activations,
    *,
    exact: bool = True,
    checked: Checked | None = None,
    result: torch.dtype | None = None,
) -> Linear:
    """`x @ weight.T + bias` for x in `dtype`; the device is that of the weights.

    `result`: the dtype of what comes out, where it is not that of x.

    Compares the tiles on the device, for shapes that are not in `checked` yet (and adds them). In Triton's
    interpreter, where that takes long and says nothing of a GPU, the smallest tile serves alone. Raises
    ValueError as `operand_dtype` does, and for plain weights of another dtype than their operands.

    Not `exact`: `LooseLinear` says what for and at what price; there are no such products with 8-bit
    activations, which stay exact.
    """
    product = _product(weight, bias, operand_dtype(weight, dtype, activations), activations)
    checked = {} if checked is None else checked
    if product.shape not in checked:
        checked[product.shape] = alike(product) if product.device.type != "cpu" else product.tiles[:1]
    tiled = TiledLinear(product, checked[product.shape], result)
    return tiled if exact or activations != "float" else LooseLinear(product, tiled)


def _product(weight: Matrix, bias: Tensor | None, dtype: torch.dtype, activations: Activations) -> Product:
    """The layout and kernels for a kind of weights: the one place that knows them all.

    Another kind needs a `Product` and a line here.
    """
    if isinstance(weight, BlockMatrix):
        return BlockProduct(weight, bias, dtype, activations)
    if not isinstance(weight, Tensor):
        return NarrowProduct(weight, bias, dtype)
    if weight.dtype != dtype:
        raise ValueError(f"weights are {weight.dtype}, their operands {dtype}")
    return PlainProduct(weight.contiguous(), bias)
