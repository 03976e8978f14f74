"""Responses that are made in the background: their events, for readers who come, go and come again.

Events are kept within bounds, the newest ones: of one response, and of all together. A reader whose next
event is no longer here hears no more of them; it waits for the end and gets the last event alone, which
has the whole response. Readers hold no memory but their place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Sequence

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.events import Fold, event_frame
from agentserve.server.http.sse import DONE
from agentserve.server.text_port import JsonObject

SPARE = 8  # one place of so many is for others, and of what is left then one of so many for those after them
FEW = 2  # that a tenant has wherever there are places
EVENT_SECONDS = 45.0  # of silence, after which an event is sent: some clients do not see comments
_BATCH_BYTES = 64 << 10  # that a reader takes at a time


class Live:
    """One of them. Event n is frame n; frames before `first` are gone."""

    def __init__(
        self,
        fold: Fold,
        now: Callable[[], float],
        *,
        most: int,
        grown: Callable[[int], None] = lambda by: None,
    ) -> None:
        """`most`: bytes of events that are kept. `grown` hears by how many bytes `size_bytes` changed."""
        self.fold = fold
        self.first = 0
        self.size_bytes = 0  # of its frames, and of the response itself once it is over
        self.over = False
        self.cancelled = False
        self.task: asyncio.Task[object] | None = None
        self._now = now
        self._most = most
        self._grown = grown
        self._spoke = now()
        self._frames: deque[bytes] = deque()
        self._window = 0  # bytes of them
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        name: str = self.fold.response["id"]
        return name

    @property
    def window_bytes(self) -> int:
        return self._window

    def add(self, events: Sequence[JsonObject]) -> None:
        if not events:
            return
        for event in events:
            self._frames.append(event_frame(event))
            self._weigh(len(self._frames[-1]))
        self._spoke = self._now()
        self.trim(self._most)
        self._wake()

    def tick(self) -> None:
        """Say something, once for all readers, where nothing was said for so long."""
        if not self.over and self._now() - self._spoke >= EVENT_SECONDS:
            self.add(self.fold.tick())

    def trim(self, most: int) -> None:
        """Keep no more than so many bytes of events; the oldest go."""
        while self._frames and self._window > most:
            self.first += 1
            self._weigh(-len(self._frames.popleft()))

    def end(self) -> None:
        """Nothing more will come."""
        if not self.over:
            self.over = True
            self._count(len(self._last()))
        self._wake()

    async def follow(self, after: int | None) -> AsyncGenerator[bytes, None]:
        """The frames after event `after`, to the end."""
        place = 0 if after is None else after + 1
        while True:
            changed = self._changed
            fresh = self._from(place)
            if fresh:
                place += len(fresh)
                yield b"".join(fresh)
            elif self.over:
                yield DONE if place >= self.first else self._last() + DONE
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

    def _from(self, place: int) -> list[bytes]:
        """The next frames; none where they are gone or yet to come."""
        found: list[bytes] = []
        size = 0
        index = place - self.first
        while 0 <= index < len(self._frames) and size < _BATCH_BYTES:
            found.append(self._frames[index])
            size += len(found[-1])
            index += 1
        return found

    def _last(self) -> bytes:
        """The last event; nothing where there was none, for the server left."""
        return b"".join(map(event_frame, self.fold.last()))

    def _weigh(self, by: int) -> None:
        self._window += by
        self._count(by)

    def _count(self, by: int) -> None:
        self.size_bytes += by
        self._grown(by)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Lives:
    """All of them. Those that are over stay as long as there is room for their events."""

    def __init__(self, *, most_running: int, most_bytes: int, one_bytes: int) -> None:
        """`one_bytes`: of events of one response."""
        self.size_bytes = 0
        self._most_running = most_running
        self._most_bytes = most_bytes
        self._one_bytes = one_bytes
        self._reserved: Counter[str] = Counter()  # places, by tenant
        self._running: dict[str, Live] = {}
        self._over: OrderedDict[str, Live] = OrderedDict()  # the first over is the first out

    def __len__(self) -> int:
        return len(self._running) + len(self._over)

    @property
    def running(self) -> int:
        """How many places are taken."""
        return self._reserved.total()

    def get(self, id_: str) -> Live | None:
        """One that is being made, or whose events are still here."""
        return self._running.get(id_) or self._over.get(id_)

    def reserve(self, tenant: str) -> None:
        """Take a place, for as long as one is made: until `free`. ApiError where none is left: nobody's
        connection bounds them. No tenant takes all, and what it is told counts its own alone."""
        own, most = self._reserved[tenant], self._most_running
        again = {"retry-after": "5", "x-should-retry": "true"}
        if own >= most - most // SPARE:
            raise ApiError(
                f"{own} responses are being made in the background, and no more may be. "
                "Please try again in 5s.",
                status=429,
                code="rate_limit_exceeded",
                headers=again,
            )
        left = most - self.running  # the more others have, the fewer one has
        if not left or (own >= FEW and own + 1 > (SPARE - 1) * (left - 1)):
            raise ApiError(
                "The server has no place for another response in the background. Please try again in 5s.",
                status=503,
                code="server_busy",
                headers=again,
            )
        self._reserved[tenant] += 1

    def free(self, tenant: str) -> None:
        self._reserved[tenant] -= 1
        if not self._reserved[tenant]:
            del self._reserved[tenant]

    def begin(self, fold: Fold, now: Callable[[], float]) -> Live:
        def grown(by: int) -> None:
            self.size_bytes += by
            if by > 0:
                self._make_room()

        live = Live(fold, now, most=self._one_bytes, grown=grown)
        self._running[live.id] = live
        return live

    def over(self, live: Live) -> None:
        """Idempotent."""
        if self._running.pop(live.id, None) is not None:
            self._over[live.id] = live
        live.end()

    def forget(self, live: Live) -> None:
        """Of one that is over. Readers who have not read it all get its last event."""
        if self._over.pop(live.id, None) is not None:
            live.trim(0)
            self.size_bytes -= live.size_bytes

    def _make_room(self) -> None:
        while self.size_bytes > self._most_bytes and self._over:
            self.forget(next(iter(self._over.values())))
        while self.size_bytes > self._most_bytes:
            largest = max(self._running.values(), key=lambda live: live.window_bytes, default=None)
            if largest is None or not largest.window_bytes:
                return
            largest.trim(largest.window_bytes // 2)
