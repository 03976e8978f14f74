"""The tensors of a Hugging Face folder that stand for quantised matrices: which belong together, whether they
fit, and the matrix that they are. Everything that can be wrong is found before memory is taken, except what
only the numbers tell."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.packings import awq_matrix, gptq_matrix, is_number, packed_matrix, scaled_matrix
from agentserve.models.quantization import Packing, Quantization
from agentserve.models.weights import layout
from kernels.narrow import UNIT, NarrowMatrix

log = logging.getLogger(__name__)

Read = Callable[[str], Tensor]
"""A tensor's numbers by its name."""

_MAIN: Mapping[Packing, str] = MappingProxyType(
    {"fp8": "weight", "awq": "qweight", "gptq": "qweight", "packed": "weight_packed"}
)
_BESIDE: Mapping[Packing, frozenset[str]] = MappingProxyType(
    {
        "fp8": frozenset({"weight_scale", "weight_scale_inv"}),
        "awq": frozenset({"qzeros", "scales"}),
        "gptq": frozenset({"qzeros", "scales", "g_idx"}),
        "packed": frozenset({"weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"}),
    }
)
_FLOATS = frozenset({"F32", "F16", "BF16"})
_SCALES = _FLOATS | {"F8_E8M0"}  # of FP8: powers of two, too
_WORDS = frozenset({"I32"})
_CODES = 8  # 4-bit codes in a word
_UNREAD = re.compile(  # of activations and KV, which are not rounded here
    r"model\.layers\.\d+\.[\w.]+\.(input_scale|input_scale_ub|input_zero_point|activation_scale|output_scale"
    r"|[qkv]_scale|kv_scale|prob_scale|prob_output_scale)"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a safetensors header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class QuantizedTensors:
    """Collects a model's quantised matrices, tensor by tensor, in any order and from any file."""

    def __init__(self, config: DecoderConfig, quantization: Quantization) -> None:
        self._config = config
        self._what = quantization
        self._known = {part.name for part in layout(config)}
        self._shapes = {
            part.name.removesuffix(".weight"): (part.shape[0], part.shape[1])
            for part in layout(config)
            if len(part.shape) == 2
        }
        self._found: dict[str, dict[str, Entry]] = {}  # by matrix, then by what stands behind its name
        self._biases: dict[str, Entry] = {}
        self._unread = 0

    def takes(self, name: str, entry: Entry, place: str) -> bool:
        """Whether a tensor belongs to a quantised matrix, or is for activations or KV and not read."""
        if _UNREAD.fullmatch(name):
            self._unread += 1
            return True
        matrix, _, kind = name.rpartition(".")
        packing = self._what.packing
        if matrix not in self._shapes:
            return False
        if kind == "bias" and packing == "gptq" and name not in self._known:
            self._biases[name] = entry  # some writers give every matrix one
            return True
        main = kind == _MAIN[packing] and (packing != "fp8" or entry.dtype == "F8_E4M3")
        if not main and kind not in _BESIDE[packing]:
            return False
        found = self._found.setdefault(matrix, {})
        if kind in found:
            raise ModelError(f"{place}: tensor {name} is there twice")
        found[kind] = entry
        return True

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Every quantised matrix and its shape `[out, in]`."""
        for matrix in self._found:
            yield matrix, self._shapes[matrix]

    def check(self, place: str, read: Read) -> Mapping[str, str]:
        """The format of each matrix (`NarrowMatrix.format`), by `X.weight`; a `ModelError` for tensors that
        are missing or do not fit. Reads small ones only."""
        if self._unread:
            log.info("%s: %d scales of activations or KV are not used", place, self._unread)
        for matrix in self._found:
            self._check(place, matrix)
        for matrix, found in self._found.items():
            self._check_numbers(place, matrix, found, read)
        for name, entry in self._biases.items():
            _fits(place, name, entry, self._shapes[name.removesuffix(".bias")][:1], _FLOATS)
            if bool(read(name).any()):
                kind = self._config.architecture
                raise ModelError(f"{place}: tensor {name} is not zero, and not part of a {kind} model")
        return {f"{matrix}.weight": self._format(matrix) for matrix in self._found}

    def matrix(self, matrix: str, read: Read, device: torch.device, place: str) -> NarrowMatrix | Tensor:
        """The matrix out of its tensors; numbers where its groups are of unequal sizes."""
        what, inputs = self._what, self._shapes[matrix][1]
        given = {kind: read(f"{matrix}.{kind}").to(device) for kind in self._found[matrix]}
        scale = given[self._scale(matrix)]
        if not bool(scale.to(torch.float32).isfinite().all()):
            raise ModelError(f"{place}: tensor {matrix}.{self._scale(matrix)} is not finite")
        group = what.group or inputs
        match what.packing:
            case "fp8":
                if not is_number(given["weight"]):
                    raise ModelError(f"{place}: tensor {matrix}.weight has NaN in it")
                return scaled_matrix(given["weight"], scale, what.block)
            case "awq":
                return awq_matrix(given["qweight"], given["qzeros"], scale, group)
            case "gptq":
                groups = given.get("g_idx")
                return gptq_matrix(
                    given["qweight"], given["qzeros"], scale, groups, group, less_one=what.less_one
                )
            case "packed":
                zeros, groups = given.get("weight_zero_point"), given.get("weight_g_idx")
                return packed_matrix(given["weight_packed"], scale, zeros, groups, group)

    def _scale(self, matrix: str) -> str:
        """The name of its scales behind the matrix's."""
        return next(
            kind for kind in self._found[matrix] if kind == "scales" or kind.startswith("weight_scale")
        )

    def _format(self, matrix: str) -> str:
        run, bits = self._what.group, "INT4"
        if self._what.packing == "fp8":
            bits = "FP8"
            shape = self._found[matrix][self._scale(matrix)].shape
            blocks = self._what.block
            run = blocks[1] if blocks is not None and not self._whole(matrix, shape) else None
        return bits if run is None or run >= self._shapes[matrix][1] else f"{bits}-{run}"

    def _whole(self, matrix: str, shape: tuple[int, ...]) -> bool:
        """Whether these are scales of the whole matrix, or of each output."""
        out = self._shapes[matrix][0]
        return shape in {(), (1,), (1, 1), (out,), (out, 1)}

    def _check(self, place: str, matrix: str) -> None:
        found, what = self._found[matrix], self._what
        out, inputs = self._shapes[matrix]
        main = _MAIN[what.packing]
        if main not in found:
            first = next(iter(found))
            raise ModelError(f"{place}: tensor {matrix}.{first} has no quantised {matrix}.{main} beside it")
        if what.packing == "fp8":
            self._check_fp8(place, matrix)
            return
        if out % _CODES or inputs % UNIT:
            problem = f"is [{out}, {inputs}]: 4 bits need multiples of {_CODES} and {UNIT}"
            raise ModelError(f"{place}: matrix {matrix} {problem}")
        groups = -(-inputs // (what.group or inputs))
        for kind, (shape, dtypes, needed) in self._wanted(out, inputs, groups).items():
            if kind in found:
                _fits(place, f"{matrix}.{kind}", found[kind], shape, dtypes)
            elif needed:
                raise ModelError(f"{place}: tensor {matrix}.{kind} is missing")

    def _wanted(
        self, out: int, inputs: int, groups: int
    ) -> Mapping[str, tuple[tuple[int, ...], frozenset[str], bool]]:
        """Shapes, dtypes, and whether it must be there, by what stands behind a 4-bit matrix's name."""
        words, across = out // _CODES, inputs // _CODES
        if self._what.packing == "packed":
            return {
                "weight_packed": ((out, across), _WORDS, True),
                "weight_scale": ((out, groups), _FLOATS, True),
                "weight_zero_point": ((words, groups), _WORDS, not self._what.symmetric),
                "weight_g_idx": ((inputs,), _WORDS, False),
                "weight_shape": ((2,), frozenset({"I32", "I64"}), False),
            }
        beside = {
            "qzeros": ((groups, words), _WORDS, True),
            "scales": ((groups, out), _FLOATS, True),
        }
        if self._what.packing == "awq":
            return {"qweight": ((inputs, words), _WORDS, True), **beside}
        order = {"g_idx": ((inputs,), _WORDS, self._what.ordered)}
        return {"qweight": ((across, out), _WORDS, True), **beside, **order}

    def _check_fp8(self, place: str, matrix: str) -> None:
        found = self._found[matrix]
        out, inputs = self._shapes[matrix]
        _fits(place, f"{matrix}.weight", found["weight"], (out, inputs), frozenset({"F8_E4M3"}))
        scales = sorted(kind for kind in found if kind != "weight")
        if not scales:
            wanted = "weight_scale_inv" if self._what.block else "weight_scale"
            raise ModelError(f"{place}: tensor {matrix}.{wanted} is missing")
        if len(scales) > 1:
            raise ModelError(f"{place}: tensors {matrix}.{scales[0]} and {scales[1]} are both there")
        entry = found[scales[0]]
        if self._whole(matrix, entry.shape):
            shape = entry.shape
        elif self._what.block is not None:
            rows, columns = self._what.block
            shape = (-(-out // rows), -(-inputs // columns))
        else:
            shape = (out, 1)
        _fits(place, f"{matrix}.{scales[0]}", entry, shape, _SCALES)

    def _check_numbers(self, place: str, matrix: str, found: Mapping[str, Entry], read: Read) -> None:
        groups = -(-self._shapes[matrix][1] // (self._what.group or self._shapes[matrix][1]))
        for kind in ("g_idx", "weight_g_idx"):
            if kind in found:
                index = read(f"{matrix}.{kind}")
                least, most = int(index.min()), int(index.max())
                if least < 0 or most >= groups:
                    wrong = least if least < 0 else most
                    problem = f"names group {wrong} of {groups}"
                    raise ModelError(f"{place}: tensor {matrix}.{kind} {problem}")
        if "weight_shape" in found:
            shape = [int(size) for size in read(f"{matrix}.weight_shape")]
            if shape != list(self._shapes[matrix]):
                asked = list(self._shapes[matrix])
                raise ModelError(
                    f"{place}: tensor {matrix}.weight_shape says {shape}, the config asks for {asked}"
                )


def _fits(place: str, name: str, entry: Entry, shape: tuple[int, ...], dtypes: frozenset[str]) -> None:
    if entry.shape != shape:
        raise ModelError(
            f"{place}: tensor {name} has shape {list(entry.shape)}, the config asks for {list(shape)}"
        )
    if entry.dtype not in dtypes:
        raise ModelError(f"{place}: tensor {name} has dtype {entry.dtype}, not {' or '.join(sorted(dtypes))}")
