"""From the plan's chunks to the tensors of a forward pass.

This runs between two kernels that have just pushed everything else out of the caches: a numpy or torch
call costs ten times what it does in a loop of its own, so plain arrays do what they can.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentserve.core.plan import Chunk
from agentserve.executor.pool import KVPool
from agentserve.executor.transfers import to_device
from agentserve.models.config import DecoderConfig
from agentserve.models.inputs import Batch, PagedGroup
from kernels.ops import AttentionShape, Ops, Span


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
    if not _within([chunk.tokens for chunk in chunks], config.vocab_size):
        return f"a token id lies outside the vocabulary of {config.vocab_size}"
    for number, (group, pages) in enumerate(zip(pool.groups, pool.pages, strict=True)):
        if not _within([_seen_pages(chunk, number, group.window, pool.page_size) for chunk in chunks], pages):
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
    tokens, positions = array("q"), array("q")
    for piece in pieces:
        chunk = chunks[piece.chunk]
        first = chunk.start + piece.offset
        spans.append(Span(len(tokens), piece.count, first))
        tokens.extend(chunk.tokens[piece.offset : piece.offset + piece.count].tolist())
        positions.extend(range(first, first + piece.count))
    sent, tables = [_tensor(tokens), _tensor(positions)], []
    for number, group in enumerate(pool.groups):
        given = [chunks[piece.chunk].tables[number] for piece in pieces]
        sent.append(_tensor(_slots(given, spans, pool.page_size)))
        tables.append(torch.from_numpy(_tables(given, spans, pool.page_size, group.window)))
    sent = to_device(sent, device)
    groups = tuple(
        PagedGroup(storage, slots, ops.attention(shape, spans, table))
        for storage, slots, shape, table in zip(
            pool.storages, sent[2:], attention_shapes(config, pool), tables, strict=True
        )
    )
    return Batch(sent[0], sent[1], groups)


def attention_shapes(config: DecoderConfig, pool: KVPool) -> list[AttentionShape]:
    """What attention over each of the pool's KV groups looks like."""
    return [
        AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.page_size, group.window)
        for group in pool.groups
    ]


def _slots(tables: Sequence[array[int]], spans: Sequence[Span], page_size: int) -> array[int]:
    """Where the K and V of each row go."""
    found = array("q")
    for table, span in zip(tables, spans, strict=True):
        places = range(span.position, span.position + span.rows)
        found.extend([table[place // page_size] * page_size + place % page_size for place in places])
    return found


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
    return np.frombuffer(b"".join(parts), dtype=np.int32).astype(np.int64).reshape(len(spans), -1)


def _within(parts: Sequence[array[int]], bound: int) -> bool:
    """Whether 0 <= id < bound for all ids, of which each part has at least one."""
    if len(parts) == sum(map(len, parts)):
        return all(0 <= part[0] < bound for part in parts)
    ids = np.frombuffer(b"".join(parts), dtype=np.uint32)  # what is below 0 is far above
    return bool(ids.max() < bound)


def _tensor(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.int64)
