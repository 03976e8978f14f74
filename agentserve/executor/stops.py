"""Stop strings, searched in the bytes that the generated tokens spell.

Bytes, not characters: a token may end inside a character, and UTF-8 synchronises itself, so a
match of a whole stop string can begin and end only on character borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """A completed stop string, as byte offsets in the generated text."""

    start: int
    end: int


class StopFold:
    """Finds the first stop string to complete, fed one token's bytes at a time.

    Of several that complete within one token the one that ends first counts, and of those that end
    together the longest; so the hit does not depend on how the text was cut into tokens. Only the
    last `longest - 1` bytes are kept and scanned again.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop.encode("utf-8") for stop in stops if stop)
        self._keep = max((len(stop) for stop in self._stops), default=1) - 1
        self._tail = b""
        self._seen = 0  # bytes pushed so far

    def push(self, data: bytes) -> StopHit | None:
        """Append one token's bytes; the hit that these bytes completed, if any.

        A hit is reported by the push that completes it and never again.
        """
        window = self._tail + data
        origin = self._seen - len(self._tail)
        best: StopHit | None = None
        for stop in self._stops:
            # A match must reach into the new bytes: what ended before them was reported then.
            at = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if at < 0:
                continue
            hit = StopHit(origin + at, origin + at + len(stop))
            if best is None or (hit.end, hit.start) < (best.end, best.start):
                best = hit
        self._seen += len(data)
        self._tail = window[len(window) - self._keep :] if self._keep < len(window) else window
        return best
