"""The best token of a row, and a token drawn from it, on the device: no logits cross to the host.

A draw goes by the rules of the executor's `filters`, over weights that are whole numbers: with `scale` a
power of two, weight = exp((logit - peak) / temperature) * scale to the nearest, exp in float64. All that
follows is exact, so it has one result whatever the order of additions:

- top-k keeps all that tie with the k-th largest logit;
- top-p keeps the fewest largest weights that come to at least top_p * their sum (this product in float64),
  equal ones in the order of ids, at least one;
- min-p leaves those of at least min_p * scale, to the nearest;
- the token is the first, by id, whose running sum is above floor(u * sum), u of (seed, position) by Philox.

The host adds up float64 numbers that are not rounded to units. The two may choose differently only where u or
top_p falls within `vocab` units of an edge between tokens (2^-26 of the best token's weight at most, see
`scale_bits`), where top-p's last place is between weights that are equal in units, or where min_p is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.ops import Draw
from kernels.triton import sampling_kernels as kernels
from kernels.triton.launch import Case, Choice, Kernel, launch
from kernels.triton.philox import key_words, philox_cases

SCRATCH_BYTES = 128 << 20
"""What weights may take at a time; more rows are drawn one lot after the other. A row does not notice."""

_TILE = 4096
_WARPS, _WARPS_AGAIN = 8, 16  # of kernels that see each number once, and of those that go over a row
_MERGE = Choice({}, warps=1, stages=1)
# Nothing of these shows in any bit: what is added up are integers.

_VOCABULARIES = (49152, 128256, 152064, 262144)
_POINTERS = {
    "logits": "*fp32",
    "peaks": "*fp32",
    "ids": "*i32",
    "fine": "*i32",
    "best": "*i64",
    "finite": "*i1",
    "requests": "*i64",
    "cuts": "*i32",
    "units": "*i64",
    "parts": "*i64",
    "least": "*i64",
    "last": "*i64",
    "tokens": "*i64",
}


def scale_bits(vocab: int) -> int:
    """log2 of `scale`: all weights together stay below 2^63, and each is exact in a float64."""
    return min(52, 62 - (vocab - 1).bit_length())


def best_of(logits: Tensor, tile: int = _TILE) -> tuple[Tensor, Tensor]:
    """`(best [rows] int64, finite [rows] bool)` of `logits [rows, vocab]` float32: the lowest id among the
    greatest, and whether none is infinite or NaN (else `best` is some id). Nothing waits for the device."""
    rows, vocab = logits.shape
    peaks, ids, fine = _parts(logits, tile)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    sizes = _sizes(vocab, tile)
    launch(kernels.best_rows, (rows,), peaks, ids, fine, best, finite, choice=_MERGE, vocab=vocab, **sizes)
    return best, finite


@dataclass(frozen=True, slots=True)
class TritonDrawing:
    """`kernels.ops.Drawing`. `tile` and `scratch_bytes` show in no token."""

    tile: int = _TILE
    scratch_bytes: int = SCRATCH_BYTES

    def __call__(self, values: Tensor, draws: Sequence[Draw]) -> Tensor:
        """-inf is a token that is never drawn, unless all are -inf: then all are alike. Where a row has a NaN
        or +inf the token is some id. Raises ValueError for another number of draws than rows."""
        rows, vocab = values.shape
        if rows != len(draws):
            raise ValueError(f"{len(draws)} draws for {rows} rows of logits")
        tokens = torch.empty(rows, dtype=torch.int64, device=values.device)
        if rows == 0:
            return tokens
        peaks, _, _ = _parts(values, self.tile)
        requests = packed(draws, vocab).to(values.device, non_blocking=True)
        width = triton.cdiv(vocab, self.tile) * self.tile
        # Fours of rows begin aligned in every tensor.
        lot = max(4, self.scratch_bytes // (width * 8) // 4 * 4)
        units = torch.empty((min(lot, rows), width), dtype=torch.int64, device=values.device)
        for start in range(0, rows, lot):
            few = slice(start, start + lot)
            self._draw(values[few], draws[few], requests[few], peaks[few], units, tokens[few])
        return tokens

    def _draw(
        self,
        values: Tensor,
        draws: Sequence[Draw],
        requests: Tensor,
        peaks: Tensor,
        units: Tensor,
        tokens: Tensor,
    ) -> None:
        """Fill `tokens`. A kernel that no row asks for is left out: it leaves alone what other rows have."""
        rows, vocab = values.shape
        sizes, device = _sizes(vocab, self.tile), values.device
        tiles, model = sizes["tiles"], {"vocab": vocab, "stride": values.stride(0)}
        scale = 1 << scale_bits(vocab)
        once, again = Choice({"tile": self.tile}, _WARPS, 1), Choice({"tile": self.tile}, _WARPS_AGAIN, 1)
        logits, weights = (values, requests, peaks), (units, requests)
        cuts = torch.full((rows,), kernels.LOWEST.value, dtype=torch.int32, device=device)
        if any(0 < one.top_k < vocab for one in draws):
            launch(kernels.top_k_cuts, (rows,), *logits, cuts, choice=again, **model, **sizes)
        parts = torch.empty((rows, tiles), dtype=torch.int64, device=device)
        launch(
            kernels.weigh,
            (rows, tiles),
            *logits,
            cuts,
            units,
            parts,
            choice=once,
            scale=scale,
            **model,
            **sizes,
        )
        least = torch.zeros(rows, dtype=torch.int64, device=device)
        last = torch.full((rows,), tiles * self.tile, dtype=torch.int64, device=device)
        if any(one.top_p < 1.0 for one in draws):
            launch(
                kernels.nuclei,
                (rows,),
                *weights,
                peaks,
                parts,
                least,
                last,
                choice=again,
                scale=scale,
                **sizes,
            )
        if any(one.top_p < 1.0 or one.min_p > 0.0 for one in draws):
            launch(kernels.kept_parts, (rows, tiles), *weights, least, last, parts, choice=once, tiles=tiles)
        launch(kernels.pick, (rows,), *weights, least, last, parts, tokens, choice=once, vocab=vocab, **sizes)


def packed(draws: Sequence[Draw], vocab: int) -> Tensor:
    """`[rows, FIELDS]` int64 as kernels read it; floats are there as their bits. A top-k that leaves out
    nothing is 0."""
    numbers = np.zeros((len(draws), kernels.FIELDS.value), dtype=np.int64)
    floats = numbers.view(np.float64)
    scale = 1 << scale_bits(vocab)
    key = kernels.KEY.value
    for row, one in enumerate(draws):
        floats[row, kernels.TEMPERATURE.value] = one.temperature
        floats[row, kernels.TOP_P.value] = one.top_p
        numbers[row, kernels.TOP_K.value] = one.top_k if 0 < one.top_k < vocab else 0
        numbers[row, kernels.FLOOR.value] = int(min(max(one.min_p, 0.0), 1.0) * scale + 0.5)
        numbers[row, key], numbers[row, key + 1] = key_words(one.seed)
        numbers[row, kernels.POSITION.value] = one.position
    return torch.from_numpy(numbers)


def _parts(logits: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row and tile: the greatest logit, its lowest id, whether all are finite."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, tile)
    peaks = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    fine = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    launch(
        kernels.best_parts,
        (rows, tiles),
        *(logits, peaks, ids, fine),
        choice=Choice({"tile": tile}, _WARPS, 1),
        vocab=vocab,
        stride=logits.stride(0),
    )
    return peaks, ids, fine


def _sizes(vocab: int, tile: int) -> dict[str, int]:
    tiles = triton.cdiv(vocab, tile)
    return {"tiles": tiles, "width": triton.next_power_of_2(tiles)}


def cases() -> Iterable[Case]:
    """Every kernel for the vocabularies of realistic models; the rows of a buffer lie `vocab` apart."""
    yield from philox_cases()
    once, again = Choice({"tile": _TILE}, _WARPS, 1), Choice({"tile": _TILE}, _WARPS_AGAIN, 1)
    for vocab in _VOCABULARIES:
        sizes = _sizes(vocab, _TILE)
        model = {"vocab": vocab, "stride": vocab}
        scale = {"scale": 1 << scale_bits(vocab)}
        listed: tuple[tuple[Kernel, dict[str, int], Choice], ...] = (
            (kernels.best_parts, model, once),
            (kernels.best_rows, {"vocab": vocab, **sizes}, _MERGE),
            (kernels.top_k_cuts, {**model, **sizes}, again),
            (kernels.weigh, {**model, **scale, **sizes}, once),
            (kernels.nuclei, {**scale, **sizes}, again),
            (kernels.kept_parts, {"tiles": sizes["tiles"]}, once),
            (kernels.pick, {"vocab": vocab, **sizes}, once),
        )
        for what, constants, choice in listed:
            signature = {name: _POINTERS[name] for name in what.arg_names if name in _POINTERS}
            yield Case(f"{what.__name__}-{vocab}", what, signature, constants, choice, decode=True)
