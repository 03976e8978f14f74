"""How many things run at once, of one owner and of all: the others stand in line."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """`each`: of one owner; `most`: of all. Who waits for his own has no place among all."""

    def __init__(self, each: int, most: int) -> None:
        self._each = each
        self._all = asyncio.Semaphore(most)
        self._own: dict[str, asyncio.Semaphore] = {}
        self._known: Counter[str] = Counter()  # of each owner, those that have a place or wait for one

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        own = self._own.setdefault(owner, asyncio.Semaphore(self._each))
        self._known[owner] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._known[owner] -= 1
            if not self._known[owner]:
                del self._known[owner], self._own[owner]
