"""One lock per session, for as long as somebody holds or wants it."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from agentserve.types import SessionId


class Exclusive:
    def __init__(self) -> None:
        self._locks: WeakValueDictionary[SessionId, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: SessionId) -> asyncio.Lock:
        """The session's lock; it is forgotten when nobody has it."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
