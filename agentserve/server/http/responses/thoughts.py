"""Reasoning for clients that keep no state here: a text that they send back as they got it. Pure.

`encrypted_content` is what OpenAI calls it. Ours hides nothing (the same client may read the reasoning in
the open beside it); it is packed, so that nobody takes it for something to be edited.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from agentserve.server.errors import ApiError

_MARK = "as1."
_MOST_BYTES = 8 << 20  # of one item's reasoning, unpacked


class Room:
    """What a request may still come to, in bytes, beyond those that were sent."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.left = most

    def take(self, size: int) -> None:
        """ApiError where there is not so much."""
        if size > self.left:
            raise ApiError(
                f"input: the items that it refers to and the reasoning packed in it have more than "
                f"{self._most} bytes",
                param="input",
                code="input_too_large",
            )
        self.left -= size


def packed(text: str) -> str:
    data = zlib.compress(text.encode("utf-8", "surrogatepass"))
    return _MARK + base64.b64encode(data).decode("ascii")


def unpacked(content: str, room: Room | None = None) -> str | None:
    """None: it is not ours, or not as it was. ApiError where it is more than there is `room` for."""
    if not content.startswith(_MARK):
        return None
    try:
        data = base64.b64decode(content[len(_MARK) :], validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, _MOST_BYTES if room is None else min(_MOST_BYTES, room.left + 1))
        if room is not None:
            room.take(len(text))
        return text.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
