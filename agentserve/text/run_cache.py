"""Remembers the ids of runs of text: a conversation is encoded again at every turn."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict

_OVERHEAD = 250  # bytes of Python objects per entry, roughly


class RunCache:
    """Least recently used first out, bounded by bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[tuple[int, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def get(self, key: tuple[int, str]) -> array[int] | None:
        """The ids of a run, not to be changed; None when it is not remembered."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: tuple[int, str], ids: array[int]) -> None:
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
    def _cost(key: tuple[int, str], ids: array[int]) -> int:
        text = key[1]
        width = 1 if text.isascii() else 4  # an upper bound of Python's own width
        return _OVERHEAD + width * len(text) + ids.itemsize * len(ids)
