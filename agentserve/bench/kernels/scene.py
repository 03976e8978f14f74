"""KV pages in distinct memory for many long contexts, filled with real KV, and plans over them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from agentserve.core.plan import Chunk, Plan, SampleSpec
from agentserve.executor.pool import KVPool
from agentserve.models.config import DecoderConfig
from agentserve.types import Sampling, SessionId, TurnId

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one context's tokens inside a step, and the pages of that context."""

    start: int
    count: int
    pages: array[int]


class Scene:
    """Who lies where in a pool: contexts' pages are scattered, as in a server that has run for a while.

    `pages[k]` is the pool's page that comes k-th; a row's context takes the next ones that it needs.
    """

    def __init__(self, config: DecoderConfig, pool: KVPool) -> None:
        self.config = config
        self.pool = pool
        pages = list(range(min(pool.pages)))
        random.Random(1).shuffle(pages)
        self._pages = array("i", pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def fits(self, rows: int, tokens: int) -> bool:
        """Whether so many contexts of so many tokens have distinct pages."""
        return rows * self.pages_for(tokens) <= len(self._pages)

    def tables(self, rows: int, tokens: int, shared: int = 0) -> list[array[int]]:
        """A page table for each of `rows` contexts of `tokens` tokens; the first `shared` tokens (whole
        pages of them) lie in the first context's pages for all."""
        width = self.pages_for(tokens)
        if rows * width > len(self._pages):
            raise ValueError(f"{rows} contexts of {tokens} tokens need more than {len(self._pages)} pages")
        prefix = self._pages[: shared // self.pool.page_size]
        own = [self._pages[row * width : (row + 1) * width] for row in range(rows)]
        return [prefix + table[len(prefix) :] for table in own]

    def decode(self, rows: int, context: int, shared: int = 0) -> list[Part]:
        """One new token behind each of `rows` contexts of `context` tokens."""
        return [Part(context, 1, table) for table in self.tables(rows, context + 1, shared)]

    def prefill(self, tokens: int, chunk: int | None = None) -> list[list[Part]]:
        """The steps that compute one context from nothing: one, or one per `chunk` tokens."""
        table = self.tables(1, tokens)[0]
        size = chunk or tokens
        return [[Part(start, min(size, tokens - start), table)] for start in range(0, tokens, size)]

    def plan(self, parts: Sequence[Part], sample: bool = True) -> Plan:
        """A step of these parts, each sampling greedily after its last token if `sample`."""
        return Plan(0, (), tuple(self._chunk(n, part, sample) for n, part in enumerate(parts)), 0.0, ())

    def _chunk(self, number: int, part: Part, sample: bool) -> Chunk:
        vocab = self.config.vocab_size
        tokens = array("i", [((part.start + i) * 31 + number * 7 + 7) % vocab for i in range(part.count)])
        spec = SampleSpec(GREEDY, tokens, part.count, part.count) if sample else None
        tables = (part.pages,) * len(self.pool.groups)
        return Chunk(SessionId(f"bench-{number}"), TurnId(1), 0, part.start, tokens, tables, spec)

    def fill_plans(self, tokens: int) -> list[Plan]:
        """Steps that write the first context's KV, `tokens` tokens."""
        return [self.plan(parts, sample=False) for parts in self.prefill(tokens)]

    def spread(self, tokens: int) -> list[tuple[int, int]]:
        """Page copies (source, target) that give every other page of the pool the first context's KV."""
        width = min(self.pages_for(tokens), len(self._pages))
        return [(self._pages[k % width], page) for k, page in enumerate(self._pages[width:], start=width)]
