"""Remembers the ids of runs of text: a conversation is encoded again at every turn.

Each owner's runs are found by that owner alone: how long an encoding takes would tell others what was said.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict

Key = tuple[str, int, str]  # owner, encoder, text
_OVERHEAD = 250  # bytes of Python objects per entry, roughly


class RunCache:
    """Least recently used first out, bounded by bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[Key, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def get(self, key: Key) -> array[int] | None:
        """The ids of a run, not to be changed; None when it is not remembered."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: Key, ids: array[int]) -> None:
        cost = self._cost(key, ids)
        if cost > self._limit:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.size_bytes += cost
            while self.size_bytes > self._limit:
                self.size_bytes -= self._cost(*self._entries.popitem(last=False))

    @staticmethod
    def _cost(key: Key, ids: array[int]) -> int:
        text = key[2]
        width = 1 if text.isascii() else 4  # an upper bound of Python's own width
        return _OVERHEAD + width * len(text) + ids.itemsize * len(ids)
