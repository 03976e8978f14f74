"""Reads a GGUF file's key-value section, and nothing after it.

`gguf.GGUFReader` makes numpy views of every string and every tensor, which costs seconds for a
large vocabulary; tokenizers and templates need the metadata alone.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from agentserve.text.errors import TextError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]
Metadata = dict[str, Value]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


class _Cursor:
    """A bounds-checked reader over the mapped file; every read past the end is a TextError."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._name = name
        self._at = 0

    def fail(self, what: str) -> TextError:
        return TextError(f"{self._name}: {what} at byte {self._at}")

    def numbers(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        size = struct.calcsize(f"<{code}") * count
        if size > len(self._data) - self._at:
            raise self.fail("the file ends inside its metadata")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size
        return values

    def integer(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def string(self) -> str:
        length = self.integer("Q")
        if length > len(self._data) - self._at:
            raise self.fail("the file ends inside its metadata")
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            # Vocabularies of old converters hold pieces of characters; one lossy piece is no
            # reason to refuse the model, and it can never be matched by valid text.
            return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._numbers_of(kind, 1)[0]
        item, count = self.integer("I"), self.integer("Q")
        if item == _STRING:
            if count * 8 > len(self._data) - self._at:  # each string has at least its length
                raise self.fail("the file ends inside its metadata")
            return [self.string() for _ in range(count)]
        return list(self._numbers_of(item, count))

    def _numbers_of(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"unknown metadata type {kind}")
        return self.numbers(code, count)


def read_metadata(path: Path) -> Metadata:
    """All metadata of the GGUF file at `path` (versions 2 and 3, little-endian).

    Raises TextError when the file is no GGUF file, ends early, or uses an unknown type; OSError
    when it cannot be opened.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise TextError(f"{path.name}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path.name)
            cursor.integer("I")  # the magic
            version = cursor.integer("I")
            if version not in (2, 3):
                raise TextError(f"{path.name}: GGUF version {version} is not supported (2 and 3 are)")
            cursor.integer("Q")  # tensor count
            count = cursor.integer("Q")
            return {cursor.string(): cursor.value(cursor.integer("I")) for _ in range(count)}
