"""Content names of KV: the namespace digest and the chained block key.

A block key names the KV of one full page by everything that determined it: the namespace
(weights, adapter, dtype, RoPE, salt, ...), every token before the page, and the page's own tokens.
Fields are typed and length-framed, so two different inputs never encode to the same bytes, and
nothing depends on a process (Python's `hash`) or a label (an adapter's name). Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

Field = bool | int | float | str | bytes | None


def _frame(value: Field) -> bytes:
    """One tagged, length-framed value."""
    if value is None:
        tag, body = b"N", b""
    elif isinstance(value, bool):  # before int: True is an int
        tag, body = b"B", bytes([value])
    elif isinstance(value, int):
        tag, body = b"I", str(value).encode()
    elif isinstance(value, float):
        tag, body = b"F", struct.pack("<d", value)
    elif isinstance(value, str):
        tag, body = b"S", value.encode("utf-8", "surrogatepass")
    else:
        tag, body = b"Y", value
    return tag + struct.pack("<Q", len(body)) + body


def namespace_digest(fields: Mapping[str, Field]) -> bytes:
    """32-byte digest of named, typed fields; their order does not matter."""
    digest = hashlib.sha256(b"agentserve namespace v1")
    digest.update(struct.pack("<Q", len(fields)))
    for name in sorted(fields):
        digest.update(_frame(name))
        digest.update(_frame(fields[name]))
    return digest.digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a full page: `parent` is the key of the page before it, or the namespace digest.

    tokens: the page's token ids as little-endian int32.
    """
    return hashlib.sha256(parent + tokens).digest()
