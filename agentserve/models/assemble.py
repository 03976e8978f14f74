"""From named tensors, as a file lists them, to a decoder's weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.weights import DecoderWeights, Part, Place, field_shapes, layout, weights_of
from kernels.blocks import FORMATS, BlockMatrix, BlockRows, Matrix, expand
from kernels.narrow import NarrowMatrix, stack

log = logging.getLogger(__name__)

_NO_BLOCKS: Mapping[str, str] = MappingProxyType({})
_IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # derived from the config


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
    ) -> None:
        """`file_name` spells a tensor's name as the file does, for errors."""
        self._config = config
        self._file_name = file_name
        self._dtype, self._device = dtype, device
        self._parts = {part.name: part for part in layout(config)}
        self._missing = dict(self._parts)
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
        return True

    def allocate(self, place: str, blocks: Mapping[str, str] = _NO_BLOCKS) -> None:
        """Make room for the tensors, or raise a `ModelError` that names the first missing one.

        `blocks` are the quantised matrices, with their formats. Those stay as they are that are not fused
        with one that is not; gates and ups also must share a format, as each gate is computed beside
        its up, and so must codes with scales (`keeps_blocks`).
        """
        for name in self._missing:
            more = f" (and {len(self._missing) - 1} more)" if len(self._missing) > 1 else ""
            raise ModelError(f"{place}: tensor {self._file_name(name)} is missing{more}")
        kept = self._kept(place, blocks)
        self._runs = {field: {} for field, found in kept.items() if found <= FORMATS.keys()}
        self._narrow = {field: {} for field in kept if field not in self._runs}
        self._fields = {
            field: torch.empty(shape, dtype=self._dtype, device=self._device)
            for field, shape in field_shapes(self._config).items()
            if field not in kept
        }
        self._awaited = set(self._parts)

    def keeps_blocks(self, name: str) -> bool:
        """Whether a tensor goes to `put_blocks` or `put_narrow`, not to `put`."""
        place = self._parts[name].place
        return place in self._runs or place in self._narrow

    def put(self, name: str, values: Tensor) -> None:
        """Copy a tensor that `wants` has accepted into its place."""
        part = self._taken(name)
        self._fields[part.place][part.row : part.row + part.shape[0]].copy_(values)

    def put_blocks(self, name: str, rows: BlockRows) -> None:
        """Keep a tensor as the blocks that it is."""
        part = self._taken(name)
        self._runs[part.place][part.row] = BlockRows(rows.format, rows.data.to(self._device))

    def put_narrow(self, name: str, matrix: NarrowMatrix | Tensor) -> None:
        """Keep a tensor as codes with scales. Numbers in its stead expand what it is fused with."""
        part = self._taken(name)
        found = self._narrow[part.place]
        found[part.row] = matrix
        if not any(self._parts[other].place == part.place for other in self._awaited):
            self._stacked[part.place] = self._beneath([found[row] for row in sorted(found)], name)
            del self._narrow[part.place]

    def finish(self, rope_factors: Tensor | None = None) -> DecoderWeights:
        """The weights, every announced tensor put."""
        assert not self._awaited
        fields: dict[Place, Matrix] = self._fields | self._stacked
        for part in self._parts.values():
            if part.place in self._runs and part.row == 0:
                runs = sorted(self._runs[part.place].items())
                fields[part.place] = BlockMatrix(tuple(run for _, run in runs), part.shape[1])
        return weights_of(self._config, self._dtype, fields, rope_factors)

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
        for part in self._parts.values():
            if part.name in blocks:
                formats.setdefault(part.place, set()).add(blocks[part.name])
            else:
                plain.add(part.place)
        kept = {field: found for field, found in formats.items() if field not in plain}
        unlike = {
            field
            for field, found in kept.items()
            if len(found) > 1 and (field[1] == "gate_up" or not found <= FORMATS.keys())
        }
        if unlike:
            log.info(
                "%s: in %d of its layers gates and ups are in different formats and are expanded",
                place,
                len(unlike),
            )
        return {field: found for field, found in kept.items() if field not in unlike}

    def _taken(self, name: str) -> Part:
        self._awaited.remove(name)
        return self._parts[name]
