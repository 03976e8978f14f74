"""Counting what a step consists of.

A chunk of one token is a decode. Attention is counted for each KV group by its own memory law and averaged
over layers: a layer with a window of 512 tokens attends to no more of a long context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentserve.core.plan import Chunk, PageCopy
from agentserve.core.timing.features import StepLoad, is_drawn, pairs, split
from agentserve.types import KVGroup, Sampling


@dataclass(frozen=True, slots=True)
class Law:
    """Layers that share a memory law: their share of all layers, their window, the bytes of a token slot."""

    share: float
    window: int | None
    slot_bytes: float


class Attention:
    """How much of a context the model's layers attend to. Averages over layers."""

    def __init__(self, groups: Sequence[KVGroup] = (), page_size: int = 16) -> None:
        """groups: none stands for one that attends to everything."""
        layers = sum(len(group.layers) for group in groups)
        self.page_size = page_size
        self.laws = tuple(
            Law(len(group.layers) / layers, group.window, group.page_bytes / page_size) for group in groups
        ) or (Law(1.0, None, 0.0),)
        self._windows = tuple((law.share, law.window) for law in self.laws if law.window is not None)
        self.full_group = next((n for n, law in enumerate(self.laws) if law.window is None), None)
        self.full = 1 if not self._windows else sum(law.share for law in self.laws if law.window is None)

    def seen_by(self, computed: Sequence[int]) -> float:
        """What decodes behind so many tokens each attend to, themselves included."""
        if not self._windows:
            return sum(computed) + len(computed)
        return sum([self.seen(length + 1) for length in computed])

    def seen(self, length: int) -> float:
        """Tokens that the last of `length` tokens attends to."""
        if not self._windows:
            return length
        return self.full * length + sum(share * min(length, window) for share, window in self._windows)

    def reach(self, start: int, count: int) -> float:
        """Tokens that the chunk's tokens attend to, each counted once."""
        end = start + count
        if not self._windows:
            return end
        return self.full * end + sum(share * min(end, window + count - 1) for share, window in self._windows)

    def pairs(self, start: int, count: int) -> float:
        """(query token, key token) pairs of a chunk."""
        if not self._windows:
            return pairs(start, count)
        total = self.full * pairs(start, count)
        for share, window in self._windows:
            rising = min(max(window - start, 0), count)  # tokens whose whole context lies in the window
            total += share * (pairs(start, rising) + (count - rising) * window)
        return total

    def slot_bytes(self, group: int) -> float:
        return self.laws[group].slot_bytes if group < len(self.laws) else 0.0


EVERYTHING = Attention()
"""Every layer attends to the whole context."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk whose size is asked for: up to `most` tokens from position `start` on. From `ending` tokens on
    one is picked after it, as `sampling` says."""

    start: int
    most: int
    ending: int
    sampling: Sampling | None = None


class Tally:
    """The features of a step that is being written. Its owner adds to it; `load` is what there is so far."""

    __slots__ = (
        "_attention", "_whole", "chunks", "context", "copied", "copies", "decodes", "drawn", "masked",
        "pairs", "reach", "samples", "tokens",
    )  # fmt: skip

    def __init__(self, attention: Attention) -> None:
        self._attention = attention
        self._whole = attention.full == 1
        self.decodes = self.chunks = self.tokens = 0
        self.samples = self.drawn = self.masked = self.copies = 0
        self.context: float = 0
        self.pairs: float = 0
        self.reach: float = 0
        self.copied: float = 0

    def decode(self, start: int, sampling: Sampling | None) -> None:
        """One token at position `start`; sampling: how its next one is picked, if it is."""
        self.decodes += 1
        self.context += start + 1 if self._whole else self._attention.seen(start + 1)
        if sampling is not None:  # as `_sample` has it: this runs for every session in every step
            self.samples += 1
            if is_drawn(sampling):
                self.drawn += 1
            if sampling.grammar is not None:
                self.masked += 1

    def decodes_of(self, count: int, context: float, picked: int) -> None:
        """So many at once, each of which samples; context: what they attend to; picked: a sum of `picks`."""
        drawn, masked = split(picked)
        self.decodes += count
        self.samples += count
        self.context += context
        self.drawn += drawn
        self.masked += masked

    def chunk(self, start: int, count: int, sampling: Sampling | None) -> None:
        """A chunk, by whomever: one of a single token is a decode to the machine."""
        if count == 1:
            self.decode(start, sampling)
            return
        self.chunks += 1
        self.tokens += count
        self.pairs += self._attention.pairs(start, count)
        self.reach += self._attention.reach(start, count)
        self._sample(sampling)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self.copies += len(copies)
        for copy in copies:
            self.copied += copy.slots * self._attention.slot_bytes(copy.group)

    def _sample(self, sampling: Sampling | None) -> None:
        if sampling is not None:
            self.samples += 1
            self.drawn += is_drawn(sampling)
            self.masked += sampling.grammar is not None

    def with_copies(self) -> Tally:
        """Another with a page of each KV group copied: what a turn may need that goes on in a shared page."""
        other, laws = self.another(), self._attention.laws
        other.copies += len(laws)
        other.copied += self._attention.page_size * sum([law.slot_bytes for law in laws])
        return other

    def another(self) -> Tally:
        """Another that goes on from here."""
        other = Tally(self._attention)
        other.decodes, other.chunks, other.tokens = self.decodes, self.chunks, self.tokens
        other.samples, other.drawn, other.masked = self.samples, self.drawn, self.masked
        other.context, other.pairs, other.reach = self.context, self.pairs, self.reach
        other.copies, other.copied = self.copies, self.copied
        return other

    def with_decode(self, start: int, sampling: Sampling | None) -> StepLoad:
        """The features if a decode were added."""
        other = self.another()
        other.decode(start, sampling)
        return other.load()

    def with_chunk(self, start: int, count: int, sampling: Sampling | None) -> StepLoad:
        """The features if a chunk were added."""
        if count == 1:
            return self.with_decode(start, sampling)
        attention, sampled = self._attention, sampling is not None
        return StepLoad(
            decodes=self.decodes, chunks=self.chunks + 1, tokens=self.tokens + count, context=self.context,
            read=self.context, pairs=self.pairs + attention.pairs(start, count),
            reach=self.reach + attention.reach(start, count), samples=self.samples + sampled,
            drawn=self.drawn + (sampling is not None and is_drawn(sampling)),
            masked=self.masked + (sampling is not None and sampling.grammar is not None),
            copies=self.copies, copied=self.copied,
        )  # fmt: skip

    def load(self, shared: float = 0) -> StepLoad:
        """shared: context tokens of decodes that others of them read for them."""
        return StepLoad(
            decodes=self.decodes, chunks=self.chunks, tokens=self.tokens, context=self.context,
            read=self.context - shared, pairs=self.pairs, reach=self.reach, samples=self.samples,
            drawn=self.drawn, masked=self.masked, copies=self.copies, copied=self.copied,
        )  # fmt: skip


def shared(chunks: Sequence[Chunk], attention: Attention) -> float:
    """Context tokens that decodes among `chunks` need not read, as another has the same pages."""
    group = attention.full_group
    if group is None:
        return 0
    rows = [(chunk.tables[group], chunk.start + 1) for chunk in chunks if len(chunk.tokens) == 1]
    return attention.full * shared_tokens(rows, attention.page_size) if len(rows) > 1 else 0


def shared_tokens(rows: Sequence[tuple[array[int], int]], page_size: int) -> int:
    """Tokens that rows (pages, length) need not read, as a row before them has the same first pages.

    Rows are compared by what all that begin with the same page have in common: where some share more, that
    is not seen.
    """
    if len({row[0][0] for row in rows}) == len(rows):
        return 0
    families: dict[int, list[tuple[array[int], int]]] = {}
    for row in rows:
        families.setdefault(row[0][0], []).append(row)
    saved = 0
    for family in families.values():
        if len(family) > 1:
            shortest = min([length for _, length in family])
            width = -(-shortest // page_size)
            pages = np.frombuffer(b"".join([table[:width] for table, _ in family]), np.int32)
            tables = pages.reshape(len(family), width)
            same = (tables[1:] == tables[0]).all(axis=0)
            common = width if same.all() else int(same.argmin())
            saved += (len(family) - 1) * min(common * page_size, shortest)
    return saved


def load_of(chunks: Sequence[Chunk], copies: Sequence[PageCopy], attention: Attention) -> StepLoad:
    """The features of a plan."""
    tally = Tally(attention)
    tally.copy(copies)
    for chunk in chunks:
        sampling = chunk.sample.sampling if chunk.sample is not None else None
        tally.chunk(chunk.start, len(chunk.tokens), sampling)
    return tally.load(shared(chunks, attention))


def load_of_shape(shape: Sequence[tuple[int, int]], attention: Attention) -> StepLoad:
    """The features of a step of chunks (start, count) that sample nothing and share nothing."""
    tally = Tally(attention)
    for start, count in shape:
        tally.chunk(start, count, None)
    return tally.load()
