"""From the plan's chunks to the tensors of a forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentserve.core.plan import Chunk
from agentserve.executor.pool import KVPool
from agentserve.models.config import DecoderConfig
from agentserve.models.inputs import Batch, PagedGroup
from kernels.ops import AttentionShape, Ops, Span

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `offset .. offset+count-1` of chunk number `chunk`: what of it goes into one pass."""

    chunk: int
    offset: int
    count: int


def split_rows(lengths: Sequence[int], most_rows: int) -> list[list[Piece]]:
    """Cut chunks of these lengths into passes of at most `most_rows` rows, keeping their order.

    A chunk may go through several passes: each writes its KV before the next one reads it.
    """
    passes: list[list[Piece]] = []
    room = 0
    for chunk, length in enumerate(lengths):
        offset = 0
        while offset < length:
            if room == 0:
                passes.append([])
                room = most_rows
            count = min(room, length - offset)
            passes[-1].append(Piece(chunk, offset, count))
            offset += count
            room -= count
    return passes


def check_chunks(chunks: Sequence[Chunk], config: DecoderConfig, pool: KVPool, positions: int) -> list[str]:
    """Why each chunk cannot be run, in one line; empty if it can."""
    errors = [_check_shape(chunk, pool, positions) for chunk in chunks]
    shaped = [chunk for chunk, error in zip(chunks, errors, strict=True) if not error]
    # One look at all ids of a step costs as much as one at a single chunk's.
    if not shaped or not _check_ids(shaped, config, pool):
        return errors
    return [error or _check_ids([chunk], config, pool) for chunk, error in zip(chunks, errors, strict=True)]


def _check_shape(chunk: Chunk, pool: KVPool, positions: int) -> str:
    end = chunk.start + len(chunk.tokens)
    if not chunk.tokens:
        return "the chunk has no tokens"
    if chunk.start < 0 or end > positions:
        return f"positions {chunk.start} to {end - 1} leave the context of {positions} tokens"
    if len(chunk.tables) != len(pool.groups):
        return f"{len(chunk.tables)} page tables for {len(pool.groups)} KV groups"
    needed = -(-end // pool.page_size)
    for table, group in zip(chunk.tables, pool.groups, strict=True):
        if len(table) < needed:
            return f"KV group {group.name}: {len(table)} pages for {end} tokens, {needed} needed"
    return ""


def _check_ids(chunks: Sequence[Chunk], config: DecoderConfig, pool: KVPool) -> str:
    """What is wrong with the token and page ids of at least one chunk; empty if nothing is."""
    if not _within(_joined([chunk.tokens for chunk in chunks]), config.vocab_size):
        return f"a token id lies outside the vocabulary of {config.vocab_size}"
    for number, (group, pages) in enumerate(zip(pool.groups, pool.pages, strict=True)):
        seen = (_seen_pages(chunk, number, group.window, pool.page_size) for chunk in chunks)
        if not _within(_joined(seen), pages):
            return f"KV group {group.name}: a page id lies outside the pool of {pages}"
    return ""


def _seen_pages(chunk: Chunk, group: int, window: int | None, page_size: int) -> array[int]:
    end = -(-(chunk.start + len(chunk.tokens)) // page_size)
    return chunk.tables[group][_first_page(chunk.start, window, page_size) : end]


def _first_page(position: int, window: int | None, page_size: int) -> int:
    """The first page that a token can see: behind a window pages are released, and their entries mean
    nothing."""
    return 0 if window is None else max(0, position - window + 1) // page_size


def build_batch(
    pieces: Sequence[Piece], chunks: Sequence[Chunk], config: DecoderConfig, pool: KVPool, ops: Ops
) -> Batch:
    """The tensors of one pass over `pieces` of checked `chunks`."""
    device = pool.storages[0].device
    spans: list[Span] = []
    row = 0
    for piece in pieces:
        spans.append(Span(row, piece.count, chunks[piece.chunk].start + piece.offset))
        row += piece.count
    tokens = _joined([chunks[p.chunk].tokens[p.offset : p.offset + p.count] for p in pieces]).astype(np.int64)
    owners = np.repeat(np.arange(len(spans)), [span.rows for span in spans])
    positions = np.array([span.position - span.row for span in spans])[owners] + np.arange(row)
    places = divmod(positions, pool.page_size)
    groups = []
    for number, (storage, group) in enumerate(zip(pool.storages, pool.groups, strict=True)):
        tables = _tables(
            [chunks[p.chunk].tables[number] for p in pieces], spans, pool.page_size, group.window
        )
        slots = tables[owners, places[0]] * pool.page_size + places[1]
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.page_size, group.window)
        attention = ops.attention(shape, spans, _tensor(tables, device))
        groups.append(PagedGroup(storage, _tensor(slots, device), attention))
    return Batch(_tensor(tokens, device), _tensor(positions, device), tuple(groups))


def _tables(
    tables: Sequence[array[int]], spans: Sequence[Span], page_size: int, window: int | None
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """`[spans, pages]`: each span's page table up to its last token, 0 where no token can look."""
    ends = [-(-(span.position + span.rows) // page_size) for span in spans]
    nothing = array("i", [0]) * max(ends)
    parts: list[array[int]] = []
    for table, span, end in zip(tables, spans, ends, strict=True):
        seen = _first_page(span.position, window, page_size)
        parts += (nothing[:seen], table[seen:end], nothing[end:])
    return _joined(parts).astype(np.int64).reshape(len(spans), -1)


def _within(values: Ints, bound: int) -> bool:
    """Whether 0 <= value < bound for all of at least one."""
    return bool(values.view(np.uint32).max() < bound)  # below 0 is far above


def _joined(parts: Iterable[array[int]]) -> Ints:
    """One behind the other: pages and tokens are put together as bytes, with one numpy call for all."""
    return np.frombuffer(b"".join(parts), dtype=np.int32)


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
