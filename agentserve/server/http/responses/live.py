"""A response that is made in the background: its events, for readers who come, go and come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from agentserve.server.http.responses.events import Fold, event_frame
from agentserve.server.http.sse import DONE
from agentserve.server.text_port import JsonObject


class Live:
    """Event n is frame n: all are kept until the response is over, and some time longer."""

    def __init__(self, fold: Fold) -> None:
        self.fold = fold
        self.size_bytes = 0
        self.over = False
        self.cancelled = False
        self.task: asyncio.Task[object] | None = None
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        name: str = self.fold.response["id"]
        return name

    def add(self, events: Sequence[JsonObject]) -> None:
        for event in events:
            self._frames.append(event_frame(event))
            self.size_bytes += len(self._frames[-1])
        self._wake()

    def tick(self) -> None:
        self.add(self.fold.tick())

    def end(self) -> None:
        """Nothing more will come."""
        self.over = True
        self._wake()

    async def follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        """The frames after event `after`, to the end."""
        place = 0 if after is None else after + 1
        while True:
            changed = self._changed
            if place < len(self._frames):
                fresh = self._frames[place:]
                place += len(fresh)
                yield b"".join(fresh)
            elif self.over:
                yield DONE
                return
            else:
                await changed.wait()

    async def cancel(self) -> None:
        """Stop it, unless it is over, or made and only to be kept. Returns when it is over."""
        made = self.fold.response["status"] not in ("queued", "in_progress")  # its session has the turn
        if self.task is not None and not (self.over or made or self.cancelled):  # twice would cut its end off
            self.cancelled = True
            self.task.cancel("cancelled by its client")
        while not self.over:
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
