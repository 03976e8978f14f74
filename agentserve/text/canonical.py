"""Digests by which conversations are recognised: the same history, however it was written down.

A message's digest covers its role, its text, its calls (names and JSON-equal arguments, in order)
and the id of the call a tool result answers. It leaves out what clients rewrite freely: ids of
calls, null against "" content, one text part against a string, white space and key order of
arguments, names and reasoning. Fields are typed and length-framed: two different inputs never
encode to the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from agentserve.text.conversation import RawMessage, parse_message
from tools_bridge.json_value import Json

ROOT = hashlib.sha256(b"agentserve conversation 1").digest()
"""The parent of a first message."""


def message_key(message: RawMessage) -> bytes:
    """SHA-256 of one OpenAI-shaped message (32 bytes); TextError where it is broken."""
    parsed = parse_message(message)
    digest = hashlib.sha256()
    for field in (parsed.role, parsed.text, parsed.call_id):
        digest.update(b"".join(_encode(field)))
    digest.update(_frame(b"C", len(parsed.calls)))
    for call in parsed.calls:
        digest.update(b"".join(_encode(call.name)))
        digest.update(b"".join(_encode(call.arguments)))
    return digest.digest()


def chain(parent: bytes, message: RawMessage) -> bytes:
    """SHA-256 of a conversation: `parent` is the digest of what comes before (ROOT at the start)."""
    if len(parent) != len(ROOT):
        raise ValueError(f"a parent digest has {len(ROOT)} bytes, not {len(parent)}")
    return hashlib.sha256(parent + message_key(message)).digest()


def _frame(kind: bytes, length: int) -> bytes:
    return kind + length.to_bytes(8, "little")


def _encode(value: Json) -> Iterator[bytes]:
    """Type tag, length, content. Numbers are equal when their values are: 1 and 1.0 are."""
    if value is None:
        yield b"N"
    elif isinstance(value, bool):
        yield b"T" if value else b"F"
    elif isinstance(value, str):
        yield from _bytes(b"S", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        yield from _bytes(b"I", hex(int(value)).encode("ascii"))
    elif isinstance(value, float):
        yield from _bytes(b"D", value.hex().encode("ascii"))
    elif isinstance(value, list):
        yield _frame(b"L", len(value))
        for item in value:
            yield from _encode(item)
    else:
        yield _frame(b"O", len(value))
        for key in sorted(value):
            yield from _encode(key)
            yield from _encode(value[key])


def _bytes(kind: bytes, content: bytes) -> Iterator[bytes]:
    yield _frame(kind, len(content))
    yield content
