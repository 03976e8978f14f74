"""Reasoning for clients that keep no state here: a text that they send back as they got it. Pure.

`encrypted_content` is what OpenAI calls it. Ours hides nothing (the same client may read the reasoning in
the open beside it); it is packed, so that nobody takes it for something to be edited.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "as1."
_MOST_BYTES = 8 << 20  # of one item's reasoning, unpacked


def packed(text: str) -> str:
    data = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return _MARK + base64.b64encode(data).decode("ascii")


def unpacked(content: str) -> str | None:
    """None: it is not ours, or not as it was."""
    if not content.startswith(_MARK):
        return None
    try:
        data = base64.b64decode(content[len(_MARK) :], validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, _MOST_BYTES)
        return text.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
