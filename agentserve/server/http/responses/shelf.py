"""Responses that are kept: each with its own input, its output, and the one that it goes on from.

A response's history is its ancestors', so an ancestor stays as long as one that goes on from it, also if
it was deleted or is too old: nobody can name it any more, that is all. Bounded by count, bytes and age;
what goes first is the oldest that nothing goes on from, of the tenant that has most. Plain values, no event
loop.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from agentserve.server.holdings import Holdings
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.text_port import JsonObject

OVERHEAD_BYTES = 512
LARGEST_SHARE = 8  # of all there is room for, one response begins with no more
_SMALL = 1 << 20  # bytes that it may have on any shelf
_ITEM_BYTES = 200


def read_json(data: bytes) -> Any:
    """What `write_json` wrote: of a model's text it may have half of a surrogate pair."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data)


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """One response. `items` and `response` are JSON, as they are shown."""

    id: str
    created: float  # Unix time
    items: bytes  # of its own input
    response: bytes
    parent: str | None = None
    conversation: str | None = None
    upto: int = 0  # items of the conversation that came before: those with smaller numbers
    session: str | None = None  # public id
    sequence: int = 0  # the number of the last event
    names: tuple[str, ...] = ()  # ids of its items, input and output
    running: bool = False  # in the background, when this was written
    hidden: bool = False  # it was deleted
    tenant: str = DEFAULT_TENANT
    untold: bool = False  # webhooks are to be told of its end

    @property
    def cost(self) -> int:
        return (
            OVERHEAD_BYTES
            + len(self.items)
            + len(self.response)
            + sum(len(name) + _ITEM_BYTES for name in self.names)
        )

    def shown(self) -> JsonObject:
        found: JsonObject = read_json(self.response)
        return found

    def own_items(self) -> list[JsonObject]:
        found: list[JsonObject] = read_json(self.items)
        return found

    def output(self) -> list[JsonObject]:
        found: list[JsonObject] = self.shown()["output"]
        return found


class ResponseBook(Protocol):
    """What keeps records beyond the life of the process. No call blocks."""

    def put(self, name: str, content: bytes) -> Future[None]: ...

    def drop(self, name: str) -> Future[None]: ...

    def write(self, records: Sequence[tuple[str, bytes | None]]) -> Future[None]:
        """All of them or none; None: drop it."""
        ...


class Shelf:
    def __init__(
        self,
        wall: Callable[[], float],
        *,
        max_count: int,
        max_bytes: int,
        ttl: float,
        book: ResponseBook | None = None,
    ) -> None:
        """`wall`: Unix time. `ttl`: seconds."""
        self._wall = wall
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._book = book
        self._kept: dict[str, Kept] = {}
        self._children: dict[str, int] = {}  # how many go on from it, where some do
        self._lines: dict[str, list[tuple[float, str]]] = {}  # heaps of a tenant's others, by age
        self._owners: dict[tuple[str, str], str] = {}  # tenant, item -> the response that has it
        self._held: Holdings[str] = Holdings(max_count, max_bytes)
        self._newest: str | None = None  # the last that was put

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._held.size

    @property
    def largest(self) -> int:
        """Bytes that a response may have before anything is computed for it: it is not to push out all."""
        return max(self._max_bytes // LARGEST_SHARE, _SMALL)

    def bytes_of(self, tenant: str) -> int:
        return self._held.size_of(tenant)

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))

    def get(self, id_: str) -> Kept | None:
        """Of whichever tenant. None: there is none, it was deleted, or it is too old."""
        kept = self._kept.get(id_)
        return None if kept is None or kept.hidden or self._old(kept) else kept

    def chain(self, id_: str) -> list[Kept] | None:
        """It and all that it goes on from, the first of them first; None if one of them is not there."""
        found: list[Kept] = []
        kept = self.get(id_)
        while kept is not None:
            found.append(kept)
            if kept.parent is None:
                return found[::-1]
            kept = self._kept.get(kept.parent)
        return None

    def owner(self, tenant: str, item: str) -> Kept | None:
        """The response of a tenant that an item is part of: ids of items may be their clients'."""
        owner = self._owners.get((tenant, item))
        return None if owner is None else self.get(owner)

    def encoded(self, id_: str) -> bytes | None:
        """A record, hidden ones too."""
        kept = self._kept.get(id_)
        return None if kept is None else msgspec.msgpack.encode(kept)

    def put(self, kept: Kept) -> Future[None] | None:
        """Add a response, or what became of one. Its parent must be there: `hold` sees to that. It is not
        what goes to make room for itself, so it alone may be more than all may be."""
        before = self._kept.get(kept.id)
        if before is None:
            self._add(kept)
        else:
            self._replace(before, kept)
        written = self._book.put(kept.id, msgspec.msgpack.encode(kept)) if self._book is not None else None
        self._newest = kept.id
        self.expire()
        self._make_room()
        return written

    def hold(self, id_: str) -> None:
        """Something is about to go on from it: it stays until `release`."""
        self._children[id_] = self._children.get(id_, 0) + 1

    def release(self, id_: str) -> None:
        kept = self._let_go(id_)
        if kept is not None:
            self._remove(kept)
        self._make_room()  # what was held may have been what stood in the way

    def delete(self, id_: str) -> Future[None] | None:
        """Of one that `get` finds."""
        kept = self._kept[id_]
        if id_ not in self._children:
            return self._remove(kept)
        return self.put(msgspec.structs.replace(kept, hidden=True))

    def expire(self) -> None:
        """Let go of those that are too old and that nothing goes on from."""
        for tenant in list(self._lines):
            while (oldest := self._oldest(tenant)) is not None and self._old(oldest):
                self._remove(oldest)

    def restore(self, found: Iterable[Kept]) -> None:
        """Take in what a book gives back. One whose parent is gone cannot be gone on from."""
        for kept in sorted(found, key=lambda kept: kept.created):
            self._add(kept)
        for kept in list(self._kept.values()):
            if kept.hidden and kept.id in self._kept and kept.id not in self._children:
                self._remove(kept)
        self.expire()
        self._make_room()

    # --- inside ------------------------------------------------------------------------

    def _old(self, kept: Kept) -> bool:
        return self._wall() - kept.created >= self._ttl

    def _add(self, kept: Kept) -> None:
        self._kept[kept.id] = kept
        self._count(kept, 1)
        if kept.id not in self._children:
            self._stand_in_line(kept)
        if kept.parent is not None:
            self.hold(kept.parent)

    def _replace(self, before: Kept, kept: Kept) -> None:
        self._count(before, -1)
        self._kept[kept.id] = kept
        self._count(kept, 1)

    def _remove(self, kept: Kept) -> Future[None] | None:
        """With those that were only there for it."""
        written: Future[None] | None = None
        going: Kept | None = kept
        while going is not None:
            del self._kept[going.id]
            self._count(going, -1)
            if self._book is not None:
                written = self._book.drop(going.id)
            going = self._let_go(going.parent) if going.parent is not None else None
        return written

    def _let_go(self, id_: str) -> Kept | None:
        """One thing less goes on from it. It is given back if nobody can name it any more."""
        self._children[id_] -= 1
        kept = self._kept.get(id_)
        if self._children[id_]:
            return None
        del self._children[id_]
        if kept is not None and not kept.hidden:
            self._stand_in_line(kept)
            return None
        return kept

    def _stand_in_line(self, kept: Kept) -> None:
        line = self._lines.setdefault(kept.tenant, [])
        if len(line) > 2 * self._held.count_of(kept.tenant) + 64:
            free = (self._kept[id_] for id_ in self._held.oldest(kept.tenant) if id_ not in self._children)
            line[:] = [(one.created, one.id) for one in free]
            heapq.heapify(line)
        heapq.heappush(line, (kept.created, kept.id))

    def _oldest(self, tenant: str) -> Kept | None:
        """Of a tenant's that nothing goes on from."""
        line = self._lines.get(tenant, [])
        while line:
            kept = self._kept.get(line[0][1])
            if kept is not None and kept.id not in self._children:
                return kept
            heapq.heappop(line)
        self._lines.pop(tenant, None)
        return None

    def _count(self, kept: Kept, by: int) -> None:
        if by < 0:
            self._held.drop(kept.tenant, kept.id)
        else:
            self._held.put(kept.tenant, kept.id, kept.cost)
        for name in kept.names:
            named = (kept.tenant, name)
            if by > 0:
                self._owners.setdefault(named, kept.id)
            elif self._owners.get(named) == kept.id:
                del self._owners[named]

    def _make_room(self) -> None:
        """Only the newest and what something goes on from may be more than there is room for."""
        while self._held.too_much and (gone := self._next_out()) is not None:
            self._remove(gone)

    def _next_out(self) -> Kept | None:
        for tenant in self._held.givers():
            first = self._oldest(tenant)
            if first is None or first.id != self._newest:
                found = first
            else:
                heapq.heappop(self._lines[tenant])
                found = self._oldest(tenant)
                self._stand_in_line(first)
            if found is not None:
                return found
        return None
