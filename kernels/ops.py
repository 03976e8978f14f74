"""The operations a decoder needs, with their shapes: the contract every backend keeps.

**Batch invariance**: what an operation returns for one row depends, bit for bit,
on that row's inputs alone. Not on how many rows come with it, which place it has among them, which
pages hold its KV, or in which chunks that KV was written. Page contents beyond what a row may see
(unwritten slots, another session's leftovers, NaN) have no influence.

Names: `rows` token rows of a step, `hidden` model width, `heads` query heads, `kv_heads` KV heads,
`dim` head dimension, `slots` token slots per page. KV of one layer is a view
`[pages, 2, slots, kv_heads, dim]` (0 is K, 1 is V) of its group's storage
`[pages, layers of the group, 2, slots, kv_heads, dim]`: one page is one contiguous run of bytes.
How K and V lie inside a layer's part of a page is the backend's own; `numerics` names that too.
Pages may hold numbers of another dtype than the step's (`KV_TAILS`): `dim` is then `kv_width`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.blocks import BlockMatrix, Matrix

Activations = Literal["float", "int8"]
"""What products with block weights multiply them with: the operands as they are, or rounded to 8 bits
(faster where there are integer dot products; less exact).

The rule of "int8", in float32: of each 32 neighbours of a row, `most` is the largest magnitude. Their
scale is `most / 127`, their codes are `x * (127 / most)` rounded half to even; all are 0 where
`most < 1e-36`. Products are of the values `code * scale`, not rounded again. Where `most` is not
finite, no output of the row is.
"""

KV_TAILS = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 0, torch.int8: 4}
"""KV dtypes, and the bytes that each keeps beside a token's `dim` numbers of one head (a float32 scale)."""


def operand_dtype(weight: Matrix, dtype: torch.dtype | None, activations: Activations) -> torch.dtype:
    """The dtype that `Ops.linear` computes in, or the ValueError that it raises."""
    if activations != "float" and not isinstance(weight, BlockMatrix):
        raise ValueError(f"{activations} activations are for block weights only")
    if isinstance(weight, Tensor):
        return dtype or weight.dtype
    if dtype is None:
        raise ValueError("a product with block weights needs the dtype of its operands")
    return dtype


def kv_width(dim: int, dtype: torch.dtype) -> int:
    """Elements that one token's K (or V) of one head takes in KV pages of `dtype`."""
    return dim + KV_TAILS[dtype] // dtype.itemsize


def head_dim(width: int, dtype: torch.dtype) -> int:
    """The head dimension of KV pages of `dtype` whose last dimension is `width`: `kv_width` undone."""
    return width - KV_TAILS.get(dtype, 0) // dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """A run of one sequence's tokens inside a step: rows `row .. row+rows-1`, the first at `position`."""

    row: int
    rows: int
    position: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention of one KV group looks like. `window` counts tokens, a token itself included."""

    heads: int
    kv_heads: int
    dim: int
    slots: int
    window: int | None = None


class Linear(Protocol):
    """A prepared matrix product. Prepared once per weight at load, where a backend picks its layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` -> `[rows, out]`, both in the dtype that it was prepared for."""
        ...


class Attention(Protocol):
    """Causal attention of one step over one KV group, ready to run for each of its layers."""

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        """`q [rows, heads, dim]`, `kv [pages, 2, slots, kv_heads, kv_width]` -> `[rows, heads * dim]` like q.

        Query head h reads KV head `h // (heads / kv_heads)`. A token at position p sees positions
        `max(0, p - window + 1) .. p`; the step's own K and V must have been written.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One layer of a decoder. Matrices are `[out, in]`; `group` and `index` say where its KV lies."""

    attention_norm: Tensor  # [hidden]
    qkv: Matrix  # [(heads + 2 * kv_heads) * dim, hidden]: Q, then K, then V
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [dim]
    k_norm: Tensor | None  # [dim]
    o: Matrix  # [hidden, heads * dim]
    o_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Matrix  # [2 * inner, hidden]: gate, then up
    gate_up_bias: Tensor | None
    down: Matrix  # [hidden, inner]
    down_bias: Tensor | None
    group: int  # KV group
    index: int  # of this layer inside the group
    rotary: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecoderParts:
    """A whole decoder computing in `dtype`. `lm_head` is `embedding` itself where they are tied.

    `activations` holds for the layers' products with block weights; the head's are always "float".
    """

    dtype: torch.dtype
    activations: Activations
    heads: int
    kv_heads: int
    dim: int
    eps: float
    embedding: Matrix  # [vocab, hidden]
    layers: Sequence[LayerParts]
    norm: Tensor  # [hidden]
    lm_head: Matrix  # [vocab, hidden]
    cos: Tensor  # [positions, dim / 2] float32
    sin: Tensor


class StepGroup(Protocol):
    """One KV group's part of a step."""

    @property
    def storage(self) -> Tensor:
        """`[pages, layers of the group, 2, slots, kv_heads, dim]`."""
        ...

    @property
    def slots(self) -> Tensor:
        """`[rows]` int64: where each row's K and V go."""
        ...

    @property
    def attention(self) -> Attention:
        """Laid out by the same backend's `Ops.attention`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """One KV group's pages, and what attention over them looks like."""

    storage: Tensor  # as in StepGroup
    shape: AttentionShape


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """The last layer's normed output."""

    rows: Tensor  # [rows, hidden]
    finite: Tensor  # [rows] bool: neither infinite nor NaN anywhere in the row


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """`best` is the lowest id among the greatest logits of a row; without meaning where not `finite`.

    Both may be on the CPU already while `values` are still on the device.
    """

    values: Tensor  # [rows, vocab] float32
    best: Tensor  # [rows] int64
    finite: Tensor  # [rows] bool

    @classmethod
    def of(cls, values: Tensor) -> Logits:
        """What can be said of logits that come without it."""
        return cls(values, values.argmax(dim=-1), values.isfinite().all(dim=-1))

    def take(self, rows: Sequence[int]) -> Logits:
        """These rows, copied."""
        at = torch.tensor(rows, dtype=torch.int64)
        parts = (part[at.to(part.device)] for part in (self.values, self.best, self.finite))
        return Logits(*parts)


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row's token is drawn: as `agentserve.types.Sampling` means it, `temperature` above 0.

    `position` is that of the token to be drawn. With `seed` it decides the random number.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


class Drawing(Protocol):
    """Drawing tokens where the logits are."""

    def __call__(self, values: Tensor, draws: Sequence[Draw]) -> Tensor:
        """`[rows]` int64 on the device of `values [rows, vocab]` float32, which are finite and left as they
        are. A row's token depends on its logits and its draw alone."""
        ...


@dataclass(slots=True)
class StepRuns:
    """How a decoder's steps were run, where it records decode steps before they come (`prepare`)."""

    replayed: int = 0
    missed: int = 0  # decode steps for which nothing had been recorded
    launched: int = 0  # all that are more than one token of each sequence


class Arrivals(Protocol):
    """KV of earlier tokens that is still on its way into a step's pages, layer by layer, on a device that
    copies and computes at once. Nothing here holds up the calling thread: what it launches afterwards is."""

    @property
    def expecting(self) -> bool:
        """Whether there is any for this step."""
        ...

    def wait(self, group: int, index: int) -> None:
        """What is launched from now on finds layer `index` of KV group `group` in the step's pages, and may
        write there. For layers in the order of the model."""
        ...

    def wait_all(self) -> None:
        """The same of all layers."""
        ...


class StepDecoder(Protocol):
    """A forward pass as one operation. Keeps what it needs of the weights: the caller may drop them."""

    def forward(self, tokens: Tensor, positions: Tensor, groups: Sequence[StepGroup]) -> Hidden:
        """Write the step's KV; the last layer's normed output for `[rows]` int64 tokens."""
        ...

    def logits(self, hidden: Tensor) -> Logits:
        """Logits of `[rows, hidden]` from `forward`. The next call may reuse the memory of `values`."""
        ...

    def prepare(self, pages: Sequence[GroupPages], rows: int) -> str:
        """Do now what would hold up the first steps over these pages, of up to `rows` sequences. Writes
        nothing into them. One line that says what was done, "" if nothing."""
        return ""

    def expect(self, arrivals: Arrivals) -> None:
        """Wait for these before a layer's pages are touched, in every step from now on. Only where a device
        computes beside its host."""
        raise RuntimeError("steps of this backend wait for nothing")

    @property
    def runs(self) -> StepRuns:
        """Since it was prepared."""
        return StepRuns()


class Ops(Protocol):
    """One backend on one device. Built by `kernels.ops_for`."""

    @property
    def name(self) -> str:
        """The backend, as `/health` shows it: "reference", ..."""
        ...

    @property
    def numerics(self) -> str:
        """Names everything that decides rounding; KV of a different `numerics` must not be mixed."""
        ...

    def kv_dtypes(self, dtype: torch.dtype) -> frozenset[torch.dtype]:
        """KV dtypes that this backend can keep for steps in `dtype`; none for a dtype it has no steps in."""
        ...

    def linear(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activations: Activations = "float",
    ) -> Linear:
        """Prepare `x @ weight.T + bias`; `weight [out, in]`, `bias [out]`.

        `dtype` is that of x and the result: the weight's own where it is a tensor, and needed where
        it is blocks or codes. `activations` "int8" is for blocks only (ValueError).

        Set the number of threads first: how rows are grouped is measured here, with these.
        """
        ...

    def decoder(self, parts: DecoderParts) -> StepDecoder | None:
        """The whole forward pass as one operation, or None where a backend has none for this model."""
        ...

    def drawing(self) -> Drawing | None:
        """Drawing tokens on the device, or None where the host does it as fast."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x [..., n]` over the root of its mean square (in float32), times `weight [n]`, like x."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`(rms_norm(x + residual), x + residual)`, both `[rows, hidden]`. May overwrite its inputs."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x [rows, heads, dim]`, first half of dim against second, by `[rows, dim / 2]` float32."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`[rows, 2 * n]` -> `[rows, n]`: silu of the first half times the second, rounded once."""
        ...

    def write_kv(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write `k, v [rows, kv_heads, dim]` to `slots [rows]` int64 (page * slots per page + offset).

        k and v are in the step's dtype, kv in its own. In int8, each token's K and V of each head are
        codes `round(x / scale)`, half to even, with `scale = max |x| / 127` in float32. A number that
        kv's dtype cannot hold (fp16 beyond 65504), and in int8 any that is not finite, is kept so that
        every row that sees the token comes out as NaN.
        """
        ...

    def attention(self, shape: AttentionShape, spans: Sequence[Span], tables: Tensor) -> Attention:
        """Lay out one step's attention.

        `tables [len(spans), pages]` int64, on the CPU: page of positions `i * slots ..` of each span's
        sequence; entries that no token of the span can see may hold anything that is a page of the pool.
        """
        ...

    def copy_page(self, storage: Tensor, source: int, target: int, slots: int) -> None:
        """Copy the first `slots` token slots, all layers, of page `source` to page `target`."""
        ...
