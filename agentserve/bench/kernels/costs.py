"""What a model's work costs at least, counted: bytes that must be read, operations that must be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentserve.models.config import DecoderConfig
from kernels.ops import kv_width


def causal_pairs(start: int, count: int, window: int | None = None) -> int:
    """(query, key) pairs of tokens `start .. start+count-1`, each seeing itself and all before it, or the
    last `window` of those."""
    if window is None or start + count <= window:
        return count * start + count * (count + 1) // 2
    full = min(count, max(0, start + count - window))  # tokens that see a whole window
    return full * window + causal_pairs(start, count - full)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one piece of work needs. A limit is the longer of memory and arithmetic; the two kinds of
    operations add up.

    `nbytes` are read from memory; `float_ops` and `int8_ops` are arithmetic operations (two per
    product and sum) in the step's own dtype and in 8-bit integers.
    """

    nbytes: int = 0
    float_ops: int = 0
    int8_ops: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """One variant of a model, in numbers. Norms, biases and rotary tables are left out: they are small.

    `inside` and `head` count weights of the layers' matrices and of the LM head; `inside_bytes` and
    `head_bytes` are their bytes as kept. `integers`: how many of `inside` are multiplied as 8-bit integers.
    """

    config: DecoderConfig
    inside: int
    head: int
    inside_bytes: int
    head_bytes: int
    kv_dtype: torch.dtype
    integers: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        config = self.config
        per_layer = 2 * config.kv_heads * kv_width(config.head_dim, self.kv_dtype) * self.kv_dtype.itemsize
        return per_layer * config.layers

    @property
    def weight_bytes(self) -> int:
        """All weights that a step with sampling reads."""
        return self.inside_bytes + self.head_bytes

    def context_bytes(self, tokens: int) -> int:
        """KV that one row reads whose context has `tokens` tokens."""
        per_layer = self.kv_bytes // self.config.layers
        return sum(per_layer * min(tokens, window or tokens) for window in self.config.windows)

    def attention_ops(self, start: int, count: int) -> int:
        """Scores and values: 4 * heads * dim per layer and causal pair."""
        config = self.config
        pairs = sum(causal_pairs(start, count, window) for window in config.windows)
        return 4 * config.heads * config.head_dim * pairs

    def linear_ops(self, tokens: int) -> int:
        """The layers' products for `tokens` rows, 2 per weight; the LM head is not among them."""
        return 2 * self.inside * tokens

    def decode(self, contexts: Sequence[int], shared: int = 0) -> Demand:
        """One step of one new token per context of that many tokens, its logits included.

        The first `shared` tokens of all contexts lie in the same pages and are read once.
        """
        rows = len(contexts)
        once = self.context_bytes(shared)
        kv = sum(self.context_bytes(tokens) - once for tokens in contexts) + once
        attention = sum(self.attention_ops(tokens, 1) for tokens in contexts)
        return self._demand(self.weight_bytes + kv, rows, attention + 2 * self.head * rows)

    def attention_step(self, contexts: Sequence[int], shared: int = 0) -> Demand:
        """The attention alone of `decode`, all layers."""
        once = self.context_bytes(shared)
        kv = sum(self.context_bytes(tokens) - once for tokens in contexts) + once
        return Demand(kv, sum(self.attention_ops(tokens, 1) for tokens in contexts))

    def attention_chunk(self, start: int, count: int) -> Demand:
        """The attention alone of `count` tokens from position `start` on, all layers."""
        return Demand(self.context_bytes(start + count), self.attention_ops(start, count))

    def prefill(self, tokens: int) -> Demand:
        """`tokens` tokens from an empty context, however cut into passes.

        Counted: the layers' products and attention's causal pairs. Not counted: the last token's
        logits, norms, rotation, softmax, and reading weights and KV again in every pass.
        """
        return self._demand(0, tokens, self.attention_ops(0, tokens))

    def _demand(self, nbytes: int, rows: int, others: int) -> Demand:
        """The layers' products for `rows` rows, and `others` operations in the step's dtype."""
        integers = 2 * self.integers * rows
        return Demand(nbytes, self.linear_ops(rows) - integers + others, integers)
