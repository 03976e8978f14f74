"""Kernels that choose a token for each row of logits. The rules are told in `sampling.py`.

Everything that is added up is an integer, and what is compared is compared exactly: how a row is cut into
tiles, how many warps add and in which order cannot show in any result, nor can the rows beside it.

Kernels over `(rows, tiles)` look at each number once; those over `(rows,)` go over a row several times.
`requests [rows, FIELDS]` int64 says how each row is drawn (`sampling.packed`); `units [rows, tiles * tile]`
int64 are the weights, 0 for what may not be drawn; `parts` are one number per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.launch import kernel
from kernels.triton.philox import philox_word

FIELDS = tl.constexpr(8)
TEMPERATURE = tl.constexpr(0)  # float64
TOP_P = tl.constexpr(1)  # float64
TOP_K = tl.constexpr(2)
FLOOR = tl.constexpr(3)  # the least weight that min-p leaves
KEY = tl.constexpr(4)  # two words
POSITION = tl.constexpr(6)

LOWEST = tl.constexpr(-2139095041)  # `_ordered` of -inf
_INFINITY = tl.constexpr(0x7F800000)  # its bits


@triton.jit
def _ordered(values):
    """float32 as int32 in the same order; -0.0 is 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _row_peak(peaks, row, tiles: tl.constexpr, width: tl.constexpr):
    part = tl.arange(0, width)
    return tl.max(tl.load(peaks + row * tiles + part, mask=part < tiles, other=float("-inf")), axis=0)


@triton.jit
def _between(low, high):
    """A whole number above `low` and at most `high`, about where they halve on a scale of float64's bits:
    in ratio where they are far apart, in the middle where they are near."""
    first = low.to(tl.float64).to(tl.int64, bitcast=True)
    last = high.to(tl.float64).to(tl.int64, bitcast=True)
    middle = ((first + last) >> 1).to(tl.float64, bitcast=True).to(tl.int64)
    return tl.minimum(tl.maximum(middle, low) + 1, high)


@triton.jit
def _threshold(data, low, high, whole, goal, vocab: tl.constexpr, tile: tl.constexpr, counts: tl.constexpr):
    """The greatest key such that all keys from it on together reach `goal`, what they come to, and what those
    above it come to.

    `data` are logits, ordered, each of which counts 1 (`counts`), or weights that count what they are. All
    keys from `low` on come to `whole`, which reaches the goal; `high` is the greatest key there is.
    """
    reached = whole
    above = whole - whole
    while low < high:
        if counts:
            pivot = ((low + high) >> 1) + 1
        else:
            pivot = _between(low, high)
        sums = tl.zeros((tile,), tl.int64)
        least = tl.zeros((tile,), tl.int64) + high
        most = tl.zeros((tile,), tl.int64) + low
        for start in range(0, vocab, tile):
            at = start + tl.arange(0, tile)
            inside = at < vocab
            if counts:
                keys = _ordered(tl.load(data + at, mask=inside, other=0.0)).to(tl.int64)
                amounts = tl.full((tile,), 1, tl.int64)
            else:
                keys = tl.load(data + at, mask=inside, other=0)
                amounts = keys
            over = keys >= pivot
            sums += tl.where(inside & over, amounts, 0)
            least = tl.minimum(least, tl.where(inside & over, keys, high))
            most = tl.maximum(most, tl.where(inside & (keys < pivot), keys, low))
        found = tl.sum(sums, axis=0)
        enough = found >= goal
        low = tl.where(enough, tl.min(least, axis=0), low)
        reached = tl.where(enough, found, reached)
        high = tl.where(enough, high, tl.max(most, axis=0))
        above = tl.where(enough, above, found)
    return low, reached, above


@triton.jit
def _kept(units, at, least, last, floor):
    """The weights that top-p and min-p leave: above `least`, or equal to it and not behind `last`."""
    inside = (units > least) | ((units == least) & (at <= last))
    return tl.where(inside & (units >= floor), units, 0)


@kernel()
def best_parts(logits, peaks, ids, fine, vocab: tl.constexpr, stride: tl.constexpr, tile: tl.constexpr):
    """Each tile's greatest logit, its lowest id, and whether all are finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < vocab
    values = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    sizes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # without the sign, in order; NaN above infinity
    peak = tl.max(tl.where(sizes <= _INFINITY, values, float("-inf")), axis=0)
    first = tl.min(tl.where(inside & (values == peak), at, vocab - 1), axis=0)
    all_fine = tl.max(tl.where(inside, sizes, 0), axis=0) < _INFINITY
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + part, peak)
    tl.store(ids + part, first)
    tl.store(fine + part, all_fine.to(tl.int32))


@kernel()
def best_rows(peaks, ids, fine, best, finite, tiles: tl.constexpr, width: tl.constexpr, vocab: tl.constexpr):
    """The tiles' findings put together. `best` is an id of the vocabulary whatever the logits are."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, width)
    inside = part < tiles
    values = tl.load(peaks + row * tiles + part, mask=inside, other=float("-inf"))
    firsts = tl.load(ids + row * tiles + part, mask=inside, other=vocab - 1)
    all_fine = tl.min(tl.load(fine + row * tiles + part, mask=inside, other=1), axis=0)
    peak = tl.max(values, axis=0)
    tl.store(best + row, tl.min(tl.where(values == peak, firsts, vocab - 1), axis=0).to(tl.int64))
    tl.store(finite + row, all_fine != 0)


@kernel()
def top_k_cuts(
    logits, requests, peaks, cuts,
    vocab: tl.constexpr, stride: tl.constexpr, tiles: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`cuts [rows]` int32, where a row asks for top-k: the k-th largest logit, ordered."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(requests + row * FIELDS + TOP_K)
    if k > 0:
        high = _ordered(_row_peak(peaks, row, tiles, width)).to(tl.int64)
        low = high - high + LOWEST
        whole = high - high + vocab
        cut, _, _ = _threshold(logits + row * stride, low, high, whole, k, vocab, tile, True)
        tl.store(cuts + row, cut.to(tl.int32))


@kernel()
def weigh(
    logits, requests, peaks, cuts, units, parts,
    vocab: tl.constexpr, stride: tl.constexpr, tiles: tl.constexpr, width: tl.constexpr,
    scale: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`units`: exp((logit - peak) / temperature) * scale, to the nearest whole number; 0 below the cut."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < vocab
    values = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    peak = _row_peak(peaks, row, tiles, width)
    temperature = tl.load(requests + row * FIELDS + TEMPERATURE).to(tl.float64, bitcast=True)
    # Equal to the peak is the peak, also where all are -inf: then each token is as good as any other.
    top = tl.where(peak == float("-inf"), 0.0, peak).to(tl.float64)
    below = tl.where(values == peak, 0.0, values.to(tl.float64) - top)
    weights = (tl.exp(below / temperature) * scale + 0.5).to(tl.int64)
    weights = tl.where(inside & (_ordered(values) >= tl.load(cuts + row)), weights, 0)
    tl.store(units + row * (tiles * tile) + at, weights)
    tl.store(parts + row * tiles + tl.program_id(1), tl.sum(weights, axis=0))


@kernel()
def nuclei(
    units, requests, peaks, parts, least, last,
    tiles: tl.constexpr, width: tl.constexpr, scale: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`least` and `last [rows]` int64 of `_kept`, where a row asks for top-p."""
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(requests + row * FIELDS + TOP_P).to(tl.float64, bitcast=True)
    peak = _row_peak(peaks, row, tiles, width)
    if (top_p < 1.0) & (peak > float("-inf")):
        part = tl.arange(0, width)
        whole = tl.sum(tl.load(parts + row * tiles + part, mask=part < tiles, other=0), axis=0)
        product = top_p * whole.to(tl.float64)
        goal = product.to(tl.int64)
        goal += (goal.to(tl.float64) < product).to(tl.int64)
        goal = tl.minimum(tl.maximum(goal, 1), whole)
        data = units + row * (tiles * tile)
        one = whole - whole + 1
        high = one * scale
        found, reached, above = _threshold(data, one, high, whole, goal, tiles * tile, tile, False)
        ties = (reached - above) // found
        wanted = tl.minimum((goal - above + found - 1) // found, ties)
        tl.store(least + row, found)
        if wanted < ties:
            seen = one - one
            end = one - one
            for start in range(0, tiles * tile, tile):
                at = start + tl.arange(0, tile)
                same = tl.load(data + at) == found
                rank = seen + tl.cumsum(same.to(tl.int64), axis=0)
                end = tl.maximum(end, tl.max(tl.where(same & (rank <= wanted), at, 0), axis=0).to(tl.int64))
                seen += tl.sum(same.to(tl.int64), axis=0)
            tl.store(last + row, end)


@kernel()
def kept_parts(units, requests, least, last, parts, tiles: tl.constexpr, tile: tl.constexpr):
    """What each tile's kept weights come to."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    floor = tl.load(requests + row * FIELDS + FLOOR)
    weights = tl.load(units + row * (tiles * tile) + at)
    kept = _kept(weights, at, tl.load(least + row), tl.load(last + row), floor)
    tl.store(parts + row * tiles + tl.program_id(1), tl.sum(kept, axis=0))


@kernel()
def pick(
    units, requests, least, last, parts, tokens,
    vocab: tl.constexpr, tiles: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The first token, by id, whose kept weights with all before it come to more than u times all of them."""
    row = tl.program_id(0).to(tl.int64)
    request = requests + row * FIELDS
    word = philox_word(
        tl.load(request + KEY).to(tl.uint64),
        tl.load(request + KEY + 1).to(tl.uint64),
        tl.load(request + POSITION).to(tl.uint64),
    )
    part = tl.arange(0, width)
    amounts = tl.load(parts + row * tiles + part, mask=part < tiles, other=0)
    whole = tl.sum(amounts, axis=0)
    # u has 53 bits: as a fraction of 2^64 it is exact, and so is the whole part of its product.
    target = tl.umulhi((word >> 11) << 11, whole.to(tl.uint64)).to(tl.int64)
    over = tl.cumsum(amounts, axis=0) <= target
    before = tl.sum(tl.where(over, amounts, 0), axis=0)
    chosen = tl.minimum(tl.sum(over.to(tl.int32), axis=0), tiles - 1)
    at = chosen * tile + tl.arange(0, tile)
    weights = tl.load(units + row * (tiles * tile) + at)
    kept = _kept(weights, at, tl.load(least + row), tl.load(last + row), tl.load(request + FLOOR))
    passed = tl.sum((before + tl.cumsum(kept, axis=0) <= target).to(tl.int32), axis=0)
    tl.store(tokens + row, tl.minimum(chosen * tile + passed, vocab - 1).to(tl.int64))
