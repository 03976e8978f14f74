"""Stop strings, searched in the bytes that the generated tokens spell.

Bytes, not characters: a token may end inside a character, and UTF-8 synchronises itself, so a
match of a whole stop string can begin and end only on character borders.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFold:
    """Finds stop strings, fed one token's bytes at a time. Only the last `longest - 1` bytes are kept and
    scanned again, so what is found does not depend on how the text was cut into tokens."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop.encode("utf-8") for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""

    def push(self, data: bytes) -> bool:
        """Append one token's bytes; whether they completed a stop string."""
        window = self._tail + data
        # A match must reach into the new bytes: what ended before them was reported then.
        hit = any(window.find(stop, max(0, len(self._tail) - len(stop) + 1)) >= 0 for stop in self._stops)
        self._tail = window[len(window) - self._keep :] if self._keep < len(window) else window
        return hit
