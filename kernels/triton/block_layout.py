"""Block weights as the kernels read them: whole tiles beside each other, everything in 16 or 4 bytes.

A file has a row's blocks one after the other, 18 to 210 bytes each, aligned to nothing. Here 64 outputs
make a *panel*, and 64 neighbours along the width a *pair* (of groups of 32). What a kernel needs of one
panel and pair is one run of bytes, that of the next pair lies behind it:

- `codes`: 32 bytes for each output, the low four bits of the first group's codes in the low halves, those
  of the second group's in the high ones. 8-bit codes: 32 bytes for each group and output.
- `words`: some int32 for each output. First the scales: two float16, one for each group; in K formats four
  bytes instead (scales of two groups and their minima, or four scales of 16 weights in Q6_K). Then, where a
  format has offsets of its own, two float16 of those. Then the codes' further bits: one word for each bit
  and group, bit i for weight i.
- `heads`, in K formats: an int32 for each output and 256 weights: float16 scale and float16 minimum.

That is at most 3 % more than in the file, but for outputs up to a multiple of 64 and a width up to one of
64: what is missing has scale 0. Nothing is rounded: the kernels compute `kernels.blocks.expand`'s values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import BlockMatrix, BlockRows

PANEL, PAIR, GROUP, HEAD = 64, 64, 32, 256
_AT_ONCE = 1 << 22  # weights that are rearranged together: bounds what that holds beside its result


@dataclass(frozen=True, slots=True)
class Layout:
    """What a format looks like to the kernels. Its codes count from `-centre`."""

    wide: bool  # a code has 8 bits, signed; else 4, and `more`
    more: int  # bits of a code beside its low four
    heads: bool  # scales are 6 or 8 bits, times a float16 for each 256 weights
    offsets: bool  # and so are offsets (in K formats they are subtracted)
    centre: int

    @property
    def words(self) -> int:
        """Of each output and pair."""
        return 1 + (self.offsets and not self.heads) + 2 * self.more

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return 16 if self.heads and not self.offsets else GROUP


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "Q4_0": Layout(False, 0, False, False, 8),
        "Q4_1": Layout(False, 0, False, True, 0),
        "Q5_0": Layout(False, 1, False, False, 16),
        "Q5_1": Layout(False, 1, False, True, 0),
        "Q8_0": Layout(True, 0, False, False, 0),
        "Q4_K": Layout(False, 0, True, True, 0),
        "Q5_K": Layout(False, 1, True, True, 0),
        "Q6_K": Layout(False, 2, True, False, 32),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRun:
    """Outputs `first .. first + out - 1` of a matrix, in one format."""

    name: str
    first: int
    out: int
    codes: Tensor  # [panels, pairs, 64, 32] uint8; 8-bit codes: [panels, 2 * pairs, 64, 32]
    words: Tensor  # [panels, pairs, words, 64] int32
    heads: Tensor  # [panels, pairs / 4, 64] int32; anything where there are none

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    @property
    def pairs(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        heads = self.heads.nbytes if self.layout.heads else 0
        return self.codes.nbytes + self.words.nbytes + heads


def pack(matrix: BlockMatrix) -> tuple[PackedRun, ...]:
    """The runs of a matrix on its device, neighbours in one format together. Keeps none of its memory."""
    runs, first = [], 0
    filled = [run for run in matrix.runs if run.data.shape[0]]
    for name, group in groupby(filled, lambda run: run.format.name):
        run = _packed(name, list(group), matrix.width, first)
        runs.append(run)
        first += run.out
    return tuple(runs)


def _packed(name: str, rows: list[BlockRows], width: int, first: int) -> PackedRun:
    layout, out = LAYOUTS[name], sum(part.data.shape[0] for part in rows)
    panels, pairs = -(-out // PANEL), -(-width // PAIR)
    device = rows[0].data.device
    shape = (panels, 2 * pairs if layout.wide else pairs, PANEL, GROUP)
    run = PackedRun(
        name,
        first,
        out,
        torch.empty(shape, dtype=torch.uint8, device=device),
        torch.empty((panels, pairs, layout.words, PANEL), dtype=torch.int32, device=device),
        torch.empty((panels, max(1, pairs // 4), PANEL), dtype=torch.int32, device=device),
    )
    panel = 0
    for data in _whole_panels(rows, max(1, _AT_ONCE // (PANEL * width))):
        part = slice(panel, panel + data.shape[0] // PANEL)
        _pack_panels(run, part, data.view(data.shape[0], -1, rows[0].format.nbytes))
        panel = part.stop
    return run


def _whole_panels(rows: list[BlockRows], panels: int) -> Iterator[Tensor]:
    """The rows' bytes, `panels` panels at a time, the last one filled up with zeros."""
    waiting: list[Tensor] = []
    count = 0
    for data in (piece for part in rows for piece in torch.split(part.data, panels * PANEL)):
        waiting.append(data)
        count += data.shape[0]
        while count >= panels * PANEL:
            together = torch.cat(waiting)
            yield together[: panels * PANEL]
            waiting = [together[panels * PANEL :]]
            count -= panels * PANEL
    if count:
        yield F.pad(torch.cat(waiting), (0, 0, 0, -count % PANEL))


def _pack_panels(run: PackedRun, part: slice, blocks: Tensor) -> None:
    """Rearrange `blocks [rows, blocks of a row, bytes]` of some whole panels."""
    layout, pairs = run.layout, run.pairs
    codes = _CODES[run.name](blocks).flatten(1)  # [rows, width] uint8
    codes = F.pad(codes, (0, pairs * PAIR - codes.shape[1])).view(-1, PANEL, pairs, 2, GROUP)
    low = codes.flatten(2, 3) if layout.wide else (codes[..., 0, :] & 15) | codes[..., 1, :] << 4
    run.codes[part] = low.transpose(1, 2)
    scales, heads = _SCALES[run.name](blocks)
    scales = F.pad(scales, (0, 0, 0, pairs - scales.shape[1])).view(-1, PANEL, pairs, scales.shape[2])
    words = list(scales.unbind(-1))
    for bit in range(4, 4 + layout.more):
        words += _joined(codes >> bit, 1).unbind(-1)
    run.words[part] = torch.stack(words, dim=-1).permute(0, 2, 3, 1)
    if heads is not None:
        run.heads[part] = heads.view(-1, PANEL, pairs // 4).transpose(1, 2)


def _nibbles(data: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 2 * n]`: all low halves, then all high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """`[..., n]` bytes -> `[..., 8 * n]` bits, the lowest of each byte first."""
    return ((data[..., None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1).flatten(-2)


def _codes_5_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., None, 16:48] >> shifts) & 1  # group g's fifth bits are bit g of 32 bytes
    return (
        _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))) | high.view(*high.shape[:2], 4, 64) << 4
    ).flatten(-2)


def _codes_6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3  # [..., half, group of 32, 32]
    codes: Tensor = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2) | high.flatten(-3) << 4
    return codes


def _joined(parts: Tensor, bits: int) -> Tensor:
    """`[..., n]` numbers of `bits` bits -> int32 `[...]`, the first lowest."""
    low = parts.to(torch.int64) & ((1 << bits) - 1)
    places = torch.arange(0, bits * parts.shape[-1], bits, device=parts.device)
    joined: Tensor = (low << places).sum(-1)
    return joined.to(torch.int32)


def _float16(blocks: Tensor, at: int, count: int) -> Tensor:
    """The bits of `count` float16 numbers from byte `at` on, `[rows, blocks, count]` int32."""
    return _joined(blocks[..., at : at + 2 * count].unflatten(-1, (count, 2)), 8)


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scales (and offsets) of 32 weights: `[rows, pairs, words]` int32, two groups' in each."""
    halves = _float16(blocks, 0, 1 if blocks.shape[-1] in (18, 22, 34) else 2)
    halves = F.pad(halves, (0, 0, 0, halves.shape[1] % 2)).unflatten(1, (-1, 2))
    return _joined(halves.transpose(2, 3), 16), None


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Q4_K and Q5_K: (scale, scale, minimum, minimum) of each pair; see `kernels.blocks` for the 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    four = torch.cat((scales.unflatten(-1, (4, 2)), minima.unflatten(-1, (4, 2))), dim=-1)
    return _joined(four, 8).flatten(1).unsqueeze(-1), _joined(_float16(blocks, 0, 2), 16)


def _scales_6_k(blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    four = blocks[..., 192:208].unflatten(-1, (4, 4))
    return _joined(four, 8).flatten(1).unsqueeze(-1), _float16(blocks, 208, 1).squeeze(-1)


_CODES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "Q4_0": lambda blocks: _nibbles(blocks[..., 2:]),
        "Q4_1": lambda blocks: _nibbles(blocks[..., 4:]),
        "Q5_0": lambda blocks: _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4,
        "Q5_1": lambda blocks: _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4,
        "Q8_0": lambda blocks: blocks[..., 2:],
        "Q4_K": lambda blocks: _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2),
        "Q5_K": _codes_5_k,
        "Q6_K": _codes_6_k,
    }
)
"""`[rows, blocks, bytes]` -> `[rows, blocks, weights]`: whole codes as they are stored, in order."""

_SCALES: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = MappingProxyType(
    {name: _halves for name, layout in LAYOUTS.items() if not layout.heads}
    | {"Q4_K": _scales_k, "Q5_K": _scales_k, "Q6_K": _scales_6_k}
)
"""`[rows, blocks, bytes]` -> `[rows, pairs, words]` int32 and `[rows, heads]` int32."""
