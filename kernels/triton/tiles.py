"""Which tile sizes a product uses for how many rows, and the check that a row's bits do not depend on it.

A tile computes `outs` outputs of `rows` rows. The weights are its left operand and the rows its right one
(the tile holds the result transposed): tensor cores then work with the same instruction whether a tile has
16 rows or 128, and no rows are wasted to fill one up. All tiles of a product add along the width in the same
order: the width in parts of `Split`, each part from its start to its end, the parts then in their order.
Whether a machine's instructions keep to that for every tile cannot be read from a kernel's text, so
`alike` compares on the device, when weights are prepared, and only tiles that give the smallest one's bits
stay. What they are therefore shows in no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.triton.launch import ALIGNMENT, Choice

PROBES = 16  # rows that are compared, and outputs they are made to cancel on
_TERMS = 8192.0  # sum of a probe's terms' magnitudes
_AIM = 256  # programs that a decode step should have: two or three for each multiprocessor of a large GPU
_LEAST_STEPS = 8  # of the inner loop, in each part of the width


@dataclass(frozen=True, slots=True)
class Tile:
    """`apart`, for decode steps: parts of the width are computed by programs of their own, and added by
    another kernel; else one program computes them one after the other. Used for up to `most` rows, the last
    one for all beyond.
    """

    rows: int
    outs: int
    most: int
    apart: bool
    choice: Choice

    @property
    def name(self) -> str:
        return f"{self.outs}x{self.rows}{'p' if self.apart else 's'}"


@dataclass(frozen=True, slots=True)
class Split:
    """The width in `parts` of `steps` steps of `step` weights each; the last part may be shorter."""

    step: int
    steps: int
    parts: int


class Product(Protocol):
    """A weight in the layout that kernels read, for operands of one dtype."""

    @property
    def out(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The smallest first, by rows and by `most`."""
        ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def shape(self) -> tuple[object, ...]:
        """What the kernels are compiled for: products alike in it are checked once."""
        ...

    def dense(self) -> Tensor:
        """`[out, width]` in `dtype`: all weights as they are multiplied; may be new memory."""
        ...

    def rows_of_weight(self, outs: Sequence[int]) -> Tensor:
        """`[len(outs), width]`: these outputs' weights, as they are multiplied, in `dtype`."""
        ...

    def multiply(self, x: Tensor, y: Tensor, tile: Tile) -> None:
        """`y [rows, out] = x [rows, width] @ weight.T + bias`; both contiguous and aligned."""
        ...


def split(out: int, width: int, step: int, outs: int) -> Split:
    """How the width of a weight is split: by its shape alone, so that every GPU adds in the same order."""
    steps = -(-width // step)
    tiles, parts = -(-out // outs), 1
    while tiles * parts < _AIM and steps // (2 * parts) >= _LEAST_STEPS:
        parts *= 2
    each = -(-steps // parts)
    return Split(step, each, -(-steps // each))


class TiledLinear:
    """`kernels.ops.Linear` of a product, with the tiles that are alike. result: another dtype to round to."""

    def __init__(self, product: Product, tiles: Sequence[Tile], result: torch.dtype | None = None) -> None:
        self._product = product
        self._result = result or product.dtype
        self.tiles = tuple(tiles)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._product
        if x.dtype != product.dtype or x.ndim != 2 or x.shape[1] != product.width:
            wanted = f"[rows, {product.width}] in {product.dtype}"
            raise ValueError(f"operands must be {wanted}, not {list(x.shape)} in {x.dtype}")
        y = torch.empty((x.shape[0], product.out), dtype=self._result, device=x.device)
        if x.shape[0]:
            product.multiply(aligned(x), y, tile_for(self.tiles, x.shape[0]))
        return y


def tile_for(tiles: Sequence[Tile], rows: int) -> Tile:
    return next((tile for tile in tiles if rows <= tile.most), tiles[-1])


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it that is contiguous and begins where kernels want it."""
    fits = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def alike(product: Product) -> tuple[Tile, ...]:
    """The tiles whose results have the bits of the smallest tile's, in every place of a tile.

    Random operands would be a poor probe: rounding hides nearly every difference in order. `cancelling_rows`
    makes such that exact results of some outputs are 0, so that only the order's own rounding is left.
    """
    x = cancelling_rows(product)
    smallest = product.tiles[0]
    expected = _results(product, x, smallest)
    kept = []
    for tile in product.tiles:
        copies = max(1, tile.rows // PROBES)
        crowd = torch.cat([x.roll(turn, 0) for turn in range(copies + 1)])
        found = _results(product, crowd, tile).view(copies + 1, PROBES, product.out)
        same = all(_same_bits(found[turn], expected.roll(turn, 0)) for turn in range(copies + 1))
        if same:
            kept.append(tile)
    if smallest not in kept:
        raise RuntimeError(f"rows of one tile of {smallest.rows} do not come out alike on this device")
    return tuple(kept)


def cancelling_rows(product: Product) -> Tensor:
    """`[PROBES, width]`: row i and the weights of one output, spread over all, have exact product 0.

    Weights are paired at random places a and b along the width: `x[a] = w[b]` and `x[b] = -w[a]`, times a
    power of two that makes terms large enough for what rounding leaves of them to be seen in float16, too.
    """
    outs = [(2 * turn + 1) * product.out // (2 * PROBES) for turn in range(PROBES)]
    weights = product.rows_of_weight(outs).nan_to_num(0.0, 0.0, 0.0)
    generator = torch.Generator().manual_seed(product.width)
    order = torch.randperm(product.width // 2 * 2, generator=generator).to(weights.device)
    first, second = order.chunk(2)
    x = torch.zeros_like(weights)
    x[:, first], x[:, second] = weights[:, second], -weights[:, first]
    terms = (x.float() * weights.float()).abs().sum(-1, keepdim=True).clamp(min=2.0**-100)
    return (x.float() * torch.exp2((_TERMS / terms).log2().floor())).to(x.dtype)


def _results(product: Product, x: Tensor, tile: Tile) -> Tensor:
    y = torch.empty((x.shape[0], product.out), dtype=product.dtype, device=product.device)
    product.multiply(x, y, tile)
    return y


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    """Equal, or NaN in both."""
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())
