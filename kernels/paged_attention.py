"""Paged causal attention in plain torch, batch-invariant by the way it cuts the work.

Keys are cut into tiles of `TILE` at absolute positions, tiles into segments of `SEGMENT` tiles.
Every tile product has the same shape: a tile that is not full is padded with masked keys. Within
a segment the maximum (exact in any order) is taken first, then each tile's sum and product are
added in tile order; segments follow each other by streaming softmax. A tile or segment that a row
cannot see adds exact zeros and scales by exactly one. So a row's bits depend on the row's own
position and keys, not on the chunk it came in or on who else is in the step.

Query rows (tokens x query heads of a KV head) are the rows of the tile products, under a row rule.

Whatever pages hold is widened to float32. Scales of 8-bit codes multiply the scores of K's codes, and
the weights that V's codes are summed with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.invariant import BLOCK, MOST_ROWS, cancelling, choose_rule, random_rows
from kernels.kv_formats import scales_of
from kernels.ops import AttentionShape, Span

TILE = 128  # keys per tile
SEGMENT = 16  # tiles per segment
_BLOCK_TOKENS = 64  # longest run of one span's tokens handled together
_MOST_ELEMENTS = 1 << 20  # of the largest temporary of a batch of blocks: 4 MiB of float32 stay in cache
_FLOOR = -1e30  # stands for minus infinity where a difference of two of them is taken


class TileOps:
    """What is done to a tile, with rows and matrices grouped so that bits do not depend on it."""

    def __init__(self, dim: int, device: torch.device) -> None:
        queries, keys = cancelling((MOST_ROWS, dim, TILE), torch.float32, device, batch=3)
        weights, columns = cancelling((MOST_ROWS, TILE, dim), torch.float32, device, batch=3)
        values = columns.transpose(1, 2).contiguous()
        rows = random_rows(MOST_ROWS, TILE, device, batch=3)
        self._batched = _batch_holds(queries, keys.transpose(1, 2)) and _batch_holds(weights, values)
        self._scores_rule = choose_rule(lambda x: self._bmm(x, keys.transpose(1, 2)), queries)
        self._values_rule = choose_rule(lambda x: self._bmm(x, values), weights)
        self._sum_rule = choose_rule(_row_sum, rows)
        self._exp_rule = choose_rule(torch.exp, rows)
        self.multiple = max(self._scores_rule.multiple, self._values_rule.multiple)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`[n, rows, dim]`, `[n, TILE, dim]` -> `[n, rows, TILE]`."""
        return self._scores_rule.apply(lambda x: self._bmm(x, keys.transpose(1, 2)), queries)

    def values(self, weights: Tensor, values: Tensor) -> Tensor:
        """`[n, rows, TILE]`, `[n, TILE, dim]` -> `[n, rows, dim]`."""
        return self._values_rule.apply(lambda x: self._bmm(x, values), weights)

    def sums(self, weights: Tensor) -> Tensor:
        """`[n, rows, TILE]` -> `[n, rows, 1]`."""
        return self._sum_rule.apply(_row_sum, weights)

    def exp(self, x: Tensor) -> Tensor:
        """Element by element, `[..., rows, n]`; may overwrite x."""
        return self._exp_rule.apply(torch.exp_, x)

    def _bmm(self, left: Tensor, right: Tensor) -> Tensor:
        if self._batched:
            return torch.bmm(left, right)
        return torch.stack([a @ b for a, b in zip(left, right, strict=True)])


@dataclass(frozen=True, slots=True)
class _Block:
    """Up to `_BLOCK_TOKENS` tokens of one span, and the range of tiles they can see."""

    span: int
    row: int
    tokens: int
    position: int
    first_tile: int
    end_tile: int


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """What a batch of blocks reads in one segment; masks are None where every key is visible."""

    pages: Tensor  # [blocks, tiles, pages per tile] int64
    hidden: Tensor | None  # [blocks, tiles, 1, rows, TILE] bool: row may not see key
    dead: Tensor | None  # [blocks, tiles, 1, TILE, 1] bool: no row may see key


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks of equal token count that go through the products together."""

    rows: Tensor  # [blocks, tokens] int64: rows of the step
    segments: tuple[_Segment, ...]


class PagedAttention:
    """`kernels.ops.Attention` for one step and one KV group. Masks and page lists are made once."""

    def __init__(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor, tile: TileOps) -> None:
        if TILE % shape.slots:
            raise ValueError(f"page size {shape.slots} does not divide the attention tile of {TILE} keys")
        self._shape = shape
        self._tables = tables
        self._tile = tile
        self._group = shape.heads // shape.kv_heads
        self._batches = tuple(self._batch(blocks) for blocks in self._grouped(spans))

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for batch in self._batches:
            out[batch.rows.flatten()] = self._run(batch, q, kv).to(q.dtype)
        return out.view(q.shape[0], -1)

    def _run(self, batch: _Batch, q: Tensor, kv: Tensor) -> Tensor:
        """Attention of one batch: `[blocks * tokens, heads, dim]` float32."""
        shape, group = self._shape, self._group
        blocks, tokens = batch.rows.shape
        scaled = q[batch.rows.flatten()].to(torch.float32) * shape.dim**-0.5
        queries = scaled.view(blocks, tokens, shape.kv_heads, group, shape.dim).transpose(1, 2)
        queries = queries.reshape(blocks, shape.kv_heads, tokens * group, shape.dim)
        queries = F.pad(queries, (0, 0, 0, -queries.shape[2] % self._tile.multiple))
        top = queries.new_full((*queries.shape[:3], 1), _FLOOR)
        total = torch.zeros_like(top)
        out = torch.zeros_like(queries)
        for segment in batch.segments:
            top, total, out = self._segment(segment, queries, kv, (top, total, out))
        out = (out / total)[:, :, : tokens * group]
        out = out.reshape(blocks, shape.kv_heads, tokens, group, shape.dim).transpose(1, 2)
        return out.reshape(blocks * tokens, shape.heads, shape.dim)

    def _segment(
        self, segment: _Segment, queries: Tensor, kv: Tensor, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add one segment to the running maximum, sum and output."""
        top, total, out = state
        blocks, kv_heads, rows, dim = queries.shape
        tiles = segment.pages.shape[1]
        keys, values, scales = self._gather(segment, kv)
        spread = queries[:, None].expand(-1, tiles, -1, -1, -1).reshape(-1, rows, dim)
        scores = self._tile.scores(spread, keys).reshape(blocks, tiles, kv_heads, rows, TILE)
        if scales is not None:
            scores *= scales[0]
        if segment.hidden is not None:
            scores = scores.masked_fill_(segment.hidden, float("-inf"))
        new_top = torch.maximum(top, scores.amax(dim=(1, 4)).unsqueeze(-1))
        fade = self._tile.exp(top - new_top)
        weights = self._tile.exp(scores.sub_(new_top[:, None])).view(-1, rows, TILE)
        sums = self._tile.sums(weights).view(blocks, tiles, kv_heads, rows, 1)
        if scales is not None:
            weights = self._scaled(weights.view_as(scores), scales[1], segment.hidden).view_as(weights)
        parts = self._tile.values(weights, values).view(blocks, tiles, kv_heads, rows, dim)
        total, out = total * fade, out * fade
        for tile in range(tiles):
            total += sums[:, tile]
            out += parts[:, tile]
        return new_top, total, out

    @staticmethod
    def _scaled(weights: Tensor, scales: Tensor, hidden: Tensor | None) -> Tensor:
        """Weights for V's codes; exactly 0 for keys that a row may not see, though their scale be NaN."""
        weights = weights * scales
        return weights if hidden is None else weights.masked_fill_(hidden, 0.0)

    def _gather(self, segment: _Segment, kv: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """K and V of a segment, each `[blocks * tiles * kv_heads, TILE, dim]` float32, and their scales.

        Scales `[2, blocks, tiles, kv_heads, 1, TILE]` where pages have them.
        """
        slots, kv_heads, dim = self._shape.slots, self._shape.kv_heads, self._shape.dim
        blocks, tiles, per_tile = segment.pages.shape
        pages = kv[segment.pages.flatten()].view(blocks, tiles, per_tile, 2, slots, kv_heads, -1)
        pages = pages.permute(3, 0, 1, 5, 2, 4, 6)
        wide = torch.empty(
            (2, blocks, tiles, kv_heads, per_tile, slots, dim), dtype=torch.float32, device=kv.device
        )
        wide.copy_(pages[..., :dim])
        keys, values = wide.view(2, blocks, tiles, kv_heads, TILE, dim)
        if segment.dead is not None:
            values.masked_fill_(segment.dead, 0.0)  # zero weight times NaN would be NaN
        scales = scales_of(pages, dim)
        if scales is not None:
            scales = scales.reshape(2, blocks, tiles, kv_heads, 1, TILE)
        return keys.view(-1, TILE, dim), values.view(-1, TILE, dim), scales

    def _grouped(self, spans: Sequence[Span]) -> Iterator[list[_Block]]:
        """Blocks that can share a batch: same token count, similar range of tiles, bounded size."""
        groups: dict[tuple[int, ...], list[_Block]] = {}
        for number, span in enumerate(spans):
            for offset in range(0, span.rows, _BLOCK_TOKENS):
                tokens = min(_BLOCK_TOKENS, span.rows - offset)
                block = self._block(number, span, offset, tokens)
                reach = (
                    (block.first_tile, block.end_tile)
                    if self._shape.window
                    else (block.end_tile.bit_length(),)
                )
                groups.setdefault((tokens, *reach), []).append(block)
        for blocks in groups.values():
            tiles = min(SEGMENT, max(block.end_tile for block in blocks))
            rows = blocks[0].tokens * self._group
            each = tiles * self._shape.kv_heads * TILE * max(rows + BLOCK, 2 * self._shape.dim)
            at_once = max(1, _MOST_ELEMENTS // each)
            for start in range(0, len(blocks), at_once):
                yield blocks[start : start + at_once]

    def _block(self, number: int, span: Span, offset: int, tokens: int) -> _Block:
        position = span.position + offset
        oldest = 0 if self._shape.window is None else max(0, position - self._shape.window + 1)
        return _Block(
            number, span.row + offset, tokens, position, oldest // TILE, (position + tokens - 1) // TILE + 1
        )

    def _batch(self, blocks: list[_Block]) -> _Batch:
        device = self._tables.device
        first = min(block.first_tile for block in blocks)
        end = max(block.end_tile for block in blocks)
        starts = torch.tensor([block.row for block in blocks], device=device)
        segments = []
        while first < end:
            stop = min(end, (first // SEGMENT + 1) * SEGMENT)
            segments.append(self._plan_segment(blocks, first, stop))
            first = stop
        return _Batch(starts[:, None] + torch.arange(blocks[0].tokens, device=device), tuple(segments))

    def _plan_segment(self, blocks: list[_Block], first: int, stop: int) -> _Segment:
        device, window = self._tables.device, self._shape.window
        per_tile = TILE // self._shape.slots
        owners = torch.tensor([block.span for block in blocks], device=device)
        columns = torch.arange(first * per_tile, stop * per_tile, device=device)
        # Columns past a table's end belong to masked keys: any page will do.
        columns = columns.clamp(max=self._tables.shape[1] - 1)
        pages = self._tables[owners[:, None], columns].view(len(blocks), stop - first, per_tile)
        tokens = blocks[0].tokens
        oldest = min(block.position for block in blocks)
        newest = max(block.position for block in blocks) + tokens - 1
        in_window = window is None or first * TILE > newest - window
        if stop * TILE - 1 <= oldest and in_window:
            return _Segment(pages, None, None)
        keys = torch.arange(first * TILE, stop * TILE, device=device).view(1, stop - first, 1, 1, TILE)
        starts = torch.tensor([block.position for block in blocks], device=device)
        at = (starts[:, None] + torch.arange(tokens, device=device)).repeat_interleave(self._group, dim=1)
        at = F.pad(at, (0, -at.shape[1] % self._tile.multiple), value=-1)  # padding rows see nothing
        at = at.view(len(blocks), 1, 1, -1, 1)
        hidden = keys > at
        if window is not None:
            hidden |= keys <= at - window
        dead = hidden.all(dim=3, keepdim=True).transpose(3, 4)
        return _Segment(pages, hidden, dead)


def _row_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _batch_holds(left: Tensor, right: Tensor) -> bool:
    """Whether a product has the same bits alone as among others."""
    left = left[:, : 3 * BLOCK].contiguous()
    many = torch.bmm(left.repeat(7, 1, 1), right.repeat(7, 1, 1))
    return all(
        torch.equal(torch.bmm(left[i : i + 1], right[i : i + 1])[0], many[at])
        for i in range(3)
        for at in range(i, 21, 3)
    )
