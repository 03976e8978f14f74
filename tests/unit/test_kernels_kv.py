"""KV pages of every dtype, in steps of every dtype: the contract that each backend keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.isa import Isa
from kernels.ops import AttentionShape, Ops, Span, kv_width
from kernels.reference import ReferenceOps
from tests.cpu_builds import EVERY, build_of
from tests.kv_pages import KV_DTYPES, STEPS, Step, kept, naive, normal, poison

SIZES = [(0, 1), (127, 1), (256, 1), (129, 40), (520, 3), (5, 66)]
PAIRS = pytest.mark.parametrize(("step", "kv"), [(step, kv) for step in STEPS for kv in KV_DTYPES])
NARROW = pytest.mark.parametrize(
    ("step", "kv"), [(step, kv) for step in STEPS for kv in KV_DTYPES if kv != step]
)


@pytest.fixture(scope="module", params=["reference", *EVERY], ids=lambda p: getattr(p, "name", p))
def ops(request: pytest.FixtureRequest) -> Ops:
    if not isinstance(request.param, Isa):
        return ReferenceOps(torch.device("cpu"))
    return build_of(request.param)


def tolerance(ops: Ops, step: torch.dtype, kv: torch.dtype) -> float:
    """Bound on the error against exact attention over what the pages hold, for outputs below about 4.

    Float32 sums; the result's own rounding (2^-8 of it); in bfloat16 products, weights rounded by as much.
    """
    if step == torch.float32:
        return 1e-5
    in_bfloat16 = ops.name != "reference" and kv in (torch.bfloat16, torch.int8)
    return 1.4e-2 if in_bfloat16 else 8e-3


LOOSE = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.int8: 4e-2}
"""What keeping a step's K and V (standard normal, dimension 16) in these may change, on top."""


def largest(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


def test_every_dtype_is_offered(ops: Ops) -> None:
    for step in STEPS:
        assert ops.kv_dtypes(step) == set(KV_DTYPES)
    assert not ops.kv_dtypes(torch.float64)


@PAIRS
@pytest.mark.parametrize("window", [None, 50])
def test_attention_over_what_pages_hold(
    ops: Ops, step: torch.dtype, kv: torch.dtype, window: int | None
) -> None:
    """Spans of all kinds in one step; unwritten slots, foreign pages and released entries are poisoned."""
    given = Step(ops, step, kv, AttentionShape(6, 2, 16, 16, window), SIZES)
    found = given.run()
    assert found.dtype == step
    bound = tolerance(ops, step, kv)
    assert largest(found, given.exact(kv)) < bound
    assert largest(found, given.exact(step)) < bound + LOOSE[kv]
    assert largest(found, given.exact(kv, factor=1.02)) > bound, "the bound sees an error of 2 %"


@NARROW
def test_a_page_keeps_one_token_as_it_must(ops: Ops, step: torch.dtype, kv: torch.dtype) -> None:
    """A token alone returns its V: to the result's rounding, and in bfloat16 products the weight's."""
    given = Step(ops, step, kv, AttentionShape(2, 2, 32, 16), [(0, 1)])
    expected = kept(given.v[0], kv).view(1, -1)
    error = (given.run().double() - expected).abs()
    assert bool((error <= expected.abs() * (2**-23 if step == torch.float32 else 1.01 * 2**-7)).all())


@pytest.mark.parametrize("step", STEPS)
def test_codes_are_rounded_half_to_even(ops: Ops, step: torch.dtype) -> None:
    values = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, -127, 3, 0, -0.25, 0.75, 1, 2, 4])
    given = Step(ops, step, torch.int8, AttentionShape(1, 1, 16, 16), [(0, 1)])
    given.write(0, 0, given.k[0], values.to(step).view(1, 1, 16))
    codes = [127, 0, 2, 2, 0, -2, -2, 64, -127, 3, 0, 0, 1, 1, 2, 4]
    assert given.run().view(-1).tolist() == codes


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-37, 1e-30, 1e30, 3e38])
def test_codes_of_numbers_of_any_size(ops: Ops, step: torch.dtype, size: float) -> None:
    """Where the scale would be subnormal everything is 0; else each number is within 1/254 of the largest."""
    v = (normal(1, 1, 16).clamp(-1, 1) * size).to(step)
    given = Step(ops, step, torch.int8, AttentionShape(1, 1, 16, 16), [(0, 1)])
    given.write(0, 0, given.k[0], v)
    top = float(v.abs().max())
    expected = v.double().view(1, -1) if top / 127 > 1.2e-38 else torch.zeros(1, 16, dtype=torch.double)
    assert largest(given.run(), expected) <= top * (1 / 253 if step == torch.float32 else 1 / 110)


@pytest.mark.parametrize("kv", [torch.float16, torch.float32])
def test_keys_keep_what_bfloat16_would_round(ops: Ops, kv: torch.dtype) -> None:
    """In a bfloat16 step: two keys that differ by 2^-10 share weight as exact products say."""
    given = Step(ops, torch.bfloat16, kv, AttentionShape(1, 1, 64, 16), [(1, 1)])
    wide = Step(ops, torch.float32, kv, AttentionShape(1, 1, 64, 16), [(1, 1)])
    k = torch.ones(2, 1, 64)
    k[1] += 2**-10
    v = torch.stack((torch.zeros(1, 64), torch.ones(1, 64)))
    given.tables.copy_(wide.tables)
    wide.write(0, 0, k, v)
    given.kv.copy_(wide.kv)
    given.q.fill_(64.0)
    # Scores differ by 64 * 64 * 2^-10 / 8 = 0.5.
    assert largest(given.run(), torch.full((1, 64), float(torch.sigmoid(torch.tensor(0.5))))) < 2**-8


@NARROW
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e5])
def test_what_pages_cannot_hold_is_reported(
    ops: Ops, step: torch.dtype, kv: torch.dtype, place: str, number: float
) -> None:
    """Rows that see such a token are NaN in every element, others are as before."""
    given = Step(ops, step, kv, AttentionShape(2, 2, 16, 16), [(30, 1), (9, 1), (300, 1)])
    before = given.run()
    k, v = given.k[0][12:13].clone(), given.v[0][12:13].clone()
    (k if place == "k" else v)[0, 0, 3] = number
    given.write(0, 12, k, v)
    found = given.run()
    assert torch.equal(found[1:], before[1:])
    head = found[0].view(2, 16)
    assert torch.equal(head[1], before[0].view(2, 16)[1]), "the other head does not read it"
    if number == 1e5 and kv != torch.float16:
        assert head[0].isfinite().all()
    elif place == "v" and kv != torch.int8:
        assert head[0, 3].isnan()
    else:
        assert head[0].isnan().all()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", ["k", "v"])
def test_codes_of_a_broken_token_touch_no_earlier_row(ops: Ops, step: torch.dtype, place: str) -> None:
    given = Step(ops, step, torch.int8, AttentionShape(2, 2, 16, 16, 6), [(20, 40)])
    before = given.run()
    k, v = given.k[0][33:34].clone(), given.v[0][33:34].clone()
    (k if place == "k" else v)[0, :, 5] = float("nan")
    given.write(0, 33, k, v)
    found = given.run()
    seen = slice(13, 19)  # rows at 33 .. 38 see the token at 33
    assert found[seen].isnan().all()
    assert torch.equal(found[:13], before[:13])
    assert torch.equal(found[19:], before[19:])


@pytest.mark.parametrize("step", STEPS)
def test_fp16_holds_its_largest_numbers(ops: Ops, step: torch.dtype) -> None:
    values = torch.full((1, 1, 16), 65504.0)
    values[0, 0, :3] = torch.tensor([-65504.0, 65519.0, 2.0**-24])
    given = Step(ops, torch.float32, torch.float16, AttentionShape(1, 1, 16, 16), [(0, 1)])
    given.write(0, 0, given.k[0], values)
    expected = values.to(torch.float16).double().view(1, -1)
    assert expected.isfinite().all()
    given.q = given.q.to(step)
    assert torch.equal(given.run().double(), expected.to(step).double())


@PAIRS
@pytest.mark.parametrize(("slots", "dim"), [(16, 16), (4, 8)])
def test_copy_page(ops: Ops, step: torch.dtype, kv: torch.dtype, slots: int, dim: int) -> None:
    """Every count of slots: the copy answers like the original, and nothing beyond it is touched."""
    shape = AttentionShape(2, 1, dim, slots)
    width = kv_width(dim, kv)
    q = normal(1, 2, dim).to(step)
    storage = torch.empty((4, 3, 2, slots, 1, width), dtype=kv)
    poison(storage)
    for layer in range(3):
        k, v = normal(2, slots, 1, dim, seed=layer).to(step)
        ops.write_kv(storage[:, layer], torch.arange(slots) + slots, k, v)
    clean = storage[0].view(torch.uint8).clone()
    for count in range(1, slots + 1):
        poison(storage[2:])
        ops.copy_page(storage, 1, 3, count)
        assert torch.equal(storage[2].view(torch.uint8), clean)
        changed = (storage[3].view(torch.uint8) != clean).view(-1, kv.itemsize).any(dim=1)
        size = 3 * 2 * count * width
        assert 0.9 * size < int(changed.sum()) <= size  # a code may be the one that poison has
        for layer in range(3):
            answers = [
                ops.attention(shape, [Span(0, 1, count - 1)], torch.tensor([[page]]))(q, storage[:, layer])
                for page in (1, 3)
            ]
            assert torch.equal(*answers)
            assert answers[0].isfinite().all()


def test_naive_sees_a_window() -> None:
    """The oracle itself: one key in the window returns that key's value."""
    q, k, v = normal(1, 1, 4), normal(5, 1, 4, seed=1), normal(5, 1, 4, seed=2)
    assert torch.allclose(naive(q, k, v, 4, 1), v[4].double())
