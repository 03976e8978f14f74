"""What is measured: the sizes of every row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentserve.bench.limits import READ_BYTES


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token counts and row counts. The defaults take under three minutes on two cores."""

    products: tuple[int, ...] = (1, 4, 16, 64, 256)  # rows
    stream: int = 80 << 20  # bytes of weights that products of one size run over: more than the caches hold
    attended: tuple[int, ...] = (1, 8, 16, 32)  # rows of attention alone, decoding
    chunks: tuple[tuple[int, int], ...] = ((0, 256), (1792, 256), (5888, 256), (0, 2048))  # (start, tokens)
    operations: tuple[int, ...] = (1, 32, 256)  # rows
    sampled: int = 32  # rows
    decoded: tuple[int, ...] = (1, 4, 8, 16, 32)  # rows
    contexts: tuple[int, ...] = (64, 2048, 6144)  # of attention alone and of whole steps
    alone: tuple[int, ...] = (3500,)  # contexts of one row's steps besides
    prefilled: tuple[int, ...] = (128, 512, 2048, 6144)
    chunked: tuple[int, ...] = (2048, 6144)
    chunk: int = 256
    sharing: tuple[int, int, int] | None = (16, 2048, 256)  # rows, tokens of prefix, tokens of their own
    overhead: tuple[int, ...] = (1, 8, 32)  # rows
    read: int = READ_BYTES  # at once, to measure memory

    @property
    def longest(self) -> int:
        """The largest context, new token included."""
        shared = sum(self.sharing[1:]) + 1 if self.sharing else 0
        ends = (start + count for start, count in self.chunks)
        contexts = (tokens + 1 for tokens in self.contexts + self.alone)
        return max(shared, *contexts, *self.prefilled, *self.chunked, *ends)

    def within(self, positions: int) -> Sizes:
        """What of it a model with so many positions can run. ValueError if that leaves no context."""
        if positions <= min(self.contexts):
            raise ValueError(f"a model of {positions} positions is too short to be measured")
        sharing = self.sharing if self.sharing and sum(self.sharing[1:]) < positions else None
        return replace(
            self,
            chunks=tuple((start, count) for start, count in self.chunks if start + count <= positions),
            contexts=tuple(tokens for tokens in self.contexts if tokens < positions),
            alone=tuple(tokens for tokens in self.alone if tokens < positions),
            prefilled=tuple(tokens for tokens in self.prefilled if tokens <= positions),
            chunked=tuple(tokens for tokens in self.chunked if tokens <= positions),
            sharing=sharing,
        )
