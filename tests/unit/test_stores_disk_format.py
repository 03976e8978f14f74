"""A value on disk: what is written is believed, and nothing else."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import xxhash
import zstandard

from tests.kv_blocks import BLOCK_BYTES, chain, content
from tiering.stores.buffers import Bytes
from tiering.stores.disk_format import PLAIN, ZSTD, Distrust, Reader, Writer, payload_offset, value_bytes
from tiering.types import Block

FIRST, SECOND = chain(2)


def reason(value: Bytes, block: Block = FIRST) -> str:
    verdict = Reader(BLOCK_BYTES).payload(block, value)
    return verdict.reason if isinstance(verdict, Distrust) else ""


def resealed(value: Bytes) -> Bytes:
    """With a checksum that holds."""
    value[:16] = np.frombuffer(xxhash.xxh3_128_digest(value[16:].tobytes()), dtype=np.uint8)
    return value


def test_the_layout_is_as_documented() -> None:
    value = Writer().value(FIRST, content(FIRST)).tobytes()
    assert value[:16] == xxhash.xxh3_128_digest(value[16:])
    assert value[16:36] == struct.pack("<4sBBHIII", b"ASKV", 1, 0, 0, 16, BLOCK_BYTES, BLOCK_BYTES)
    assert value[36:68] == FIRST.parent
    assert value[68:84] == FIRST.tokens
    offset = payload_offset(16)
    assert (16 + offset) % 64 == 0
    assert not any(value[84:offset])
    assert value[offset:] == content(FIRST).tobytes()
    assert len(value) == value_bytes(16, BLOCK_BYTES)


@pytest.mark.parametrize("codec", [PLAIN, ZSTD])
@pytest.mark.parametrize("kind", ["random", "even"])
def test_what_was_written_is_read(codec: int, kind: str) -> None:
    raw = content(FIRST) if kind == "random" else np.full(BLOCK_BYTES, 7, dtype=np.uint8)
    value = Writer(codec).value(FIRST, raw).copy()
    got = Reader(BLOCK_BYTES).payload(FIRST, value)
    assert not isinstance(got, Distrust)
    assert got.tobytes() == raw.tobytes()
    assert (value.nbytes < BLOCK_BYTES) == (codec == ZSTD and kind == "even")  # never longer than plain


def test_a_writer_makes_one_value_after_another() -> None:
    writer = Writer()
    first = writer.value(FIRST, content(FIRST)).copy()
    second = writer.value(SECOND, content(SECOND))
    assert (reason(first), reason(second, SECOND)) == ("", "")


@pytest.mark.parametrize("codec", [PLAIN, ZSTD])
def test_no_flipped_bit_is_believed(codec: int) -> None:
    raw = np.arange(BLOCK_BYTES, dtype=np.uint32).astype(np.uint8)
    value = Writer(codec).value(FIRST, raw)
    places = [*range(min(200, value.nbytes)), *range(200, value.nbytes, 331), value.nbytes - 1]
    for place in places:
        value[place] ^= 1 << (place % 8)
        assert reason(value) == "its checksum is wrong", place
        value[place] ^= 1 << (place % 8)
    assert reason(value) == ""


@pytest.mark.parametrize("length", [0, 1, 15, 16, 67, 68, 200, BLOCK_BYTES])
def test_no_truncated_value_is_believed(length: int) -> None:
    value = Writer().value(FIRST, content(FIRST))
    assert reason(value[:length]) != ""
    assert length < 16 or reason(resealed(value[:length].copy())) != ""


def test_another_block_under_the_key_is_not_believed() -> None:
    value = Writer().value(SECOND, content(SECOND))
    assert reason(value, FIRST) == "another block's bytes lie under its key"
    stranger = chain(1, parent=hashlib.sha256(b"another model").digest())[0]  # equal tokens
    assert stranger.tokens == FIRST.tokens
    assert reason(Writer().value(stranger, content(stranger)), FIRST) != ""


@pytest.mark.parametrize(("at", "byte"), [(16, 0), (20, 2), (21, 1), (21, 9)])
def test_another_magic_version_or_codec_is_not_believed(at: int, byte: int) -> None:
    value = Writer().value(FIRST, content(FIRST))
    value[at] = byte
    assert reason(resealed(value)) in ("of another format", "it does not decompress")


@pytest.mark.parametrize(("at", "number"), [(24, 8), (24, 2**32 - 1), (28, 100), (32, 100)])
def test_lengths_that_disagree_are_not_believed(at: int, number: int) -> None:
    value = Writer().value(FIRST, content(FIRST))
    value[at : at + 4] = np.frombuffer(struct.pack("<I", number), dtype=np.uint8)
    assert reason(resealed(value)) != ""


def test_blocks_of_another_size_are_not_believed() -> None:
    value = Writer().value(FIRST, content(FIRST, BLOCK_BYTES - 1))
    assert reason(value) == "its length is wrong"


def test_what_unpacks_to_another_length_is_not_unpacked() -> None:
    """A bomb, and a frame that does not say."""
    head = Writer().value(FIRST, np.zeros(BLOCK_BYTES, dtype=np.uint8))[: payload_offset(16)].copy()
    head[21] = ZSTD
    silent = zstandard.ZstdCompressor(write_content_size=False)
    for frame in (zstandard.compress(bytes(50 << 20)), silent.compress(bytes(BLOCK_BYTES))):
        head[32:36] = np.frombuffer(struct.pack("<I", len(frame)), dtype=np.uint8)
        value = np.concatenate([head, np.frombuffer(frame, dtype=np.uint8)])
        assert reason(resealed(value)) == "its length is wrong"


def test_a_parent_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Writer().value(Block(FIRST.key, b"short", FIRST.tokens), content(FIRST))
