"""Token ids to text, one id at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence


class Detokenizer:
    """A fold over ids: `push(id)` gives the text that became certain; O(1) per token.

    Never gives half a character: bytes that may still become one are held back, and bytes that
    cannot are U+FFFD. A fresh one that is fed the same ids gives the same text.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], hidden: Collection[int], *, strip_leading_space: bool = False
    ) -> None:
        """`hidden` ids give no text; `strip_leading_space`: the first text loses one space."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._strip = strip_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; an id outside the vocabulary has none."""
        if token in self._hidden or not 0 <= token < len(self._token_bytes):
            return ""
        data = self._token_bytes[token]
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end: bytes still held back are broken, and become U+FFFD."""
        return self._decoder.decode(b"", final=True)
