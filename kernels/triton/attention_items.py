"""How one step's attention is cut into items, and how a plan of them is written for the kernels.

Nothing here decides bits (`attention.py`): which tokens share an item, whether a token's segments are
items of their own or one, and in which order items come is chosen for speed and for room.

- One token: an item per segment, so that few long sequences fill the device. Where the pages of a whole
  segment are the same for several rows, these share the item, and its K and V are read once for all.
- Many tokens: blocks of them, each one item, unless that makes few programs.
- Where partial results would take more room than there is, the shortest tokens' segments stay together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.ops import Span

Ints = NDArray[np.int64]

HEADER, ITEM, ENTRY, PARTS = 8, 8, 4, 2  # numbers of each, as `attention.py` reads them
_FEW_PROGRAMS = 256  # programs that hardly fill a device: blocks of tokens are then cut by segments, too


@dataclass(frozen=True, slots=True)
class Cut:
    """What cutting depends on. `tokens`: of an item, at most; `segment` in keys; `partials`: room."""

    tokens: int
    segment: int
    slots: int
    kv_heads: int
    window: int | None
    partials: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A step for the kernels. `shared_keys`: keys that rows have from another row's reading."""

    packed: NDArray[np.int32]
    items: int
    partials: int
    shared_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Consecutive segments of blocks, each with the number of its item; `partial` -1: written whole."""

    block: Ints
    first: Ints
    end: Ints
    partial: Ints  # of the block's first token, for `first`
    item: Ints


def blocks_of(spans: Sequence[Span], most: int) -> Ints:
    """`[blocks, 4]`: table, first row, tokens (`most` at most), position of the first."""
    return np.array(
        [
            (number, span.row + at, min(most, span.rows - at), span.position + at)
            for number, span in enumerate(spans)
            for at in range(0, span.rows, most)
        ],
        dtype=np.int64,
    ).reshape(-1, 4)


def plan(blocks: Ints, tables: Ints, rows: int, cut: Cut) -> Plan:
    """The plan of `blocks` (`blocks_of`) over `tables [n, columns]`, for `rows` rows of a step.

    ValueError where a table ends before its tokens do.
    """
    table, _, tokens, position = blocks.T
    begin = position * 0 if cut.window is None else np.maximum(0, position - cut.window + 1)
    end = position + tokens
    if len(blocks) and end.max() > tables.shape[1] * cut.slots:
        raise ValueError(f"page tables of {tables.shape[1]} pages are too short for {end.max()} tokens")
    first, last = begin // cut.segment, (end - 1) // cut.segment
    segments = last - first + 1
    split = _split(tokens, segments, cut)
    partial = np.cumsum(np.where(split, tokens * segments, 0)) - tokens * segments
    of = np.repeat(np.arange(len(blocks)), np.where(split, segments, 1))
    step = _counts(np.where(split, segments, 1))
    start = first[of] + step
    stop = np.where(split[of], start + 1, last[of] + 1)
    whole = (
        split[of] & (tokens[of] == 1) & (start * cut.segment >= begin[of]) & (stop * cut.segment <= end[of])
    )
    pieces = _Pieces(
        of,
        start,
        stop,
        np.where(split[of], partial[of] + step, -1),
        _items(of, start, whole, table, tables, cut),
    )
    return _packed(blocks, begin, end, segments, split, partial, pieces, tables, rows, cut)


def _split(tokens: Ints, segments: Ints, cut: Cut) -> NDArray[np.bool_]:
    """Which blocks leave a partial result per segment."""
    one = tokens == 1
    few = np.count_nonzero(~one) * cut.kv_heads < _FEW_PROGRAMS
    split: NDArray[np.bool_] = (segments > 1) & (one | few)
    need = np.where(split, tokens * segments, 0)
    if need.sum() > cut.partials:
        longest = np.lexsort((-segments, ~one))  # single tokens first
        split[longest] &= np.cumsum(need[longest]) <= cut.partials
    return split


def _items(block: Ints, segment: Ints, whole: NDArray[np.bool_], table: Ints, tables: Ints, cut: Cut) -> Ints:
    """The item of each piece: pieces of one token each share it where they have the same pages."""
    number = np.arange(len(block))
    candidates = np.flatnonzero(whole)
    if cut.segment % cut.slots or len(candidates) < 2 or cut.tokens < 2:
        return number
    per = cut.segment // cut.slots
    columns = segment[candidates, None] * per + np.arange(per)
    like = _alike(tables[table[block[candidates], None], columns], segment[candidates])
    order = np.argsort(like, kind="stable")
    fresh = np.diff(like[order], prepend=-1) != 0
    rank = np.arange(len(order)) - np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
    heads = np.maximum.accumulate(np.where(rank % cut.tokens == 0, np.arange(len(order)), 0))
    number[candidates[order]] = candidates[order[heads]]
    return number


def _alike(pages: Ints, segment: Ints) -> Ints:
    """For each row of `pages [n, per]`, the first row with the same pages and segment (itself, if none).

    Rows are brought together by a hash, then compared: who collides with another is left alone.
    """
    mix = _mix(pages.shape[1] + 1)
    with np.errstate(over="ignore"):
        hashes = (pages * mix[1:]).sum(axis=1) + segment * mix[0]
    order = np.argsort(hashes, kind="stable")
    places = np.arange(len(order))
    fresh = np.concatenate(([True], hashes[order][1:] != hashes[order][:-1]))
    leader = order[np.maximum.accumulate(np.where(fresh, places, 0))]
    same = (pages[order] == pages[leader]).all(axis=1) & (segment[order] == segment[leader])
    found = np.empty_like(order)
    found[order] = np.where(same, leader, order)
    return found


@functools.cache
def _mix(count: int) -> Ints:
    """Odd numbers to hash with, always the same."""
    return np.random.default_rng(0).integers(1, 1 << 62, count) * 2 + 1


def _packed(
    blocks: Ints,
    begin: Ints,
    end: Ints,
    segments: Ints,
    split: NDArray[np.bool_],
    partial: Ints,
    pieces: _Pieces,
    tables: Ints,
    rows: int,
    cut: Cut,
) -> Plan:
    table, row, tokens, position = blocks.T
    low = np.maximum(begin[pieces.block], pieces.first * cut.segment)
    high = np.minimum(end[pieces.block], pieces.end * cut.segment)
    # Longest items first, so that no program ends up alone with one. All pieces of an item are as long.
    order = np.lexsort((np.arange(len(low)), pieces.item, (low - high)))
    item, block = pieces.item[order], pieces.block[order]
    heads = np.flatnonzero(np.diff(item, prepend=-1))
    of_piece = tokens[block]
    entry_at = np.cumsum(of_piece) - of_piece
    entries = int(of_piece.sum())
    items = np.zeros((len(heads), ITEM), dtype=np.int32)
    if len(heads):
        items[:, 0] = entry_at[heads]
        items[:, 1] = np.add.reduceat(of_piece, heads)
        items[:, 2] = table[block[heads]]
        items[:, 3], items[:, 4] = pieces.first[order][heads], pieces.end[order][heads]
        items[:, 5], items[:, 6] = low[order][heads], high[order][heads]
    token = _counts(of_piece)
    owner, left = np.repeat(block, of_piece), np.repeat(pieces.partial[order], of_piece)
    entry = np.zeros((entries, ENTRY), dtype=np.int32)
    entry[:, 0], entry[:, 1] = row[owner] + token, position[owner] + token
    entry[:, 2] = np.where(left < 0, -1, left + token * segments[owner])
    merged = np.repeat(np.flatnonzero(split), tokens[split])
    token = _counts(tokens[split])
    parts = np.zeros((rows, PARTS), dtype=np.int32)
    parts[row[merged] + token, 0] = partial[merged] + token * segments[merged]
    parts[row[merged] + token, 1] = segments[merged]
    header = np.zeros(HEADER, dtype=np.int32)
    sections = (header, parts, items, entry, tables)
    starts = np.cumsum([section.size for section in sections])
    header[:6] = len(items), starts[1], starts[2], starts[0], starts[3], tables.shape[1]
    packed = np.concatenate([section.astype(np.int32, copy=False).ravel() for section in sections])
    alone = np.ones(len(low), dtype=bool)
    alone[heads] = False
    shared = int((high - low)[order][alone].sum())
    return Plan(packed, len(items), int((tokens * segments)[split].sum()), shared)


def _counts(lengths: Ints) -> Ints:
    """0 .. n-1 for each n of `lengths`, one after the other."""
    counted: Ints = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted
