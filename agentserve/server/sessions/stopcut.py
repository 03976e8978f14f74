"""Cuts text at the first stop string, and never lets out a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """A fold over text pieces. What may be the beginning of a stop string is held back.

    Joined output = the text up to the first stop string that was completed while `active`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tail = max((len(stop) for stop in stops), default=1) - 1
        self._seen = ""  # the end of the text already judged, at most one stop string long
        self._held = ""  # judged, not let out: always the end of `_seen`
        self.hit: str | None = None

    def push(self, piece: str, *, active: bool = True) -> str:
        """Take the next piece, give what is safe to show. After a hit nothing comes any more.

        `active` False lets a stop string that ends in this piece pass: the turn's minimum length
        is not reached.
        """
        if self.hit is not None or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._seen + piece
        judged = len(self._seen)
        if active and (found := self._first(text, judged)) is not None:
            start, self.hit = found
            shown = judged - len(self._held)
            return text[shown : max(start, shown)]
        keep = self._beginning(text)
        out = text[judged - len(self._held) : len(text) - keep]
        self._held = text[len(text) - keep :]
        self._seen = text[-self._tail :] if self._tail else ""
        if len(self._held) > len(self._seen):  # cannot be: a held beginning is shorter than its stop
            raise AssertionError("held text is longer than the kept tail")
        return out

    def flush(self) -> str:
        """The text ends here: what was held back turned out to be no stop string."""
        held, self._held = self._held, ""
        return "" if self.hit is not None else held

    def _first(self, text: str, judged: int) -> tuple[int, str] | None:
        """The stop string that is complete first, of several the one that starts first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(judged - len(stop) + 1, 0))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return (best[1], best[2]) if best else None

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
