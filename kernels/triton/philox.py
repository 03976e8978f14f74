"""Philox4x64-10 on the device: the uniform number of a (seed, position), bit for bit that of the host.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The key is a seed's low 128 bits in
two's complement, the counter is the position; of a block's four words the first is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import Case, Choice, kernel, launch

_MULTIPLIER_0 = tl.constexpr(0xD2E7470EE14C6C93)
_MULTIPLIER_1 = tl.constexpr(0xCA5A826395121157)
_WEYL_0 = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1 = tl.constexpr(0xBB67AE8584CAA73B)
_ROUNDS = tl.constexpr(10)

_CHOICE = Choice({"block": 128}, warps=4, stages=1)
_MASK = (1 << 64) - 1


@triton.jit
def philox_word(low, high, position):
    """The block's first word (uint64) of keys `low`, `high` and counters `position`, all uint64 tensors."""
    c0 = position
    c1 = position ^ position
    c2 = c1
    c3 = c1
    k0 = low
    k1 = high
    for _ in tl.static_range(_ROUNDS):
        left = tl.umulhi(c0, _MULTIPLIER_0)
        right = tl.umulhi(c2, _MULTIPLIER_1)
        low_left = c0 * _MULTIPLIER_0
        low_right = c2 * _MULTIPLIER_1
        c0 = right ^ c1 ^ k0
        c1 = low_right
        c2 = left ^ c3 ^ k1
        c3 = low_left
        k0 = k0 + _WEYL_0
        k1 = k1 + _WEYL_1
    return c0


@kernel("rows")
def _uniforms(keys, positions, out, rows, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < rows
    low = tl.load(keys + at * 2, mask=inside, other=0).to(tl.uint64)
    high = tl.load(keys + at * 2 + 1, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + at, mask=inside, other=0).to(tl.uint64)
    word = philox_word(low, high, position)
    tl.store(out + at, (word >> 11).to(tl.float64) * (1.0 / (1 << 53)), mask=inside)


def key_words(seed: int) -> tuple[int, int]:
    """The two words of a seed's key, low word first, as int64 has them."""
    low, high = seed & _MASK, (seed >> 64) & _MASK
    return low - ((low >> 63) << 64), high - ((high >> 63) << 64)


def uniforms(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """`[rows]` float64 in [0, 1), 53 random bits each. Seeds: any integers; positions: 0 to 2^63 - 1."""
    keys = torch.tensor([key_words(seed) for seed in seeds], dtype=torch.int64, device=device)
    counters = torch.tensor(positions, dtype=torch.int64, device=device)
    rows = len(seeds)
    out = torch.empty(rows, dtype=torch.float64, device=device)
    grid = (triton.cdiv(rows, _CHOICE.tiles["block"]),)
    launch(_uniforms, grid, keys, counters, out, rows, choice=_CHOICE)
    return out


def philox_cases() -> list[Case]:
    """What there is to compile: it depends on no model."""
    signature = {"keys": "*i64", "positions": "*i64", "out": "*fp64", "rows": "i32"}
    return [Case("uniforms", _uniforms, signature, {}, _CHOICE, decode=False)]
