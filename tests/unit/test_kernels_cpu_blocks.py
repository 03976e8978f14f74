"""Products with block weights against float64 and against a model of the 8-bit rule, everywhere here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.blocks import FORMATS, BlockMatrix, expand
from kernels.cpu.block_panels import block_runs, packed_run_bytes
from kernels.cpu.library import TYPES
from kernels.cpu.ops import CpuOps
from kernels.cpu.packed import PackedMatrix
from kernels.ops import Activations, Attention, AttentionShape, DecoderParts, LayerParts, Span
from kernels.reference import rounded_operands
from tests.cpu_builds import builds, normal, threads
from tests.unit.test_kernels_blocks import HALVES, random_bytes, rows_of

DTYPES = [torch.float32, torch.bfloat16]
UNITS_IN_LAST_PLACE = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
KINDS: list[Activations] = ["float", "int8"]


ops = builds()


def matrix(*runs: tuple[str, int], width: int = 512, seed: int = 0) -> BlockMatrix:
    """Runs of (format, rows), of random blocks."""
    made = [rows_of(name, random_bytes(name, out, width, seed + at)) for at, (name, out) in enumerate(runs)]
    return BlockMatrix(tuple(made), width)


def excess(found: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> float:
    """The largest error in units of what one rounding of the result and of each sum allow."""
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    # The roundings of sums: a few units of the sum of magnitudes, codes and offsets counted apart.
    sums = x.double().abs() @ weight.double().abs().T + x.double().abs().sum(-1, keepdim=True)
    allowed = UNITS_IN_LAST_PLACE[dtype] * exact.abs() + 8 * 2.0**-24 * sums
    return float(((found.double() - exact).abs() / allowed).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_against_float64(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    for width, out, rows in ((256, 1, 1), (512, 33, 5), (768, 70, 15), (1536, 96, 40)):
        weight = matrix((name, out), width=width, seed=out)
        x = normal(rows, width, seed=rows).to(dtype)
        found = ops.linear(weight, dtype=dtype)(x)
        assert found.dtype == dtype
        assert excess(found, x, expand(weight, torch.float32), dtype) < 1


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].weights == 32])
def test_widths_of_single_blocks(ops: CpuOps, name: str) -> None:
    """What is left over after the units that are unpacked together."""
    for width in (32, 64, 96, 160, 288):
        weight, x = matrix((name, 7), width=width), normal(9, width)
        for rows in (1, 2, 9):
            found = ops.linear(weight, dtype=torch.float32)(x[:rows])
            assert excess(found, x[:rows], expand(weight, torch.float32), torch.float32) < 1


def wrong_centre(weight: Tensor) -> Tensor:
    return weight + weight.abs().amax() / 127


def swapped_nibbles(weight: Tensor) -> Tensor:
    return weight.view(-1, 2, 16).flip(1).reshape(weight.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_can_fail(ops: CpuOps, dtype: torch.dtype) -> None:
    weight, x = matrix(("Q4_0", 40)), normal(4, 512).to(dtype)
    found, right = ops.linear(weight, dtype=dtype)(x), expand(weight, torch.float32)
    for wrong in (wrong_centre(right), swapped_nibbles(right), right.roll(1, 0), right.roll(1, 1)):
        assert excess(found, x, wrong, dtype) > 10


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_of_several_formats(ops: CpuOps, dtype: torch.dtype, activations: Activations) -> None:
    """Runs end inside panels; each output is what its run alone gives, plus its bias."""
    runs = [("Q4_K", 40), ("Q4_K", 9), ("Q6_K", 33), ("Q8_0", 1), ("Q5_0", 64), ("Q4_1", 0), ("Q5_1", 31)]
    weight = matrix(*runs)
    x, bias = normal(6, 512, seed=3).to(dtype), normal(weight.shape[0], seed=4).to(dtype)
    found = ops.linear(weight, bias, dtype=dtype, activations=activations)(x)
    wide = ops.linear(weight, dtype=dtype, activations=activations)(x)
    first = 0
    for run, (_, out) in zip(weight.runs, runs, strict=True):
        alone = ops.linear(BlockMatrix((run,), 512), dtype=dtype, activations=activations)(x)
        assert torch.equal(wide[:, first : first + out], alone)
        first += out
    if activations == "float":
        assert excess(found, x, expand(weight, torch.float32), dtype, bias) < 1
    error = (found.double() - wide.double() - bias.double()).abs() / (1 + wide.double().abs())
    assert float(error.max()) < 2 * UNITS_IN_LAST_PLACE[dtype]


def mirrored(name: str, out: int) -> tuple[BlockMatrix, Tensor]:
    """Weights and operands whose product is exactly 0, so that only the order of additions shows."""
    raw = random_bytes(name, out, 768)
    weight = BlockMatrix((rows_of(name, np.concatenate((raw, raw), axis=1)),), 1536)
    x = normal(1, 768, seed=1)
    return weight, torch.cat((x, -x), dim=1)


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_keep_their_bits(ops: CpuOps, name: str, dtype: torch.dtype, activations: Activations) -> None:
    """Every number of rows, both counts of threads, every place among strangers."""
    weight, x = mirrored(name, 47)
    linear = ops.linear(weight, dtype=dtype, activations=activations)
    others = normal(90, 1536, seed=5).to(dtype)
    with threads(1):
        alone = linear(x.to(dtype))
        singles = [linear(others[row : row + 1]) for row in (0, 13, 14, 83)]
    for count in (*range(1, 30), 84, 85, 90):
        with threads(1 + count % 2):
            found = linear(x.to(dtype).expand(count, -1))
        assert torch.equal(found, alone.expand(count, -1)), count
    together = linear(others)
    for row, single in zip((0, 13, 14, 83), singles, strict=True):
        assert torch.equal(together[row : row + 1], single)
        others[row] = x.to(dtype)
        assert torch.equal(linear(others)[row : row + 1], alone)


def test_another_order_has_other_bits(ops: CpuOps) -> None:
    """The comparison above can fail: the same sum with its blocks the other way round."""
    weight, x = mirrored("Q4_1", 47)
    raw = weight.runs[0].data.view(47, 48, 20).flip(1).reshape(47, -1).contiguous()
    turned = BlockMatrix((rows_of("Q4_1", raw.numpy()),), 1536)
    there = ops.linear(weight, dtype=torch.float32)(x)
    back = ops.linear(turned, dtype=torch.float32)(x.view(1, 48, 32).flip(1).reshape(1, -1))
    assert not torch.equal(there, back)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rule: `[rows, groups, 32]` codes, and `[rows, groups]` scales."""
    groups = x.float().view(x.shape[0], -1, 32).numpy()
    most = np.abs(groups).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        inverse = np.where(most < 1e-36, np.float32(0), np.float32(127) / most)
        scale = np.where(most < 1e-36, np.float32(0), most / np.float32(127))
    return torch.from_numpy(np.rint(groups * inverse)), torch.from_numpy(scale[..., 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_8_bit_operands(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    """Equal to exact products of the rounded operands, but for the rounding of sums."""
    weight = matrix((name, 41), width=768)
    x = (normal(17, 768, seed=2) * torch.logspace(-3, 3, 17)[:, None]).to(dtype)
    x[3, 64:96], x[4, :32] = 0.0, 1e-38
    codes, scales = rounded(x)
    operands = (codes.double() * scales.double()[..., None]).view(17, -1)
    assert torch.equal(rounded_operands(x), (codes * scales[..., None]).view(17, -1)), "the reference's too"
    found = ops.linear(weight, dtype=dtype, activations="int8")(x)
    wide = expand(weight, torch.float32)
    assert excess(found, operands, wide, dtype) < 1
    assert excess(found, x, wide, torch.float32) > 100, "the rounding of operands shows"


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_broken_scales_stay_in_their_outputs(
    ops: CpuOps, name: str, dtype: torch.dtype, activations: Activations
) -> None:
    whole = random_bytes(name, 40, 512)
    broken = whole.copy()
    for row, half in ((3, 0x7E00), (17, 0x7C00), (39, 0xFC00)):
        at = HALVES[name][-1]
        broken[row, at : at + 2] = np.array([half], np.uint16).view(np.uint8)
    x = normal(5, 512).to(dtype)
    found, right = (
        ops.linear(BlockMatrix((rows_of(name, raw),), 512), dtype=dtype, activations=activations)(x)
        for raw in (broken, whole)
    )
    sick = [3, 17, 39]
    well = [row for row in range(40) if row not in sick]
    assert torch.equal(found[:, well], right[:, well])
    assert not found[:, sick].isfinite().any()


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_operands_are_not_hidden(
    ops: CpuOps, dtype: torch.dtype, activations: Activations, value: float
) -> None:
    """No number in a row's operands: none in any of its outputs, and nothing in other rows'."""
    linear = ops.linear(matrix(("Q8_0", 40), ("Q4_1", 9)), dtype=dtype, activations=activations)
    x = normal(16, 512).to(dtype)
    whole = linear(x)
    x[7, 100] = value
    found = linear(x)
    assert not found[7].isfinite().any()
    others = [row for row in range(16) if row != 7]
    assert torch.equal(found[others], whole[others])


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_as_compact_as_the_file(ops: CpuOps, name: str) -> None:
    weight = matrix((name, 64), width=1536)
    (run,) = block_runs(weight, pair_halves=False)
    assert packed_run_bytes(ops._library, run, 1536) <= 1.03 * weight.nbytes


def test_views_of_a_file_and_rows_apart(ops: CpuOps) -> None:
    """Rows may lie anywhere in a larger, read-only run of bytes."""
    raw = random_bytes("Q4_1", 50, 512)
    apart = torch.zeros(50, 333, dtype=torch.uint8)
    apart[:, 7 : 7 + raw.shape[1]] = torch.from_numpy(raw)
    view = apart[:, 7 : 7 + raw.shape[1]]
    x = normal(3, 512)
    packed = matrix(("Q4_1", 50))
    moved = BlockMatrix((type(packed.runs[0])(FORMATS["Q4_1"], view),), 512)
    linear = ops.linear(moved, dtype=torch.float32)
    expected = ops.linear(packed, dtype=torch.float32)(x)
    apart.zero_()
    assert torch.equal(linear(x), expected), "what was packed is kept, not where it came from"


def refusals() -> Sequence[tuple[object, dict[str, object], str]]:
    plain, block = torch.ones(4, 64), matrix(("Q8_0", 4), width=64)
    return (
        (plain, {"activations": "int8"}, "for block weights only"),
        (block, {}, "needs the dtype"),
        (block, {"dtype": torch.float16}, "bfloat16 or float32"),
        (plain.half(), {}, "bfloat16 or float32"),
        (plain, {"dtype": torch.bfloat16}, "weights are torch.float32"),
    )


def test_gates_and_ups_in_different_formats_are_refused(ops: CpuOps) -> None:
    weight = matrix(("Q4_K", 32), ("Q5_K", 32))
    with pytest.raises(ValueError, match="gates and ups cannot be in blocks of Q4_K and Q5_K"):
        PackedMatrix(ops._library, weight, dtype=torch.float32, pair_halves=True)


@dataclass(frozen=True)
class Group:
    storage: Tensor
    slots: Tensor
    attention: Attention


@pytest.mark.parametrize("activations", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_gates_and_ups_end_inside_panels(
    ops: CpuOps, name: str, dtype: torch.dtype, activations: Activations
) -> None:
    """A layer of 40 gates and ups, with biases, whose attention gives 0: as its operations one by one."""
    hidden, inner, rows = 64, 40, 7
    gate_up, bias = matrix((name, inner), (name, inner), width=hidden), normal(2 * inner, seed=8).to(dtype)
    down, embedding = normal(hidden, inner, seed=9).to(dtype), normal(20, hidden, seed=10).to(dtype)
    ones, angles = torch.ones(hidden), torch.zeros(8, 16)
    layer = LayerParts(
        attention_norm=ones,
        qkv=torch.zeros(128, hidden, dtype=dtype),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o=torch.zeros(hidden, 64, dtype=dtype),
        o_bias=None,
        mlp_norm=ones,
        gate_up=gate_up,
        gate_up_bias=bias,
        down=down,
        down_bias=None,
        group=0,
        index=0,
        rotary=False,
    )
    decoder = ops.decoder(
        DecoderParts(dtype, activations, 2, 1, 32, 1e-5, embedding, [layer], ones, embedding, angles, angles)
    )
    assert decoder is not None
    attention = ops.attention(AttentionShape(2, 1, 32, 16), [Span(0, rows, 0)], torch.tensor([[0]]))
    group = Group(torch.zeros(1, 1, 2, 16, 1, 32, dtype=dtype), torch.arange(rows), attention)
    tokens = torch.arange(3, 3 + rows)
    found = decoder.forward(tokens, torch.arange(rows), [group]).rows
    x = embedding[tokens]
    pairs = ops.linear(gate_up, bias.float(), dtype=torch.float32, activations=activations)
    products = ops.silu_mul(pairs(ops.rms_norm(x, ones, 1e-5).float())).to(dtype)
    total = x.double() + products.double() @ down.double().T
    expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
    bound = {torch.float32: 1e-5, torch.bfloat16: 4 * 2.0**-8}[dtype]
    assert torch.allclose(found.double(), expected, rtol=bound, atol=bound)
    assert not torch.allclose(found.double(), expected.roll(1, 0), rtol=bound, atol=bound)


@pytest.mark.parametrize(("weight", "options", "message"), refusals())
def test_refusals(ops: CpuOps, weight: BlockMatrix, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.linear(weight, **options)  # type: ignore[arg-type]


def test_every_type_is_tested() -> None:
    assert set(DTYPES) == set(TYPES)
