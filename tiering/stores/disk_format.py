"""How a block lies in a value on disk, and how it is believed.

    checksum   16  xxh3_128 of everything behind it
    magic       4  "ASKV"
    version     1
    codec       1  0: stored as it is; 1: zstd
    zero        2
    tokens      4  length of the token run in bytes
    raw         4  length of the block's bytes
    stored      4  length of the payload as it lies here
    parent     32  key of the block before it, or the namespace digest
    tokens     as long as said above
    zeros      up to a cache line (LMDB starts a large value 16 bytes into a page)
    payload

Integers are little-endian. Parent and tokens are the whole of what a block key is made of, so a value
under another block's key is found out even where its checksum holds. xxh3 guards against accidents,
not against people who can write the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard

from tiering.stores.buffers import Bytes
from tiering.types import Block, TierFault

VERSION = 1
MAGIC = b"ASKV"
PLAIN, ZSTD = 0, 1
ZSTD_LEVEL = 1

_CHECKSUM = 16
_FIXED = struct.Struct("<4sBBHIII32s")
_LINE = 64
_LMDB_OFFSET = 16  # bytes of LMDB's own header before a value that has pages of its own


def payload_offset(tokens: int) -> int:
    """Where the payload starts in a value whose token run has `tokens` bytes."""
    end = _LMDB_OFFSET + _CHECKSUM + _FIXED.size + tokens
    return -(-end // _LINE) * _LINE - _LMDB_OFFSET


def value_bytes(tokens: int, payload: int) -> int:
    return payload_offset(tokens) + payload


class Writer:
    """Makes values in memory of its own: one at a time, each valid until the next is made."""

    def __init__(self, codec: int = PLAIN) -> None:
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL) if codec == ZSTD else None
        self._room: Bytes = np.empty(0, dtype=np.uint8)

    def value(self, block: Block, raw: Bytes) -> Bytes:
        """The value of `block` whose bytes are `raw`. What compression makes longer is stored as it is."""
        if len(block.parent) != 32:
            raise ValueError(f"a parent key has 32 bytes, not {len(block.parent)}")
        payload, codec = raw, PLAIN
        if self._compressor is not None:
            small = np.frombuffer(self._compressor.compress(raw.data), dtype=np.uint8)
            if small.nbytes < raw.nbytes:
                payload, codec = small, ZSTD
        offset = payload_offset(len(block.tokens))
        total = offset + payload.nbytes
        if self._room.nbytes < total:
            self._room = np.empty(total, dtype=np.uint8)
        value = self._room[:total]
        head = _FIXED.pack(
            MAGIC, VERSION, codec, 0, len(block.tokens), raw.nbytes, payload.nbytes, block.parent
        )
        head = (head + block.tokens).ljust(offset - _CHECKSUM, b"\0")
        value[_CHECKSUM:offset] = np.frombuffer(head, dtype=np.uint8)
        np.copyto(value[offset:], payload)
        value[:_CHECKSUM] = np.frombuffer(_checksum(value), dtype=np.uint8)
        return value


@dataclass(frozen=True)
class Distrust:
    """Why a value is not believed."""

    reason: str
    fault: TierFault = TierFault.CORRUPT


class Reader:
    """Believes values or not. For one thread at a time."""

    def __init__(self, raw_bytes: int) -> None:
        self._raw_bytes = raw_bytes
        self._decompressor = zstandard.ZstdDecompressor()

    def payload(self, block: Block, value: Bytes) -> Bytes | Distrust:
        """The bytes of `block` in `value`: a view of it where it was not compressed.

        value: a whole value, checked from end to end before any of it is used.
        """
        if value.nbytes < _CHECKSUM + _FIXED.size:
            return Distrust("shorter than a header")
        if _checksum(value) != value[:_CHECKSUM].tobytes():
            return Distrust("its checksum is wrong")
        magic, version, codec, _, tokens, raw, stored, parent = _FIXED.unpack_from(value.data, _CHECKSUM)
        if magic != MAGIC or version != VERSION:
            return Distrust("of another format")
        at = _CHECKSUM + _FIXED.size
        if parent != block.parent or value[at : at + tokens].tobytes() != block.tokens:
            return Distrust("another block's bytes lie under its key", TierFault.MISPLACED)
        offset = payload_offset(tokens)
        if raw != self._raw_bytes or value.nbytes != offset + stored:
            return Distrust("its length is wrong")
        return self._expand(codec, value[offset:])

    def _expand(self, codec: int, payload: Bytes) -> Bytes | Distrust:
        if codec == PLAIN:
            return payload if payload.nbytes == self._raw_bytes else Distrust("its length is wrong")
        if codec != ZSTD:
            return Distrust("of another format")
        try:
            if zstandard.frame_content_size(payload.data) != self._raw_bytes:
                return Distrust("its length is wrong")  # also of a bomb: nothing is unpacked for it
            return np.frombuffer(self._decompressor.decompress(payload.data), dtype=np.uint8)
        except zstandard.ZstdError:
            return Distrust("it does not decompress")


def _checksum(value: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(value[_CHECKSUM:].data)
