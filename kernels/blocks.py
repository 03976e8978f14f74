"""Weights as a file stores them: rows of quantised blocks (GGML formats), not expanded.

A block is a run of neighbouring weights of one row that share a scale, and in some formats an
offset: `weight = scale * code + offset`. Backends keep the codes and compute with these exact values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One GGML format. `weights` and `nbytes` of a block as the file has it."""

    name: str
    weights: int
    nbytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights, which must be whole blocks."""
        if width % self.weights:
            raise ValueError(f"{self.name} has blocks of {self.weights} weights: {width} is no multiple")
        return width // self.weights * self.nbytes


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            BlockFormat("Q4_0", 32, 18),
            BlockFormat("Q4_1", 32, 20),
            BlockFormat("Q5_0", 32, 22),
            BlockFormat("Q5_1", 32, 24),
            BlockFormat("Q8_0", 32, 34),
            BlockFormat("Q4_K", 256, 144),
            BlockFormat("Q5_K", 256, 176),
            BlockFormat("Q6_K", 256, 210),
        )
    }
)
"""Formats that stay as they are; any other is expanded by whoever reads the file."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Rows in one format. `data [rows, bytes per row]` uint8, each row contiguous; may be a mapped file."""

    format: BlockFormat
    data: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix `[out, width]`: runs of rows, one beneath the other, each in its own format."""

    runs: tuple[BlockRows, ...]
    width: int

    def __post_init__(self) -> None:
        for run in self.runs:
            if run.data.shape[1] != run.format.row_bytes(self.width):
                raise ValueError(f"rows of {self.width} weights in {run.format.name} of wrong length")

    @property
    def shape(self) -> tuple[int, int]:
        return sum(run.data.shape[0] for run in self.runs), self.width

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(run.data.numel() for run in self.runs)


Matrix = Tensor | BlockMatrix
"""`[out, in]` weights: numbers, or blocks as a file has them."""
