"""What a decoder says of its rows beside their numbers: which are finite, and which logit is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import blocks
from kernels.blocks import BlockMatrix, Matrix
from kernels.cpu.library import KV_TYPES
from kernels.cpu.ops import CpuOps
from kernels.ops import (
    Attention,
    AttentionShape,
    DecoderParts,
    Hidden,
    LayerParts,
    Logits,
    Span,
    StepDecoder,
    kv_width,
)
from tests.cpu_builds import builds, normal, threads
from tests.unit.test_kernels_blocks import random_bytes, rows_of

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INNER, HEADS, KV_HEADS, DIM, SLOTS = 64, 32, 4, 2, 8, 4
VOCAB = 70  # two whole panels and six columns
NAN, INF = float("nan"), float("inf")


ops = builds()


def decoder_of(
    ops: CpuOps,
    dtype: torch.dtype,
    head: Matrix,
    embedding: Tensor | None = None,
    norm: Tensor | None = None,
) -> StepDecoder:
    """One layer of random weights, and this head."""

    def weight(out: int, width: int) -> Tensor:
        return (normal(out, width, seed=out) / 8).to(dtype)

    layer = LayerParts(
        attention_norm=torch.ones(HIDDEN),
        qkv=weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o=weight(HIDDEN, HEADS * DIM),
        o_bias=None,
        mlp_norm=torch.ones(HIDDEN),
        gate_up=weight(2 * INNER, HIDDEN),
        gate_up_bias=None,
        down=weight(HIDDEN, INNER),
        down_bias=None,
        group=0,
        index=0,
        rotary=True,
    )
    angles = normal(64, DIM // 2)
    found = ops.decoder(
        DecoderParts(
            dtype=dtype,
            activations="float",
            heads=HEADS,
            kv_heads=KV_HEADS,
            dim=DIM,
            eps=1e-5,
            embedding=normal(VOCAB, HIDDEN, seed=5).to(dtype) if embedding is None else embedding,
            layers=[layer],
            norm=torch.ones(HIDDEN) if norm is None else norm,
            lm_head=head,
            cos=angles.cos(),
            sin=angles.sin(),
        )
    )
    assert found is not None
    return found


# --- logits ------------------------------------------------------------------------------


def as_torch_says(found: Logits) -> bool:
    finite = found.values.isfinite().all(dim=-1)
    best = found.values.argmax(dim=-1)
    return torch.equal(found.finite, finite) and torch.equal(found.best[finite], best[finite])


def check_rows(decoder: StepDecoder, hidden: Tensor) -> None:
    """Every number of rows up to all of them, by one to three threads: the answers of each row alone."""
    alone: list[Logits] = []
    with threads(1):
        for row in range(hidden.shape[0]):
            found = decoder.logits(hidden[row : row + 1])
            assert as_torch_says(found), row
            alone.append(Logits(found.values.clone(), found.best, found.finite))
    for rows in range(hidden.shape[0], 0, -1):
        with threads(1 + rows % 3):
            found = decoder.logits(hidden[:rows])
        for row in range(rows):
            assert torch.equal(found.values[row], alone[row].values[0]), (rows, row)
            assert (found.best[row], found.finite[row]) == (alone[row].best[0], True), (rows, row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("tied", [False, True])
def test_the_best_is_torchs(ops: CpuOps, dtype: torch.dtype, vocab: int, tied: bool) -> None:
    """`tied`: logits are small whole numbers, so that many are equal."""
    head, hidden = normal(vocab, HIDDEN, seed=1), normal(40, HIDDEN, seed=2)
    if tied:
        head, hidden = (head * 0.7).round(), (hidden * 0.5).round()
    check_rows(decoder_of(ops, dtype, head.to(dtype)), hidden.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_of_a_head_in_blocks(ops: CpuOps, dtype: torch.dtype) -> None:
    """Runs in two formats: the first ends in the middle of a panel, too."""
    runs = [rows_of(name, random_bytes(name, out, HIDDEN, out)) for name, out in (("Q5_0", 45), ("Q4_1", 70))]
    head = BlockMatrix(tuple(runs), HIDDEN)
    wide = blocks.expand(head, torch.float32)
    decoder, hidden = decoder_of(ops, dtype, head), normal(40, HIDDEN, seed=2).to(dtype)
    check_rows(decoder, hidden)
    near = hidden.double() @ wide.double().T
    best = decoder.logits(hidden).best
    assert torch.allclose(near.gather(1, best[:, None])[:, 0], near.amax(dim=1), rtol=1e-2)
    assert bool((best < 45).any())
    assert bool((best >= 45).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_hold_no_output_are_never_best(ops: CpuOps, dtype: torch.dtype) -> None:
    head = -normal(VOCAB, HIDDEN).abs() - 0.1
    found = decoder_of(ops, dtype, head.to(dtype)).logits(torch.ones(3, HIDDEN, dtype=dtype))
    assert bool((found.values < 0).all())
    assert as_torch_says(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [(3, 40), (40, 69), (64, 65), (0, 31), (15, 16)])
def test_the_first_of_equals(ops: CpuOps, dtype: torch.dtype, places: tuple[int, int]) -> None:
    head = normal(VOCAB, HIDDEN, seed=3) / 8
    head[list(places)] = 1.0
    decoder = decoder_of(ops, dtype, head.to(dtype))
    for count in (1, 2, 3):
        with threads(count):
            assert decoder.logits(torch.ones(5, HIDDEN, dtype=dtype)).best.tolist() == [places[0]] * 5


def test_zeros_of_either_sign_are_equal(ops: CpuOps) -> None:
    head = torch.full((VOCAB, HIDDEN), -1.0)
    head[[9, 66]] = 0.0
    head[9, -1] = -1e-30  # the product is too small for float32, and its sign is the sum's
    hidden = torch.full((1, HIDDEN), 1e-30)
    found = decoder_of(ops, torch.float32, head).logits(hidden)
    assert torch.equal(found.values[0, [9, 66]].signbit(), torch.tensor([True, False]))
    assert (found.best.tolist(), found.values.argmax().item()) == ([9], 9)
    head[[9, 66]] = head[[66, 9]]
    assert decoder_of(ops, torch.float32, head).logits(hidden).best.tolist() == [9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("place", [0, 17, 31, 32, 64, 69])
def test_one_logit_that_overflows(ops: CpuOps, dtype: torch.dtype, sign: float, place: int) -> None:
    """In one row; the others' logits, bests and flags stay."""
    head, hidden = normal(VOCAB, HIDDEN), normal(7, HIDDEN, seed=1)
    hidden[:, 5] = 0.0
    clean = decoder_of(ops, dtype, head.to(dtype)).logits(hidden.to(dtype))
    assert clean.finite.all()
    head[:, 5] = 0.0
    head[place, 5] = 4.0 * sign
    hidden[3, 5] = 3e38
    for count in (1, 2, 3):
        with threads(count):
            found = decoder_of(ops, dtype, head.to(dtype)).logits(hidden.to(dtype))
        assert found.values[3, place] == sign * INF
        assert found.finite.tolist() == [row != 3 for row in range(7)]
        others = [0, 1, 2, 4, 5, 6]
        assert torch.equal(found.best[others], clean.best[others])
        assert torch.equal(found.values[others], clean.values[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_poisoned_head_row_or_hidden_state(ops: CpuOps, dtype: torch.dtype, poison: float) -> None:
    hidden = normal(6, HIDDEN, seed=1).to(dtype)
    for place in (0, 40, 63, 69):
        head = normal(VOCAB, HIDDEN).to(dtype)
        head[place, 11] = poison
        assert decoder_of(ops, dtype, head).logits(hidden).finite.tolist() == [False] * 6
    hidden[2, 30] = poison
    found = decoder_of(ops, dtype, normal(VOCAB, HIDDEN).to(dtype)).logits(hidden)
    assert found.finite.tolist() == [row != 2 for row in range(6)]
    assert as_torch_says(found)
    assert 0 <= int(found.best[2]) < VOCAB


def test_no_rows(ops: CpuOps) -> None:
    found = decoder_of(ops, torch.float32, normal(VOCAB, HIDDEN)).logits(torch.empty(0, HIDDEN))
    assert (found.values.shape, found.best.shape, found.finite.shape) == ((0, VOCAB), (0,), (0,))


def test_rows_taken_of_logits() -> None:
    found = Logits.of(torch.tensor([[1.0, 2.0], [NAN, 0.0], [4.0, 4.0]]))
    assert found.finite.tolist() == [True, False, True]
    taken = found.take([2, 0])
    assert taken.values.tolist() == [[4.0, 4.0], [1.0, 2.0]]
    assert (taken.best.tolist(), taken.finite.tolist()) == ([0, 1], [True, True])


# --- hidden states -----------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    storage: Tensor
    slots: Tensor
    attention: Attention


class Sequences:
    """Sequences of nine tokens, of which the last is to be computed, in pages of their own."""

    POSITION = 8

    def __init__(self, ops: CpuOps, dtype: torch.dtype, kv: torch.dtype, rows: int) -> None:
        self.ops, self.rows = ops, rows
        pages = self.POSITION // SLOTS + 1
        width = kv_width(DIM, kv)
        self.tables = torch.arange(rows * pages).view(rows, pages)
        self.storage = torch.zeros(rows * pages, 1, 2, SLOTS, KV_HEADS, width, dtype=kv)
        self.k, self.v = (normal(rows, self.POSITION, KV_HEADS, DIM, seed=seed).to(dtype) for seed in (1, 2))

    def forward(self, decoder: StepDecoder, tokens: Sequence[int]) -> Hidden:
        at = torch.arange(self.POSITION)
        for row in range(self.rows):
            slots = self.tables[row, at // SLOTS] * SLOTS + at % SLOTS
            self.ops.write_kv(self.storage[:, 0], slots, self.k[row], self.v[row])
        spans = [Span(row, 1, self.POSITION) for row in range(self.rows)]
        attention = self.ops.attention(AttentionShape(HEADS, KV_HEADS, DIM, SLOTS), spans, self.tables)
        own = self.tables[:, self.POSITION // SLOTS] * SLOTS + self.POSITION % SLOTS
        positions = torch.full((self.rows,), self.POSITION)
        return decoder.forward(torch.tensor(tokens), positions, [Group(self.storage, own, attention)])


def check_poisoned(found: Hidden, clean: Hidden, bad: int) -> None:
    rows = found.finite.shape[0]
    assert clean.finite.all()
    assert found.finite.tolist() == [row != bad for row in range(rows)]
    assert torch.equal(found.finite, found.rows.isfinite().all(dim=-1))
    others = [row for row in range(rows) if row != bad]
    assert torch.equal(found.rows[others], clean.rows[others])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_embedding(ops: CpuOps, dtype: torch.dtype, poison: float, rows: int, count: int) -> None:
    head, embedding = normal(VOCAB, HIDDEN).to(dtype), normal(VOCAB, HIDDEN, seed=5).to(dtype)
    sequences, tokens = Sequences(ops, dtype, dtype, rows), [7 * row for row in range(rows)]
    bad = rows // 2
    with threads(count):
        clean = sequences.forward(decoder_of(ops, dtype, head, embedding), tokens)
        embedding[tokens[bad], HIDDEN - 1] = poison
        found = sequences.forward(decoder_of(ops, dtype, head, embedding), tokens)
    check_poisoned(found, clean, bad)


@pytest.mark.parametrize("kv", KV_TYPES)
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_kv(ops: CpuOps, dtype: torch.dtype, poison: float, kv: torch.dtype) -> None:
    decoder = decoder_of(ops, dtype, normal(VOCAB, HIDDEN).to(dtype))
    sequences, tokens = Sequences(ops, dtype, kv, 6), [3, 1, 4, 1, 5, 9]
    clean = sequences.forward(decoder, tokens)
    sequences.v[4, 2, 1, 3] = poison
    with threads(2):
        check_poisoned(sequences.forward(decoder, tokens), clean, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_overflows_in_some_rows(ops: CpuOps, dtype: torch.dtype) -> None:
    """The last operation before the check, at either end of a row."""
    for place in (0, HIDDEN - 1):
        norm = torch.ones(HIDDEN)
        norm[place] = 3e38
        decoder = decoder_of(ops, dtype, normal(VOCAB, HIDDEN).to(dtype), norm=norm)
        found = Sequences(ops, dtype, dtype, 40).forward(decoder, range(40))
        assert torch.equal(found.finite, found.rows.isfinite().all(dim=-1))
        assert 0 < int(found.finite.sum()) < 40
