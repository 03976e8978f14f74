"""What can be tuned: kernels with more than one good `Choice`, at the shapes of realistic models.

Only warps and stages of products' tiles so far: which tiles there are follows from what keeps a row's bits
the same (`kernels.triton.tiles`), and the other kernels' blocks follow from sizes of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.triton.launch import Choice
from kernels.triton.plain_products import TILES, PlainProduct, linear_shapes
from kernels.triton.shapes import MODELS, STEPS
from kernels.triton.tiles import Tile
from kernels.triton.tuning import Tunable, product_key

_REDUCED = (3, 48, 80)  # rows, outputs, width
_MOST_ROWS = 512  # of a tile that is used for any number of rows


def tunables() -> Sequence[Tunable]:
    """All of them, each (kernel, key) once."""
    found: dict[tuple[str, str], Tunable] = {}
    for one in _products():
        found.setdefault((one.kernel, one.key), one)
    return tuple(found.values())


def _products() -> Iterator[Tunable]:
    for model in MODELS:
        for dtype in STEPS:
            for out, width, _ in linear_shapes(model):
                for tile in TILES[dtype.itemsize]:
                    yield Tunable(
                        kernel="product",
                        key=product_key(dtype, out, width, tile.name),
                        default=tile.choice,
                        candidates=[
                            Choice(tile.choice.tiles, warps, stages)
                            for warps in (4, 8)
                            for stages in (2, 3, 4, 5, 6)
                        ],
                        prepare=partial(_prepared, dtype, out, width, tile),
                    )


def _prepared(
    dtype: torch.dtype, out: int, width: int, tile: Tile, device: torch.device, reduced: bool
) -> Callable[[Choice], Tensor]:
    rows = min(tile.most, _MOST_ROWS)
    if reduced:
        rows, out, width = _REDUCED
        dtype = torch.float16  # the interpreter has no products in bfloat16
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    weight = torch.randn(out, width, generator=generator, device=device).to(dtype)
    product = PlainProduct(weight, None)

    def run(choice: Choice) -> Tensor:
        y = torch.empty(rows, out, dtype=dtype, device=device)
        product.multiply(x, y, replace(tile, choice=choice))
        return y

    return run
