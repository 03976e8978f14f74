"""A decoder reads a text in windows and says at every position what it expects next.

Through the serving path: paged KV, batches as the executor builds them, whole prefill passes. What a
row says does not depend on how the text is cut into passes, so the figures hold for decoding too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agentserve.core.plan import Chunk
from agentserve.executor.batch import build_batch, split_rows
from agentserve.executor.pool import KVPool
from agentserve.executor.runner import MOST_ROWS
from agentserve.models.decoder import Decoder
from agentserve.types import SessionId, TurnId

WINDOW = 1024
HEAD_ROWS = 32
"""Rows of logits at a time: 6 MB for a vocabulary of 49,152."""

Window = Sequence[int]


class NotFinite(ValueError):
    """A model whose output is not finite predicts nothing."""


def windows(tokens: Sequence[int], length: int = WINDOW) -> list[Window]:
    """`tokens` cut into windows of `length` from the first on; the last is what is left, and goes if it
    is one token: every window's first token is context only, all others are predicted."""
    if length < 2:
        raise ValueError(f"a window of {length} tokens predicts nothing: it needs at least 2")
    cut = [tokens[start : start + length] for start in range(0, len(tokens), length)]
    return [window for window in cut if len(window) > 1]


def predicted(cut: Sequence[Window]) -> Tensor:
    """`[n]` int64: the tokens of all windows that are predicted, in order."""
    return torch.tensor([token for window in cut for token in window[1:]], dtype=torch.int64)


@torch.inference_mode()
def read(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    cut: Sequence[Window],
    page_size: int,
    *,
    together: int = 1,
    most_rows: int = MOST_ROWS,
) -> Tensor:
    """The hidden states `[n, hidden]` from which the `predicted` tokens are predicted.

    `together` windows are read side by side, in passes of at most `most_rows` rows; neither has an
    influence on the result. Raises `NotFinite`, and ValueError for windows longer than the context.
    """
    longest = max(len(window) for window in cut) - 1
    if longest > decoder.positions:
        raise ValueError(f"a window of {longest + 1} tokens, and a context of {decoder.positions}")
    pages = -(-longest // page_size)
    count = len(decoder.config.layer_groups())
    pool = KVPool(decoder.config, [pages * together] * count, page_size, kv_dtype, decoder.device)
    parts: list[Tensor] = []
    for start in range(0, len(cut), together):
        chunks = [
            _chunk(window, array("i", range(place * pages, (place + 1) * pages)), count)
            for place, window in enumerate(cut[start : start + together])
        ]
        for pieces in split_rows([len(chunk.tokens) for chunk in chunks], most_rows):
            hidden = decoder.forward(build_batch(pieces, chunks, decoder.config, pool, decoder.ops))
            if not bool(hidden.finite.all()):
                raise NotFinite("the model's output is not finite")
            parts.append(hidden.rows.cpu())
    return torch.cat(parts)


def logits(decoder: Decoder, hidden: Tensor, rows: int = HEAD_ROWS) -> Iterator[Tensor]:
    """Slices `[rows, vocab]` float32 on the CPU of the logits of `hidden`, one after the other."""
    with torch.inference_mode():
        for part in torch.split(hidden, rows):
            yield decoder.logits(part.to(decoder.device)).values.to("cpu", copy=True)


def _chunk(window: Window, table: array[int], groups: int) -> Chunk:
    tokens = array("i", window[:-1])  # behind the last token nothing is left to predict
    return Chunk(SessionId("text"), TurnId(1), 0, 0, tokens, (table,) * groups, None)
