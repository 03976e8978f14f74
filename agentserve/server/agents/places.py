"""How many things run at once, of one owner and of all: the others stand in line."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """`each`: of one owner; `most`: of all.

    Nobody has more than are left free: so some are, whoever takes all he can get, and who has none is not
    kept waiting until others are done. Who has fewest is next.
    """

    def __init__(self, each: int, most: int) -> None:
        self._each = each
        self._most = most
        self._held: Counter[str] = Counter()
        self._all = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def one(self, owner: str) -> AsyncIterator[None]:
        await self._take(owner)
        try:
            yield
        finally:
            self._give(owner)

    async def _take(self, owner: str) -> None:
        if owner not in self._waiting and self._may(owner):
            self._grant(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave_line(owner, turn)
            else:  # it was this one's turn
                self._give(owner)
            raise

    def _may(self, owner: str) -> bool:
        return self._held[owner] < min(self._each, self._most - self._all)

    def _grant(self, owner: str) -> None:
        self._held[owner] += 1
        self._all += 1

    def _give(self, owner: str) -> None:
        self._held[owner] -= 1
        self._all -= 1
        if not self._held[owner]:
            del self._held[owner]
        while able := [name for name in self._waiting if self._may(name)]:
            name = min(able, key=lambda name: self._held[name])
            turn = self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not turn.done():
                self._grant(name)
                turn.set_result(None)

    def _leave_line(self, owner: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(owner, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[owner]
