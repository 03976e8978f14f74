"""Who is delivered next: a lane for each endpoint, so that one that is slow delays no other.

Pure: it is told what there is, what time it is and what came of attempts, and says what to begin. In a
lane tool calls go before events, and events leave one place to them. Of all places, the second half is for
endpoints that have none: many slow ones do not take all. And no owner's endpoints take all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools_bridge.webhooks.breaker import Breaker, BreakerSettings, Circuit
from tools_bridge.webhooks.types import Delivery, Key, Kind


@dataclass(frozen=True, slots=True)
class Places:
    """Attempts at one time: to one endpoint, to all, and to all of one owner."""

    each: int = 4
    all: int = 128
    owner: int = 96

    def __post_init__(self) -> None:
        if self.each < 2 or self.all < 2:
            raise ValueError("an endpoint needs two places: one that events leave to tool calls")


@dataclass(slots=True)
class _Entry:
    key: Key
    at: float
    kind: Kind
    deadline: float | None
    ticket: int | None = None  # of the attempt that runs


@dataclass(slots=True)
class _Lane:
    owner: str
    breaker: Breaker
    entries: dict[Key, _Entry] = field(default_factory=dict)
    tools: list[tuple[float, int, Key]] = field(default_factory=list)  # heaps; may name what is gone
    events: list[tuple[float, int, Key]] = field(default_factory=list)
    running: int = 0
    running_events: int = 0


class Lanes:
    def __init__(self, places: Places | None = None, breaker: BreakerSettings | None = None) -> None:
        self._places = places or Places()
        self._settings = breaker or BreakerSettings()
        self._lanes: dict[str, _Lane] = {}
        self._order: deque[str] = deque()  # endpoints, whose turn is next first
        self._running = 0
        self._running_of: Counter[str] = Counter()  # an owner's
        self._numbers = 0

    def __len__(self) -> int:
        return sum(len(lane.entries) for lane in self._lanes.values())

    def circuit(self, endpoint: str, now: float) -> Circuit:
        lane = self._lanes.get(endpoint)
        return Circuit.CLOSED if lane is None else lane.breaker.circuit(now)

    def put(self, delivery: Delivery) -> None:
        """What is owed, from its `next_at` on. It is not being attempted."""
        key = delivery.key
        lane = self._lanes.get(key.endpoint)
        if lane is None:
            lane = self._lanes[key.endpoint] = _Lane(delivery.owner, Breaker(self._settings))
            self._order.append(key.endpoint)
        deadline = delivery.deadline if delivery.waited_for else None
        kind = delivery.kind if delivery.waited_for else Kind.LIFECYCLE
        self._numbers += 1
        lane.entries[key] = _Entry(key, delivery.next_at, kind, deadline)
        heap = lane.tools if kind is Kind.TOOL else lane.events
        heapq.heappush(heap, (delivery.next_at, self._numbers, key))

    def drop(self, key: Key) -> None:
        """It is owed no more. An attempt that runs is let go of."""
        lane = self._lanes.get(key.endpoint)
        entry = lane.entries.pop(key, None) if lane else None
        if lane is not None and entry is not None and entry.ticket is not None:
            lane.breaker.cancelled(entry.ticket)
            self._leave(lane, entry)

    def forget(self, endpoint: str) -> None:
        """An endpoint that is no more. Nothing is owed to it."""
        lane = self._lanes.pop(endpoint, None)
        if lane is not None:
            assert not lane.entries
            self._order.remove(endpoint)

    def reset(self, endpoint: str) -> None:
        """An endpoint that was changed is tried anew."""
        if (lane := self._lanes.get(endpoint)) is not None:
            lane.breaker.reset()

    def take(self, now: float) -> Iterator[Key]:
        """What to begin now; each has a place from here on until `succeeded`, `failed` or `drop`."""
        idle = 0
        while idle < len(self._order) and self._running < self._places.all:
            name = self._order[0]
            self._order.rotate(-1)
            entry = self._next(self._lanes[name], now)
            idle = 0 if entry is not None else idle + 1
            if entry is not None:
                yield entry.key

    def succeeded(self, key: Key, pause_until: float | None = None) -> None:
        """The receiver is there; `pause_until`: it says when to come back. The entry is gone."""
        lane, entry, ticket = self._ended(key)
        if pause_until is None:
            lane.breaker.succeeded(ticket)
        else:
            lane.breaker.paused(ticket, pause_until)
        self._leave(lane, entry)

    def failed(self, key: Key, now: float, pause_until: float | None = None) -> None:
        """A failure of the endpoint. The entry is gone."""
        lane, entry, ticket = self._ended(key)
        lane.breaker.failed(ticket, now)
        if pause_until is not None:
            lane.breaker.pause(pause_until)
        self._leave(lane, entry)

    def hopeless(self, now: float) -> list[tuple[Key, bool]]:
        """Calls that wait for a place or a moment which comes too late, each with whether that is because its
        endpoint's circuit is open. They stay until they are dropped."""
        found = []
        for lane in self._lanes.values():
            if not lane.tools:
                continue
            ready = lane.breaker.ready_at(now)
            for entry in lane.entries.values():
                if entry.ticket is None and entry.deadline is not None:
                    blocked = ready is not None and ready > now and ready >= entry.deadline
                    if blocked or now >= entry.deadline:
                        found.append((entry.key, blocked))
        return found

    def next_moment(self, now: float) -> float | None:
        """When to ask again, if nothing else happens before; None: only when something does."""
        moments: list[float] = []
        for lane in self._lanes.values():
            waiting = [entry for entry in lane.entries.values() if entry.ticket is None] if lane.tools else []
            moments += (entry.deadline for entry in waiting if entry.deadline is not None)
            ready = lane.breaker.ready_at(now)
            if ready is None or self._running >= self._places.all:
                continue  # an attempt's end comes first
            heads = [heap[0][0] for heap in self._open(lane) if self._trim(lane, heap)]
            if heads:
                moments.append(max(ready, min(heads)))
        return min(moments, default=None)

    def _next(self, lane: _Lane, now: float) -> _Entry | None:
        ready = lane.breaker.ready_at(now)
        if ready is None or ready > now:
            return None
        for heap in self._open(lane):
            if self._trim(lane, heap) and heap[0][0] <= now:
                entry = lane.entries[heapq.heappop(heap)[2]]
                entry.ticket = lane.breaker.began(now)
                lane.running += 1
                lane.running_events += entry.kind is Kind.LIFECYCLE
                self._running += 1
                self._running_of[lane.owner] += 1
                return entry
        return None

    def _open(self, lane: _Lane) -> Iterator[list[tuple[float, int, Key]]]:
        """The heaps of a lane that there is a place for."""
        if lane.running >= self._places.each or self._running >= self._places.all:
            return
        if lane.running and self._running >= self._places.all // 2:
            return
        if self._running_of[lane.owner] >= self._places.owner:
            return
        yield lane.tools
        if lane.running_events < self._places.each - 1:
            yield lane.events

    @staticmethod
    def _trim(lane: _Lane, heap: list[tuple[float, int, Key]]) -> bool:
        """Whether it has an entry left, now its first."""
        while heap:
            at, _, key = heap[0]
            entry = lane.entries.get(key)
            if entry is not None and entry.ticket is None and entry.at == at:
                return True
            heapq.heappop(heap)
        return False

    def _ended(self, key: Key) -> tuple[_Lane, _Entry, int]:
        lane = self._lanes[key.endpoint]
        entry = lane.entries.pop(key)
        assert entry.ticket is not None
        return lane, entry, entry.ticket

    def _leave(self, lane: _Lane, entry: _Entry) -> None:
        lane.running -= 1
        lane.running_events -= entry.kind is Kind.LIFECYCLE
        self._running -= 1
        self._running_of[lane.owner] -= 1
        if not self._running_of[lane.owner]:
            del self._running_of[lane.owner]

    def check(self) -> None:
        """Counts agree with what is there. For tests."""
        running: Counter[str] = Counter()
        for lane in self._lanes.values():
            tickets = [entry for entry in lane.entries.values() if entry.ticket is not None]
            assert lane.running == len(tickets) <= self._places.each
            assert lane.running_events == sum(entry.kind is Kind.LIFECYCLE for entry in tickets)
            running[lane.owner] += lane.running
            waiting = {key for key, entry in lane.entries.items() if entry.ticket is None}
            assert waiting <= {key for _, _, key in (*lane.tools, *lane.events)}
        assert running == self._running_of
        assert running.total() == self._running <= self._places.all
        assert all(count <= self._places.owner for count in running.values())
        assert sorted(self._order) == sorted(self._lanes)
