"""What a step consists of, as far as its time depends on it: the features of the cost model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from agentserve.types import Sampling


def pairs(start: int, count: int) -> int:
    """(query token, key token) pairs of a causal chunk of `count` tokens at position `start`."""
    return count * start + count * (count + 1) // 2


Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class StepLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step's features. Each costs time: a step with more of one and less of none takes no less."""

    decodes: Count = 0  # chunks of one token
    chunks: Count = 0  # longer ones
    tokens: Count = 0  # token rows of the longer ones
    context: Amount = 0  # tokens that decodes attend to, themselves included
    read: Amount = 0  # of these, those fetched from memory: a prefix that decodes share counts once
    pairs: Amount = 0  # (query token, key token) pairs of the longer chunks
    reach: Amount = 0  # tokens that these chunks attend to, each counted once per chunk
    samples: Count = 0  # rows of logits
    drawn: Count = 0  # of these, rows that take more than their best token: temperature, penalties, logprobs
    masked: Count = 0  # of these, rows under a grammar
    copies: Count = 0  # pages copied on write, of all KV groups
    copied: Amount = 0  # their bytes

    @property
    def rows(self) -> int:
        """Token rows of the forward pass."""
        return self.decodes + self.tokens


def is_drawn(sampling: Sampling) -> bool:
    """Whether a row takes more than its best token."""
    return (
        sampling.temperature != 0.0
        or sampling.logprobs is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
        or bool(sampling.stop)
    )


def picks(sampling: Sampling) -> int:
    """Whether a row is drawn and whether it is masked, so that the sum over rows says how many are (`split`):
    it is asked of every row in every step."""
    return is_drawn(sampling) + _MASKED * (sampling.grammar is not None)


def split(total: int) -> tuple[int, int]:
    """Rows that are drawn, and rows under a grammar, in a sum of `picks`."""
    return total % _MASKED, total // _MASKED


_MASKED = 1 << 32
