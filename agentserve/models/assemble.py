"""From named tensors, as a file lists them, to a decoder's weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.shard import WHOLE, Cut, Shard
from agentserve.models.weights import DecoderWeights, Place, layout, weights_of
from kernels.blocks import FORMATS, BlockMatrix, BlockRows, Matrix, expand
from kernels.narrow import NarrowMatrix, narrow_part, stack

log = logging.getLogger(__name__)

_NO_BLOCKS: Mapping[str, str] = MappingProxyType({})
_IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # derived from the config


class Sliced(Protocol):
    """A tensor, or one in a file of which parts can be read."""

    def __getitem__(self, at: slice | tuple[slice, slice], /) -> Tensor: ...


class Assembler:
    """Takes a model's tensors one by one, in any order, and checks that the set is right.

    All of them are announced by `wants` first; memory is taken by `allocate`, once every tensor that
    the config promises is known to be there: a config alone must not cost memory. Numbers are copied
    straight into the fused matrix, so that no tensor exists twice for long; blocks stay where they are, and
    codes with scales are put beneath each other once all of a field are there.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        file_name: Callable[[str], str] = str,
        shard: Shard = WHOLE,
    ) -> None:
        """`file_name` spells a tensor's name as the file does, for errors. Of each tensor only what `shard`
        keeps of it is copied; tensors are given whole, or as what gives slices of a file."""
        self._config = config
        self._shard = shard
        self._file_name = file_name
        self._dtype, self._device = dtype, device
        self._cuts = shard.cuts(config)
        self._missing = {part.name: part for part in layout(config)}
        self._announced: set[str] = set()
        self._fields: dict[Place, Tensor] = {}
        self._runs: dict[Place, dict[int, BlockRows]] = {}
        self._narrow: dict[Place, dict[int, NarrowMatrix | Tensor]] = {}
        self._stacked: dict[Place, Matrix] = {}
        self._awaited: set[str] = set()

    def wants(self, name: str, shape: tuple[int, ...], place: str) -> bool:
        """Whether a tensor is to be read; a `ModelError` if it is unknown, repeated or misshapen."""
        tied_head = name == "lm_head.weight" and self._config.tie_embeddings
        if tied_head or _IGNORED.fullmatch(name):
            return False
        if name in self._announced:
            raise ModelError(f"{place}: tensor {self._file_name(name)} is there twice")
        expected, label = self._missing.get(name), self._file_name(name)
        if expected is None:
            raise ModelError(f"{place}: tensor {label} is not part of a {self._config.architecture} model")
        if shape != expected.shape:
            raise ModelError(
                f"{place}: tensor {label} has shape {list(shape)}, the config asks for {list(expected.shape)}"
            )
        del self._missing[name]
        self._announced.add(name)
        return name in self._cuts

    def allocate(self, place: str, blocks: Mapping[str, str] = _NO_BLOCKS) -> None:
        """Make room for the tensors, or raise a `ModelError` that names the first missing one.

        `blocks` are the quantised matrices, with their formats. Those stay as they are that are not fused
        with one that is not; gates and ups also must share a format, as each gate is computed beside
        its up. Whether codes with scales fit together is seen when they are put (`put_narrow`).
        """
        for name in self._missing:
            more = f" (and {len(self._missing) - 1} more)" if len(self._missing) > 1 else ""
            raise ModelError(f"{place}: tensor {self._file_name(name)} is missing{more}")
        kept = self._kept(place, blocks)
        self._runs = {field: {} for field, found in kept.items() if found <= FORMATS.keys()}
        self._narrow = {field: {} for field in kept if field not in self._runs}
        shapes = {cut.place: (cut.row + cut.shape[0], *cut.shape[1:]) for cut in self._cuts.values()}
        self._fields = {
            field: torch.empty(shape, dtype=self._dtype, device=self._device)
            for field, shape in shapes.items()
            if field not in kept
        }
        self._awaited = set(self._cuts)

    def keeps_blocks(self, name: str) -> bool:
        """Whether a tensor goes to `put_blocks` or `put_narrow`, not to `put`."""
        place = self._cuts[name].place
        return place in self._runs or place in self._narrow

    def put(self, name: str, values: Sliced) -> None:
        """Copy a tensor that `wants` has accepted into its place."""
        cut = self._taken(name)
        rows = slice(*cut.rows)
        taken = values[rows] if cut.columns is None else values[rows, slice(*cut.columns)]
        self._fields[cut.place][cut.row : cut.row + cut.shape[0]].copy_(taken)

    def put_blocks(self, name: str, rows: BlockRows) -> None:
        """Keep a tensor as the blocks that it is."""
        cut = self._taken(name)
        data = rows.data[slice(*cut.rows)]
        if cut.columns is not None:
            first, end = map(rows.format.row_bytes, cut.columns)
            data = data[:, first:end].contiguous()
        self._runs[cut.place][cut.row] = BlockRows(rows.format, data.to(self._device))

    def put_narrow(self, name: str, matrix: NarrowMatrix | Tensor) -> None:
        """Keep a tensor as codes with scales. Numbers in its stead, or another format beside it, expand what
        it is fused with."""
        cut = self._taken(name)
        found = self._narrow[cut.place]
        found[cut.row] = self._own(name, cut, matrix)
        if not any(self._cuts[other].place == cut.place for other in self._awaited):
            self._stacked[cut.place] = self._beneath([found[row] for row in sorted(found)], name)
            del self._narrow[cut.place]

    def finish(self, rope_factors: Tensor | None = None) -> DecoderWeights:
        """The weights, every announced tensor put."""
        assert not self._awaited
        fields: dict[Place, Matrix] = self._fields | self._stacked
        for cut in self._cuts.values():
            if cut.place in self._runs and cut.row == 0:
                runs = sorted(self._runs[cut.place].items())
                fields[cut.place] = BlockMatrix(tuple(run for _, run in runs), cut.shape[1])
        weights = weights_of(self._config, self._dtype, fields, rope_factors)
        if self._shard == WHOLE or not self._config.tie_embeddings:
            return weights
        return replace(weights, lm_head=self._shard.head(weights.embedding))

    def _own(self, name: str, cut: Cut, matrix: NarrowMatrix | Tensor) -> NarrowMatrix | Tensor:
        """What this rank has of a quantised matrix, expanded where it cannot be cut. Keeps no more memory."""
        if self._shard == WHOLE:
            return matrix
        if not isinstance(matrix, Tensor):
            try:
                part = narrow_part(matrix, cut.rows, cut.columns)
            except ValueError as error:
                log.info("%s is shared by ranks and expanded: %s", self._file_name(name), error)
            else:
                return part if cut.columns is not None else replace(part, codes=part.codes.clone())
        columns = cut.columns or (0, matrix.shape[1])
        return expand(matrix, self._dtype)[slice(*cut.rows), slice(*columns)]

    def _beneath(self, parts: Sequence[NarrowMatrix | Tensor], name: str) -> Matrix:
        """The parts of a field as one matrix, expanded where they do not fit together."""
        narrow = [part for part in parts if not isinstance(part, Tensor)]
        if len(narrow) == len(parts):
            try:
                return stack(narrow)
            except ValueError as error:
                log.info("%s and what it is fused with are expanded: %s", self._file_name(name), error)
        return torch.cat([expand(part, self._dtype) for part in parts])

    def _kept(self, place: str, blocks: Mapping[str, str]) -> dict[Place, set[str]]:
        """The fields that stay quantised, with the formats of their parts."""
        formats: dict[Place, set[str]] = {}
        plain: set[Place] = set()
        for name, cut in self._cuts.items():
            if name in blocks:
                formats.setdefault(cut.place, set()).add(blocks[name])
            else:
                plain.add(cut.place)
        kept = {field: found for field, found in formats.items() if field not in plain}
        unlike = {field for field, found in kept.items() if len(found) > 1 and field[1] == "gate_up"}
        if unlike:
            log.info(
                "%s: in %d of its layers gates and ups are in different formats and are expanded",
                place,
                len(unlike),
            )
        torn = {
            cut.place
            for name, cut in self._cuts.items()
            if cut.place in kept and cut.columns is not None and _tears(blocks[name], cut.columns)
        }
        if torn:
            log.info(
                "%s: %d matrices are shared by %d ranks in the middle of blocks and are expanded",
                place, len(torn), self._shard.degree,
            )  # fmt: skip
        return {field: found for field, found in kept.items() if field not in unlike | torn}

    def _taken(self, name: str) -> Cut:
        self._awaited.remove(name)
        return self._cuts[name]


def _tears(form: str, columns: tuple[int, int]) -> bool:
    """Whether columns begin or end within a block. (Of codes with scales `narrow_part` says it.)"""
    return form in FORMATS and any(column % FORMATS[form].weights for column in columns)
