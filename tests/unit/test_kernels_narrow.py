"""FP8 and 4-bit groups as matrices: their values, rows of them, several beneath each other, products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.blocks import expand, expand_rows
from kernels.cpu.ops import CpuOps
from kernels.narrow import (
    GroupedMatrix,
    NarrowMatrix,
    ScaledMatrix,
    narrow_part,
    pack_codes,
    stack,
    unpack_codes,
)
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.cpu_builds import CHECKED, builds

CPU = torch.device("cpu")
ops = builds(CHECKED)


def drawn(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def scaled(out: int, inputs: int, height: int, width: int, seed: int = 0) -> ScaledMatrix:
    """Any codes but NaN."""
    codes = drawn(out, inputs, below=256, seed=seed)
    codes[codes % 128 == 127] = 0
    shape = (-(-out // height), -(-inputs // width))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 400 + 1e-3
    return ScaledMatrix(codes, scales, height, width)


def grouped(out: int, inputs: int, group: int, order: Tensor | None = None, seed: int = 0) -> GroupedMatrix:
    groups = -(-inputs // group)
    scales = torch.rand((groups, out), generator=torch.Generator().manual_seed(seed)) / 20 + 0.01
    zeros = drawn(groups, out, below=16, seed=seed)
    packed = drawn(out, inputs // 2, below=256, seed=seed)
    return GroupedMatrix(packed, scales.to(torch.float16), zeros, group, order)


def ordered(inputs: int) -> Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


MATRICES: dict[str, NarrowMatrix] = {
    "fp8-blocks": scaled(50, 200, 24, 64),
    "fp8-rows": scaled(21, 70, 1, 70),
    "fp8-tensor": scaled(16, 96, 16, 96),
    "int4-groups": grouped(50, 160, 64),
    "int4-rows": grouped(21, 96, 96),
    "int4-order": grouped(33, 128, 32, ordered(128)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_rows_are_those_of_the_whole(name: str) -> None:
    matrix = MATRICES[name]
    rows = torch.tensor([3, 0, matrix.shape[0] - 1, 3])
    for dtype in (torch.float32, torch.bfloat16):
        whole = expand(matrix, dtype)
        assert whole.shape == matrix.shape
        assert torch.equal(expand_rows(matrix, rows, dtype), whole[rows])
    assert torch.equal(whole, expand(matrix, torch.float32).to(torch.bfloat16)), "rounded once"
    assert matrix.numel() == whole.numel()
    assert matrix.nbytes < 2 * whole.numel()


def test_many_rows_are_expanded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [expand(matrix, torch.float32) for matrix in MATRICES.values()]
    monkeypatch.setattr("kernels.narrow._AT_ONCE", 300)
    for matrix, expected in zip(MATRICES.values(), whole, strict=True):
        assert torch.equal(expand(matrix, torch.float32), expected)


def test_codes_lie_in_units() -> None:
    """Byte i of a unit has code i in its low half and code 16 + i in its high one."""
    codes = drawn(5, 96, below=16)
    packed = pack_codes(codes)
    assert torch.equal(unpack_codes(packed), codes)
    for column in range(96):
        byte = packed[:, column // 32 * 16 + column % 16]
        assert torch.equal(byte >> 4 if column % 32 >= 16 else byte & 15, codes[:, column])


def test_values_of_every_fp8_code() -> None:
    """Those of torch's own type, and of the format's rule at its ends."""
    codes = torch.arange(256, dtype=torch.uint8)[None]
    matrix = ScaledMatrix(codes, torch.full((1, 1), 0.5), 1, 256)
    found = expand(matrix, torch.float32)[0]
    assert found[1] == 2.0**-10
    assert found[0x38] == 0.5
    assert found[0xFE] == -224.0
    numbers = codes[0] % 128 != 127
    assert torch.equal(found[numbers], codes[0].view(torch.float8_e4m3fn).to(torch.float32)[numbers] / 2)


def test_a_stack_has_the_values_of_its_parts() -> None:
    order = ordered(128)
    for parts in (
        [scaled(64, 128, 24, 32, 1), scaled(32, 128, 24, 32, 2), scaled(32, 128, 24, 32, 3)],
        [scaled(10, 128, 10, 128, 1), scaled(6, 128, 1, 128, 2), scaled(30, 128, 30, 128, 3)],
        [scaled(128, 128, 128, 64, 1), scaled(256, 128, 128, 64, 2)],
        [grouped(10, 128, 32, seed=1), grouped(7, 128, 32, seed=2)],
        [grouped(10, 128, 32, order, 1), grouped(7, 128, 32, order.clone(), 2)],
    ):
        whole = stack(parts)
        assert whole.format == parts[0].format
        assert torch.equal(expand(whole, torch.float32), torch.cat([expand(p, torch.float32) for p in parts]))
    wide = stack([scaled(128, 128, 128, 64, 1), scaled(256, 128, 128, 64, 2)])
    assert isinstance(wide, ScaledMatrix)
    assert wide.height == 128, "scales are not repeated where edges allow it"


def test_what_cannot_be_stacked() -> None:
    for parts, message in (
        ([scaled(8, 128, 8, 32), grouped(8, 128, 32)], "different kinds"),
        ([scaled(8, 128, 8, 32), scaled(8, 128, 8, 64)], "different runs"),
        ([grouped(8, 128, 64), grouped(8, 128, 32)], "groups of different size"),
        ([grouped(8, 128, 32), grouped(8, 128, 32, ordered(128))], "groups of different inputs"),
        ([grouped(8, 64, 32, ordered(64)), grouped(8, 64, 32, ordered(64).flip(0))], "of different inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            stack(parts)


def test_parts_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(8, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="not a multiple of 32"):
        ScaledMatrix(codes, torch.ones(1, 2), 8, 40)
    with pytest.raises(ValueError, match=r"\[1, 3\] scales, \[1, 2\] needed"):
        ScaledMatrix(codes, torch.ones(1, 3), 8, 32)
    with pytest.raises(ValueError, match="codes and scales are"):
        ScaledMatrix(codes, torch.ones(1, 2, dtype=torch.float16), 8, 32)
    beside = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="groups of 48 among 128"):
        GroupedMatrix(codes, beside.half(), beside, 48)
    with pytest.raises(ValueError, match=r"\[4, 8\] scales, \[2, 8\] needed"):
        GroupedMatrix(codes, beside.half(), beside, 64)
    with pytest.raises(ValueError, match=r"\[3, 8\] zeros"):
        GroupedMatrix(codes, beside.half(), beside[:3], 32)
    with pytest.raises(ValueError, match="an order of 64 columns for 128"):
        GroupedMatrix(codes, beside.half(), beside, 32, ordered(64))
    with pytest.raises(ValueError, match="codes and zeros are"):
        GroupedMatrix(codes, beside.half(), beside.half(), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MATRICES)
def test_cpu_backends_multiply_with_expanded_numbers(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    matrix = MATRICES[name]
    x = torch.randn(5, matrix.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.linspace(-1, 1, matrix.shape[0]).to(dtype)
    plain = expand(matrix, dtype)
    backends: tuple[Ops, ...] = (ops, ReferenceOps(CPU))
    for backend in backends:
        expected = backend.linear(plain, bias)(x)
        assert torch.equal(backend.linear(matrix, bias, dtype=dtype)(x), expected)
        with pytest.raises(ValueError, match="int8 activations are for block weights only"):
            backend.linear(matrix, bias, dtype=dtype, activations="int8")
        with pytest.raises(ValueError, match="needs the dtype of its operands"):
            backend.linear(matrix, bias)


@pytest.mark.parametrize("name", MATRICES)
def test_rows_that_are_cut_out(name: str) -> None:
    matrix = MATRICES[name]
    out = matrix.shape[0]
    whole = expand(matrix, torch.float32)
    for first, end in ((0, out), (0, 8), (8, 16), (out - 5, out), (3, 4)):
        found = narrow_part(matrix, (first, end))
        assert found.codes.untyped_storage().data_ptr() == matrix.codes.untyped_storage().data_ptr()
        assert torch.equal(expand(found, torch.float32), whole[first:end])
        assert found.format == matrix.format


def test_columns_that_are_cut_out() -> None:
    for matrix, pieces in (
        (scaled(50, 256, 24, 64), ((0, 128), (128, 256), (32, 96), (64, 256))),
        (scaled(50, 200, 24, 64), ((64, 200), (0, 128))),
        (scaled(20, 100, 1, 100), ((0, 50), (3, 4))),
        (grouped(20, 256, 64), ((0, 128), (32, 96), (192, 256))),
        (grouped(20, 96, 96), ((0, 32), (32, 96))),
    ):
        whole = expand(matrix, torch.float32)
        for start, stop in pieces:
            found = narrow_part(matrix, (4, 20), (start, stop))
            assert torch.equal(expand(found, torch.float32), whole[4:20, start:stop])
    for matrix, columns, message in (
        (scaled(50, 256, 24, 64), (16, 64), "cut through 32"),
        (grouped(20, 96, 96), (0, 16), "not multiples of 32"),
        (MATRICES["int4-order"], (0, 64), "act-order"),
    ):
        with pytest.raises(ValueError, match=message):
            narrow_part(matrix, None, columns)
