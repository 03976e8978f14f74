"""The last events of every session, numbered, for readers who come and go.

A reader keeps a place, not a queue: whoever reads slowly finds that events are gone and how many, and
holds nobody's memory. Bounded per session and over all. What clients and policies say of a session as
often as they like has a share of its own, so that it does not push out what its turns brought.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from operator import attrgetter

import msgspec

from agentserve.server.json_line import dump_json
from agentserve.types import SessionId

EVENT_BYTES = 160  # of an event besides its data
ASIDE = frozenset({"hints", "decision", "devalued", "forked"})  # kinds that turns do not bring about
ASIDE_SHARE = 4  # they may fill one part in so many of a log


class Event(msgspec.Struct, frozen=True, gc=False):  # all sessions keep theirs: no work for the collector
    number: int  # counts the session's events from 1
    kind: str
    data: bytes  # one line of ASCII JSON

    @property
    def cost(self) -> int:
        return EVENT_BYTES + len(self.data)


class EventLog:
    """One session's events. `name` tells its numbers from those of another log, an earlier
    process's too."""

    def __init__(self, name: str, *, goes_on: bool = False) -> None:
        """goes_on: an earlier process had events of this session, of which nothing is known here."""
        self.name = name
        self.goes_on = goes_on
        self.size_bytes = 0
        self._aside_bytes = 0  # of those aside
        self.closed = False  # nothing more will come
        self._events: list[Event] = []  # by number; of those behind the first only some aside are gone
        self._aside: deque[Event] = deque()
        self._last = 0
        self._changed: asyncio.Event | None = None

    @property
    def last(self) -> int:
        """The number of the latest event; 0 before the first."""
        return self._last

    @property
    def first(self) -> int:
        """The number of the oldest event that is kept, else of the next."""
        return self._events[0].number if self._events else self._last + 1

    @property
    def waited_for(self) -> bool:
        """A reader has all there is, and waits for more."""
        return self._changed is not None

    def append(self, kind: str, data: bytes) -> None:
        self._last += 1
        event = Event(self._last, kind, data)
        self._events.append(event)
        self.size_bytes += event.cost
        if kind in ASIDE:
            self._aside.append(event)
            self._aside_bytes += event.cost
        self._wake()

    def bound(self, most: int) -> None:
        """Forget the oldest until all fit into `most` bytes, and those that turns did not bring about into
        their share; the latest stays."""
        while self._aside_bytes > most // ASIDE_SHARE and len(self._aside) > 1:
            self._forget(self._after(self._aside[0].number) - 1)
        while self.size_bytes > most and len(self._events) > 1:
            self._forget(0)

    def clear(self) -> None:
        self._events.clear()
        self._aside.clear()
        self.size_bytes = self._aside_bytes = 0

    def _forget(self, index: int) -> None:
        event = self._events.pop(index)
        self.size_bytes -= event.cost
        if event.kind in ASIDE:
            self._aside.popleft()  # it is the oldest of them whichever way it goes
            self._aside_bytes -= event.cost

    def close(self) -> None:
        self.closed = True
        self._wake()

    def since(self, number: int) -> tuple[int, Event | None]:
        """(how many events are gone between `number` and the oldest one after it that is left, that one)."""
        place = self._after(number)
        event = self._events[place] if place < len(self._events) else None
        return (self._last if event is None else event.number - 1) - number, event

    def _after(self, number: int) -> int:
        """Where the events after `number` begin."""
        return bisect_right(self._events, number, key=attrgetter("number"))

    async def wait(self) -> None:
        """Until something is appended, or the log is closed."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class EventLogs:
    """The logs of all sessions. When all together are too long, the longest silent are emptied first."""

    def __init__(
        self,
        new_name: Callable[[], str],
        *,
        log_bytes: int = 256 << 10,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._new_name = new_name
        self._log_bytes = log_bytes
        self._max_bytes = max_bytes
        self._logs: OrderedDict[SessionId, EventLog] = OrderedDict()  # the longest silent first
        self._bytes = 0
        self._shut = False

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, key: SessionId) -> bool:
        return key in self._logs

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def of(self, key: SessionId, *, goes_on: bool = False) -> EventLog:
        """The session's log, begun now if it has none. Only for sessions that exist. goes_on: of the log, if
        it is begun now."""
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = EventLog(self._new_name(), goes_on=goes_on)
            if self._shut:
                log.close()
        return log

    def publish(self, key: SessionId, kind: str, data: Mapping[str, object]) -> None:
        """`data` must be JSON; events larger than a session may keep are sent without it."""
        line = dump_json(data)
        if len(line) + EVENT_BYTES > self._log_bytes:
            line = dump_json({"turn": data.get("turn"), "too_large": len(line)})
        log = self.of(key)
        if kind not in ASIDE:
            self._logs.move_to_end(key)
        before = log.size_bytes
        log.append(kind, line)
        log.bound(self._log_bytes)
        self._bytes += log.size_bytes - before
        if self._bytes > self._max_bytes:
            self._make_room(log)

    def forget(self, key: SessionId) -> None:
        """The session is gone: readers get what is there, and then the end."""
        log = self._logs.pop(key, None)
        if log is not None:
            self._bytes -= log.size_bytes
            log.close()

    def shut(self) -> None:
        """The server leaves: readers get what is there, and then the end."""
        self._shut = True
        for log in self._logs.values():
            log.close()

    def _make_room(self, latest: EventLog) -> None:
        for log in self._logs.values():
            if self._bytes <= self._max_bytes:
                return
            if log is not latest and log.size_bytes:
                self._bytes -= log.size_bytes
                log.clear()
