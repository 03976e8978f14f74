"""What is measured: the sizes of every row."""

from __future__ import annotations

from dataclasses import dataclass


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
    prefilled: tuple[int, ...] = (128, 512, 2048, 6144)
    chunked: tuple[int, ...] = (2048, 6144)
    chunk: int = 256
    sharing: tuple[int, int, int] = (16, 2048, 256)  # rows, tokens of prefix, tokens of their own
    overhead: tuple[int, ...] = (1, 8, 32)  # rows
    read: int = 256 << 20  # bytes read at once to measure memory

    @property
    def longest(self) -> int:
        """The largest context, new token included."""
        ends = (start + count for start, count in self.chunks)
        return max(
            *(tokens + 1 for tokens in self.contexts), *self.prefilled, *ends, sum(self.sharing[1:]) + 1
        )
