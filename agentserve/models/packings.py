"""4-bit matrices out of the tensors that AWQ, GPTQ and compressed-tensors write, and FP8 ones out of theirs.

Every eight codes are one int32, the first in its lowest bits; the formats differ in what runs along such a
word, and AWQ also in which of its eight columns comes where.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.narrow import GroupedMatrix, ScaledMatrix, pack_codes

_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, whose code is in a word's i-th four bits
_ONES = 0x11111111  # one in each four bits of a word
_MIDDLE = 8  # the zero of symmetric codes


def awq_matrix(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> GroupedMatrix:
    """`qweight [in, out / 8]`, `qzeros [groups, out / 8]`, `scales [groups, out]`."""
    zeros = _awq_outputs(qzeros).t().contiguous()
    return GroupedMatrix(pack_codes(_awq_outputs(qweight)), scales.contiguous(), zeros, group)


def gptq_matrix(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, groups: Tensor | None, group: int, *, less_one: bool
) -> GroupedMatrix | Tensor:
    """`qweight [in / 8, out]`, `qzeros [groups, out / 8]`, `scales [groups, out]`, each input's group `[in]`.

    `less_one`: zeros are stored less one. Writers subtract it from whole words, so it is added to these:
    a zero of 0 has borrowed from its neighbour. Numbers `[out, in]` instead of a matrix where `groups` has
    more or fewer inputs of a group than others.
    """
    codes = _nibbles(qweight.t().contiguous())
    zeros = _nibbles(qzeros + _ONES if less_one else qzeros)
    return _grouped(codes, scales.contiguous(), zeros, groups, group)


def packed_matrix(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, group: int
) -> GroupedMatrix | Tensor:
    """`packed [out, in / 8]`, `scales [out, groups]`, `zeros [out / 8, groups]` (all 8 where None)."""
    out = packed.shape[0]
    beside = scales.t().contiguous()
    if zeros is None:
        points = torch.full(beside.shape, _MIDDLE, dtype=torch.uint8, device=beside.device)
    else:
        points = _nibbles(zeros.t().contiguous())[:, :out].contiguous()
    return _grouped(_nibbles(packed.contiguous()), beside, points, groups, group)


def scaled_matrix(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> ScaledMatrix:
    """`codes [out, in]` float8_e4m3fn; scales of all, of each output, or `block` of each block."""
    out, inputs = codes.shape
    wide = scales.to(torch.float32)
    if wide.numel() == 1:
        wide, height, width = wide.reshape(1, 1), out, inputs
    elif wide.numel() == out and wide.shape[0] == out:
        wide, height, width = wide.reshape(out, 1), 1, inputs
    else:
        assert block is not None
        height, width = block
    return ScaledMatrix(codes.view(torch.uint8).contiguous(), wide.contiguous(), height, width)


def is_number(codes: Tensor) -> bool:
    """Whether no code of `codes` (float8_e4m3fn) is NaN."""
    return not bool((codes.view(torch.uint8) & 0x7F == 0x7F).any())


def _grouped(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None, group: int
) -> GroupedMatrix | Tensor:
    """`codes [out, in]`; `scales` and `zeros [groups, out]`; `groups [in]`, ascending runs where None."""
    inputs = codes.shape[1]
    if groups is None:
        return GroupedMatrix(pack_codes(codes), scales, zeros, group)
    groups = groups.to(torch.int64)
    order = torch.argsort(groups, stable=True)
    runs = torch.arange(inputs, device=groups.device) // group
    if not torch.equal(groups[order], runs):
        scale, zero = (beside.to(torch.float32)[groups].t() for beside in (scales, zeros))
        return (codes.to(torch.float32) - zero) * scale
    if torch.equal(groups, runs):
        return GroupedMatrix(pack_codes(codes), scales, zeros, group)
    return GroupedMatrix(pack_codes(codes[:, order]), scales, zeros, group, order)


def _nibbles(words: Tensor) -> Tensor:
    """`[rows, n]` int32 -> `[rows, 8 * n]` uint8, the lowest four bits of each word first."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def _awq_outputs(words: Tensor) -> Tensor:
    """`[n, out / 8]` int32 -> `[out, n]` uint8. Words are turned first: codes then move in long runs."""
    turned = words.t().contiguous()
    codes = torch.empty((turned.shape[0], 8, turned.shape[1]), dtype=torch.uint8, device=words.device)
    for place, output in enumerate(_AWQ_PLACES):
        codes[:, output] = (turned >> 4 * place) & 15
    return codes.flatten(0, 1)
