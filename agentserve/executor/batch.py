"""From the plan's chunks to the tensors of a forward pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentserve.core.plan import Chunk
from agentserve.executor.pool import KVPool
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


def check_chunk(chunk: Chunk, config: DecoderConfig, pool: KVPool, positions: int) -> str:
    """Why a chunk cannot be run, in one line; empty if it can."""
    end = chunk.start + len(chunk.tokens)
    if not chunk.tokens:
        return "the chunk has no tokens"
    if chunk.start < 0 or end > positions:
        return f"positions {chunk.start} to {end - 1} leave the context of {positions} tokens"
    if not _within(_ints(chunk.tokens), config.vocab_size):
        return f"a token id lies outside the vocabulary of {config.vocab_size}"
    if len(chunk.tables) != len(pool.groups):
        return f"{len(chunk.tables)} page tables for {len(pool.groups)} KV groups"
    for table, group, pages in zip(chunk.tables, pool.groups, pool.pages, strict=True):
        needed = -(-end // pool.page_size)
        if len(table) < needed:
            return f"KV group {group.name}: {len(table)} pages for {end} tokens, {needed} needed"
        # Behind a sliding window pages are released, and their entries mean nothing.
        seen = 0 if group.window is None else max(0, chunk.start - group.window + 1) // pool.page_size
        if not _within(_ints(table)[seen:needed], pages):
            return f"KV group {group.name}: a page id lies outside the pool of {pages}"
    return ""


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
    tokens = np.concatenate(
        [_ints(chunks[p.chunk].tokens)[p.offset : p.offset + p.count] for p in pieces], dtype=np.int64
    )
    positions = np.concatenate([np.arange(s.position, s.position + s.rows) for s in spans], dtype=np.int64)
    owners = np.repeat(np.arange(len(spans)), [span.rows for span in spans])
    groups = []
    for number, (storage, group) in enumerate(zip(pool.storages, pool.groups, strict=True)):
        tables = _tables(
            [chunks[p.chunk].tables[number] for p in pieces], spans, pool.page_size, group.window
        )
        pages = tables[owners, positions // pool.page_size]
        slots = pages * pool.page_size + positions % pool.page_size
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, pool.page_size, group.window)
        attention = ops.attention(shape, spans, _tensor(tables, device))
        groups.append(PagedGroup(storage, _tensor(slots, device), attention))
    return Batch(_tensor(tokens, device), _tensor(positions, device), tuple(groups))


def _tables(
    tables: Sequence[array[int]], spans: Sequence[Span], page_size: int, window: int | None
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """`[spans, pages]`: each span's page table up to its last token, 0 where no token can look."""
    ends = [-(-(span.position + span.rows) // page_size) for span in spans]
    found = np.zeros((len(spans), max(ends)), dtype=np.int64)
    for number, (table, span, end) in enumerate(zip(tables, spans, ends, strict=True)):
        seen = 0 if window is None else max(0, span.position - window + 1) // page_size
        found[number, seen:end] = _ints(table)[seen:end]
    return found


def _within(values: np.ndarray[tuple[int], np.dtype[np.int32]], bound: int) -> bool:
    return bool(values.min() >= 0 and values.max() < bound)


def _ints(values: array[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(values, dtype=np.int32)


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
