"""Tokens in URLs, each for the result of one tool call.

A token says which call it is for and proves that we said so; nothing is remembered. That a call takes one
result only is for whoever takes results to see to.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import NamedTuple

import msgspec

KEY_BYTES = 32
MOST_TOKEN = 1024  # characters
_PURPOSE = b"agentserve tool callback, 1\0"


class Call(NamedTuple):
    """Of a session, in an epoch: the token of a turn that was taken back is worth nothing."""

    session: str
    call_id: str
    epoch: int


class CallbackTokens:
    """`key`: 32 random bytes that nobody else has, the same after a restart."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a callback key has {KEY_BYTES} bytes")
        self._key = key

    def issue(self, call: Call) -> str:
        """For a path segment: letters, digits, `-`, `_` and one dot. ValueError: names that are too long."""
        said = msgspec.msgpack.encode(call)
        token = f"{_text(said)}.{_text(self._mac(said))}"
        if len(token) > MOST_TOKEN:
            raise ValueError("the names of the session and the call are too long for a callback URL")
        return token

    def read(self, token: str) -> Call | None:
        """None: it is none of ours, or not as we wrote it."""
        if len(token) > MOST_TOKEN or not token.isascii():
            return None
        said, _, mac = token.partition(".")
        try:
            content, given = _bytes(said), _bytes(mac)
        except (binascii.Error, ValueError):
            return None
        if not hmac.compare_digest(self._mac(content), given):
            return None
        if token != f"{said}.{_text(given)}" or said != _text(content):
            return None  # base64 has more than one way to write some bytes; a token has one
        return msgspec.msgpack.decode(content, type=Call)

    def is_for(self, token: str, call: Call) -> bool:
        return self.read(token) == call

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._key, _PURPOSE + said, hashlib.sha256)


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode("ascii").rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
