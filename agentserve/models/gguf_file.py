"""Reads one GGUF file through the `gguf` package: metadata, tensor shapes, blocks, de-quantised values.

The tensor data stays memory-mapped until it is asked for. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from agentserve.models.errors import ModelError

_LISTS_TOO_LONG = ("tokenizer.ggml.",)  # vocabularies: slow to unpack, and not this reader's business


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in row-major order (rows first), as PyTorch has it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # the GGML type's name
    place: str

    _raw: npt.NDArray[np.generic]
    _type: int

    def values(self) -> npt.NDArray[np.float32]:
        """De-quantised float32 values of `shape`; a new array unless the file holds float32."""
        try:
            flat = gguf.quants.dequantize(self._raw, gguf.GGMLQuantizationType(self._type))
        except NotImplementedError:
            raise ModelError(
                f"{self.place}: tensor {self.name}: type {self.kind} cannot be de-quantised"
            ) from None
        return np.asarray(flat, dtype=np.float32).reshape(self.shape)

    def raw_rows(self) -> npt.NDArray[np.uint8]:
        """`[rows, bytes per row]` of a matrix in a quantised type, as the file has them.

        Lies in the file's mapping, and keeps that alive. To be read only: it is a private mapping,
        which could be written, but would then become memory of its own.
        """
        return self._raw.view(np.uint8).reshape(self.shape[0], -1)


class _Reader(gguf.GGUFReader):
    """Checks that each tensor lies inside the file before the package maps it."""

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, raw_type, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(raw_type[0])]
            elements = int(np.prod([int(dim) for dim in dims], dtype=object))
            if elements and int(dims[0]) % block:
                label = str(bytes(name), encoding="utf-8", errors="replace")
                raise ModelError(
                    f"tensor {label} has rows of {int(dims[0])} weights, no whole number of blocks of {block}"
                )
            end = int(start_offs) + int(offset[0]) + elements * size // block
            if end > len(self.data):
                label = str(bytes(name), encoding="utf-8", errors="replace")
                raise ModelError(
                    f"tensor {label} ends at byte {end}, the file at {len(self.data)}: truncated?"
                )
        super()._build_tensors(start_offs, fields)


class GgufFile:
    """An open GGUF file. A file that cannot be read is a `ModelError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path, "c")  # torch takes no memory that cannot be written, and says so
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file") from None
        except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError) as error:
            # What the package raises on damage depends on which byte is damaged.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{path}: not a readable GGUF file ({reason})") from None
        if self._reader.byte_order == "S":  # the package would de-quantise it without swapping
            raise ModelError(f"{path}: GGUF in another byte order than this machine's is not supported")
        if self._number("split.count") > 1:
            raise ModelError(f"{path}: GGUF files in several parts are not supported; merge them first")

    def metadata(self) -> Mapping[str, object]:
        """Every key but the vocabulary's long lists, as Python values."""
        found: dict[str, object] = {}
        for key, field in self._reader.fields.items():
            long = field.types[:1] == [gguf.GGUFValueType.ARRAY] and key.startswith(_LISTS_TOO_LONG)
            if not long:
                found[key] = field.contents()
        return found

    def tensors(self) -> Mapping[str, GgufTensor]:
        """Every tensor by its GGUF name."""
        return {
            tensor.name: GgufTensor(
                name=tensor.name,
                shape=tuple(int(dim) for dim in reversed(tensor.shape)),
                kind=tensor.tensor_type.name,
                place=str(self.path),
                _raw=tensor.data,
                _type=int(tensor.tensor_type),
            )
            for tensor in self._reader.tensors
        }

    def _number(self, key: str) -> int:
        field = self._reader.fields.get(key)
        value = field.contents() if field else 0
        return value if isinstance(value, int) else 0
