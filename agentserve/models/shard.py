"""One rank's part of a decoder in a tensor-parallel group: which heads, columns and rows are its own.

Attention and MLP are cut as in Megatron-LM (Shoeybi et al. 2019): Q, K, V, gate and up by their rows, so that
each rank has whole heads; o and down by their columns, so that each rank's product is one summand of the
whole. Of the head each rank has some rows (tokens). Embedding, norms and rotary tables are everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.weights import TOP, Part, Place, layout
from kernels.blocks import BlockMatrix, BlockRows, Matrix
from kernels.narrow import narrow_part

_BY_COLUMNS = ("o", "down")
_ONCE = ("o_bias", "down_bias")  # added to one rank's summand


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank keeps of one named tensor, and at which row of its own field it lies."""

    place: Place
    row: int
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of a group of `degree`; by default the whole model."""

    rank: int = 0
    degree: int = 1

    def check(self, config: DecoderConfig, place: str) -> None:
        """A `ModelError` that names `place` where the model cannot be cut into so many parts."""
        degree, kv_heads = self.degree, config.kv_heads
        if config.heads % degree:
            raise ModelError(f"{place}: {config.heads} heads cannot be shared equally by {degree} ranks")
        if kv_heads % degree and degree % kv_heads:
            raise ModelError(
                f"{place}: {kv_heads} KV heads can neither be shared equally by {degree} ranks nor repeated"
            )
        if config.intermediate_size % degree:
            raise ModelError(
                f"{place}: an MLP of {config.intermediate_size} cannot be shared equally by {degree} ranks"
            )
        if config.vocab_size < degree:
            raise ModelError(f"{place}: {config.vocab_size} tokens are fewer than {degree} ranks")

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """The decoder that this rank computes. KV heads fewer than ranks are repeated; the vocabulary is
        the whole one, of which the head is a part (`tokens`)."""
        return replace(
            whole,
            heads=whole.heads // self.degree,
            kv_heads=max(1, whole.kv_heads // self.degree),
            intermediate_size=whole.intermediate_size // self.degree,
        )

    def tokens(self, vocab_size: int) -> tuple[int, int]:
        """The rows of the head that are this rank's: from, to."""
        return vocab_size * self.rank // self.degree, vocab_size * (self.rank + 1) // self.degree

    def cuts(self, whole: DecoderConfig) -> dict[str, Cut]:
        """What this rank keeps, by name; in `layout` order, each field without gaps."""
        own = {part.name: part for part in layout(self.config(whole))}
        return {
            part.name: self._cut(part, own[part.name], whole)
            for part in layout(whole)
            if self.rank == 0 or part.place[1] not in _ONCE
        }

    def head(self, embedding: Matrix) -> Matrix:
        """This rank's part of a head that is the embedding too: the same memory."""
        first, end = self.tokens(embedding.shape[0])
        if isinstance(embedding, BlockMatrix):
            return _rows(embedding, first, end)
        if isinstance(embedding, Tensor):
            return embedding[first:end]
        return narrow_part(embedding, (first, end))

    def _cut(self, part: Part, own: Part, whole: DecoderConfig) -> Cut:
        rows, columns = (0, part.shape[0]), None
        if part.place == (TOP, "lm_head"):
            rows = self.tokens(part.shape[0])
        elif part.place[1] in _BY_COLUMNS:
            columns = (self.rank * own.shape[1], (self.rank + 1) * own.shape[1])
        elif own.shape != part.shape:
            # Rank r has the query heads from r * heads / degree on. Where KV heads are repeated, it has the
            # one that these read.
            first = self.rank * part.shape[0] // self.degree
            if part.place[1] in ("qkv", "qkv_bias"):
                first -= first % whole.head_dim
            rows = (first, first + own.shape[0])
        shape = (rows[1] - rows[0], *own.shape[1:])
        return Cut(part.place, own.row, shape, rows, columns)


WHOLE = Shard()


def _rows(matrix: BlockMatrix, first: int, end: int) -> BlockMatrix:
    """Rows `first .. end-1`."""
    runs, row = [], 0
    for run in matrix.runs:
        count = run.data.shape[0]
        taken = run.data[max(0, first - row) : max(0, end - row)]
        if taken.shape[0]:
            runs.append(BlockRows(run.format, taken))
        row += count
    return BlockMatrix(tuple(runs), matrix.width)
