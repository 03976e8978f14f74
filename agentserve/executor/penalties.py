"""Repetition, presence and frequency penalties, as a fold over the token ids seen so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentserve.types import Sampling

Row = npt.NDArray[np.float32]


def has_penalties(sampling: Sampling) -> bool:
    """Whether any penalty of `sampling` changes logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class TokenCounts:
    """Which tokens occurred, and how often each was generated.

    Prompt tokens are members with count 0: only the repetition penalty looks at them.
    """

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        self._ids = np.unique(prompt).astype(np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._slots = {int(token): slot for slot, token in enumerate(self._ids)}

    def push(self, token: int) -> None:
        """Count one generated token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = len(self._slots)
            if slot == len(self._ids):
                room = max(16, slot)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
            self._slots[token] = slot
            self._ids[slot] = token
        self._counts[slot] += 1

    def apply(self, row: Row, sampling: Sampling) -> None:
        """Penalise `row` (fp32 logits of the vocabulary) in place.

        Repetition scales towards less likely (Keskar et al. 2019), then frequency and presence
        subtract, as OpenAI documents them. Ids beyond the row are ignored.
        """
        used = len(self._slots)
        ids, counts = self._ids[:used], self._counts[:used]
        if used and int(ids.max()) >= len(row):
            inside = ids < len(row)
            ids, counts = ids[inside], counts[inside]
        values = row[ids]
        if sampling.repetition_penalty != 1.0:
            scale = np.float32(sampling.repetition_penalty)
            values = np.where(values > 0, values / scale, values * scale)
        if sampling.frequency_penalty != 0.0:
            values = values - np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        if sampling.presence_penalty != 0.0:
            values = values - np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
        row[ids] = values
