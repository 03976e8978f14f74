"""Weights out of a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentserve.models.assemble import Assembler, Sliced
from agentserve.models.config import DecoderConfig
from agentserve.models.errors import ModelError
from agentserve.models.quantization import Quantization
from agentserve.models.quantized_tensors import Entry, QuantizedTensors
from agentserve.models.shard import WHOLE, Shard
from agentserve.models.weights import DecoderWeights
from kernels.blocks import expand

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64", "F32", "F16", "BF16"}
_LARGEST_HEADER = 100 << 20  # the format's own limit


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, in name order; a shard that is not there is a `ModelError`."""
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ModelError(f"{folder}: neither {_SINGLE} nor {_INDEX} is there")
        return (single,)
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if Path(shard).name != shard:  # an index must not lead out of its folder
            raise ModelError(f"{index}: shard name {shard!r} is a path")
        if not (folder / shard).is_file():
            raise ModelError(f"{folder / shard}: no such file, though {_INDEX} names it")
    return tuple(folder / shard for shard in shards)


def load_safetensors_weights(
    folder: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantization: Quantization | None = None,
    stored: bool = False,
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Read every tensor, or what `shard` has of it; a missing, foreign, misshapen or truncated one is a
    `ModelError`.

    Quantised matrices are read as `quantization` says; `stored` keeps their codes and scales
    (`kernels.narrow`), else they are expanded to `dtype`.
    """
    assembler, place = Assembler(config, dtype, device, shard=shard), str(folder)
    quantized = None if quantization is None else QuantizedTensors(config, quantization)
    plain: list[str] = []
    with _Files() as files:
        for path in weight_files(folder):
            for name, entry in _header(path).items():
                files.holds(name, path)
                if quantized is not None and quantized.takes(name, entry, str(path)):
                    continue
                if not assembler.wants(name, entry.shape, str(path)):
                    continue
                if entry.dtype not in _DTYPES:
                    raise ModelError(f"{path}: tensor {name} has dtype {entry.dtype}, which is not supported")
                plain.append(name)
        formats: Mapping[str, str] = {}
        matrices = [] if quantized is None else list(quantized.matrices())
        if quantized is not None:
            formats = quantized.check(place, files.read)
            matrices = [
                (matrix, shape)
                for matrix, shape in matrices
                if assembler.wants(f"{matrix}.weight", shape, place)
            ]
        assembler.allocate(place, formats if stored else {})
        for name in plain:
            assembler.put(name, files.part(name))
        for matrix, _ in matrices:
            assert quantized is not None
            name, values = f"{matrix}.weight", quantized.matrix(matrix, files.read, device, place)
            if assembler.keeps_blocks(name):
                assembler.put_narrow(name, values)
            else:
                assembler.put(name, expand(values, dtype))
    return assembler.finish()


class _Files(ExitStack):
    """Tensors by name out of files that are opened once; a `ModelError` names the file."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}

    def holds(self, name: str, path: Path) -> None:
        self._paths[name] = path

    def read(self, name: str) -> Tensor:
        with self._file(name) as file:
            found: Tensor = file.get_tensor(name)
            return found

    def part(self, name: str) -> Sliced:
        """A tensor of which parts are read when they are asked for."""
        with self._file(name) as file:
            found: Sliced = file.get_slice(name)
            return found

    @contextmanager
    def _file(self, name: str) -> Iterator[Any]:
        path = self._paths[name]
        try:
            if path not in self._open:
                self._open[path] = self.enter_context(safe_open(path, framework="pt"))
            yield self._open[path]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from None


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{index}: not a readable shard index ({error!r})") from None
    if (
        not isinstance(found, dict)
        or not all(isinstance(shard, str) for shard in found.values())
        or not found
    ):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    return found


def _header(path: Path) -> Mapping[str, Entry]:
    """Names, dtypes and shapes. Names a tensor that lies beyond the file's end, as the library does not."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LARGEST_HEADER, size):
                raise ModelError(f"{path}: header of {length} bytes in a file of {size}: truncated?")
            values = json.loads(file.read(length))
            values.pop("__metadata__", None)
            entries = {name: _entry(item) for name, item in values.items()}
    except ModelError:
        raise
    except (
        OSError, ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ModelError(f"{path}: not a readable safetensors file ({reason})") from None
    for name, (_, end) in entries.items():
        if 8 + length + end > size:
            raise ModelError(
                f"{path}: tensor {name} ends at byte {8 + length + end}, the file at {size}: truncated?"
            )
    return {name: entry for name, (entry, _) in entries.items()}


def _entry(item: Mapping[str, object]) -> tuple[Entry, int]:
    """A tensor's header and where its data ends. ValueError, LookupError or TypeError if it has none."""
    shape, offsets = item["shape"], item["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("shape and data_offsets must be lists")
    if any(type(number) is not int or number < 0 for number in [*shape, *offsets]):
        raise ValueError("shape and data_offsets must hold whole numbers")
    return Entry(str(item["dtype"]), tuple(shape)), offsets[1]
