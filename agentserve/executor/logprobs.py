"""Log-probabilities of the raw model distribution, before temperature, penalties and masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class RawLogprobs:
    """One row's log-probabilities, remembered before the row is changed.

    `row` is copied (fp32, length = vocabulary). `count` is how many of the best are wanted; more
    than the vocabulary gives the whole vocabulary.
    """

    def __init__(self, row: npt.NDArray[np.float32], count: int) -> None:
        self._row = row.astype(np.float64)
        peak = self._row.max()
        self._total = float(peak + np.log(np.exp(self._row - peak).sum()))
        self._count = min(count, len(row))

    def of(self, token: int) -> float:
        return float(self._row[token]) - self._total

    def top(self) -> tuple[tuple[int, float], ...]:
        """The `count` most likely tokens, most likely first, equal ones by ascending id."""
        if self._count <= 0:
            return ()
        cut = len(self._row) - self._count
        threshold = np.partition(self._row, cut)[cut]
        # All that tie with the last place stand for election; the stable sort lets lower ids win.
        ids = np.flatnonzero(self._row >= threshold)
        order = np.argsort(-self._row[ids], kind="stable")[: self._count]
        return tuple((int(ids[i]), self.of(int(ids[i]))) for i in order)
