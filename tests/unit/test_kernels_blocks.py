"""Block formats against the `gguf` package, whose de-quantisation is the formats' reference here."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from kernels import blocks
from kernels.blocks import FORMATS, BlockMatrix, BlockRows, expand, expand_rows
from kernels.reference import ReferenceOps, rounded_operands

Bytes = npt.NDArray[np.uint8]

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)} | {
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where each format's float16 numbers lie in a block."""
EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0x7C00, 0xFC00, 0x7E01], np.uint16)
"""Zeros, subnormals, the largest, both infinities, NaN."""


def random_bytes(name: str, rows: int, width: int, seed: int = 0) -> Bytes:
    """Blocks of random codes and sub-scales whose float16 numbers are ordinary."""
    form, generator = FORMATS[name], np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows * width // form.weights, form.nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = generator.normal(0, 0.05, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = halves[:, None].view(np.uint8)
    return raw.reshape(rows, width // form.weights * form.nbytes)


def rows_of(name: str, raw: Bytes) -> BlockRows:
    return BlockRows(FORMATS[name], torch.from_numpy(raw))


def wanted(name: str, raw: Bytes) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        found: npt.NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    return found


def same_bits(found: Tensor, expected: npt.NDArray[np.float32]) -> bool:
    """Equal with signs of zero; NaN where NaN is expected, whatever its payload."""
    numbers = found.numpy()
    nan = np.isnan(expected)
    return bool(
        np.array_equal(np.isnan(numbers), nan)
        and np.array_equal(numbers[~nan].view(np.uint32), expected[~nan].view(np.uint32))
    )


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_as_the_package_knows_them(name: str) -> None:
    form = FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (form.weights, form.nbytes)
    assert form.row_bytes(512) == 512 // form.weights * form.nbytes
    with pytest.raises(ValueError, match="no multiple"):
        form.row_bytes(form.weights + 1)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 768), (64, 512)])
def test_expanded_numbers(name: str, rows: int, width: int) -> None:
    raw = random_bytes(name, rows, width, seed=rows)
    matrix = BlockMatrix((rows_of(name, raw),), width)
    expected = wanted(name, raw)
    assert same_bits(expand(matrix, torch.float32), expected)
    assert torch.equal(expand(matrix, torch.bfloat16), torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("name", FORMATS)
def test_arbitrary_bytes(name: str) -> None:
    """Every byte may be anything: the float16 numbers are often huge or NaN then."""
    generator = np.random.default_rng(3)
    raw = generator.integers(0, 256, (400, FORMATS[name].row_bytes(256)), dtype=np.uint8)
    assert same_bits(expand(BlockMatrix((rows_of(name, raw),), 256), torch.float32), wanted(name, raw))


@pytest.mark.parametrize("name", FORMATS)
def test_extreme_scales(name: str) -> None:
    for at in HALVES[name]:
        raw = random_bytes(name, len(EXTREME), FORMATS[name].weights)
        raw[:, at : at + 2] = EXTREME[:, None].view(np.uint8)
        found = expand(BlockMatrix((rows_of(name, raw),), FORMATS[name].weights), torch.float32)
        assert same_bits(found, wanted(name, raw))
        assert not found[-3:].isfinite().all(), "the test must reach what is not finite"


def test_runs_lie_beneath_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_AT_ONCE", 600)  # two rows at a time: runs end within such parts
    raws = [(name, random_bytes(name, count, 256, seed=count)) for count, name in enumerate(FORMATS, 1)]
    matrix = BlockMatrix(tuple(rows_of(name, raw) for name, raw in raws), 256)
    expected = np.concatenate([wanted(name, raw) for name, raw in raws])
    assert matrix.shape == expected.shape == (36, 256)
    assert matrix.numel() == 36 * 256
    assert matrix.nbytes == sum(raw.nbytes for _, raw in raws)
    assert same_bits(expand(matrix, torch.float32), expected)


def test_some_rows_alone() -> None:
    raws = [("Q4_1", random_bytes("Q4_1", 7, 64)), ("Q8_0", random_bytes("Q8_0", 5, 64))]
    matrix = BlockMatrix(tuple(rows_of(name, raw) for name, raw in raws), 64)
    rows = torch.tensor([11, 0, 6, 7, 0, 11, 3])
    for dtype in (torch.float32, torch.bfloat16):
        whole = expand(matrix, dtype)
        assert torch.equal(expand_rows(matrix, rows, dtype), whole[rows])
        assert torch.equal(expand_rows(whole, rows, dtype), whole[rows])
        assert expand_rows(matrix, rows[:0], dtype).shape == (0, 64)


def test_plain_numbers_only_change_their_dtype() -> None:
    plain = torch.randn(3, 4)
    assert expand(plain, torch.float32) is plain
    assert torch.equal(expand(plain, torch.bfloat16), plain.bfloat16())


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 64 weights in Q4_0 of wrong length"):
        BlockMatrix((rows_of("Q4_0", random_bytes("Q4_0", 2, 32)),), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_multiplies_with_expanded_blocks(dtype: torch.dtype) -> None:
    ops = ReferenceOps(torch.device("cpu"))
    raws = [("Q4_K", random_bytes("Q4_K", 6, 256)), ("Q6_K", random_bytes("Q6_K", 3, 256))]
    matrix = BlockMatrix(tuple(rows_of(name, raw) for name, raw in raws), 256)
    generator = torch.Generator().manual_seed(1)
    x, bias = (
        torch.randn(5, 256, generator=generator).to(dtype),
        torch.randn(9, generator=generator).to(dtype),
    )
    plain = ops.linear(expand(matrix, dtype), bias)
    assert torch.equal(ops.linear(matrix, bias, dtype=dtype)(x), plain(x))
    rounded = ops.linear(matrix, bias, dtype=dtype, activations="int8")(x)
    wide = ops.linear(expand(matrix, torch.float32), bias.float())
    assert torch.equal(rounded, wide(rounded_operands(x)).to(dtype)), "operands are rounded once"
    assert not torch.equal(rounded, plain(x))
    with pytest.raises(ValueError, match="needs the dtype"):
        ops.linear(matrix)
    with pytest.raises(ValueError, match="for block weights only"):
        ops.linear(expand(matrix, dtype), activations="int8")


def test_operands_in_8_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 80, generator=generator) * 10  # the last group of a row is short
    x[1, :32] = 0
    x[1, 32:64] *= 1e-38  # too small for a scale
    found = rounded_operands(x)
    assert not found[1, :64].any()
    for row in range(3):
        for start in range(0, 80, 32):
            group = x[row, start : start + 32].double()
            scale = group.abs().max() / 127
            error = (found[row, start : start + 32].double() - group).abs().max()
            assert error <= max(scale * 0.5001, 1e-36)
            assert scale < 1e-36 or error > scale * 0.3, "8 bits must be seen"
    x[2, 40] = float("nan")
    x[0, 5] = float("inf")
    broken = rounded_operands(x)
    assert broken[2, 32:64].isnan().all()
    assert not broken[0, :32].isfinite().all()
    assert torch.equal(broken[1], found[1])
    assert torch.equal(broken[2, :32], found[2, :32])
