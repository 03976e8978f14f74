"""Conversations: lists of items that responses read and add to. Plain values, no event loop.

What is written of a turn is what is new: a conversation is a head, and a part for each time that items
came. The head says how many items there are, so that a conversation of which a part was lost is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.holdings import Holdings
from agentserve.server.http.responses.shelf import ResponseBook, read_json
from agentserve.server.sessions.identity import DEFAULT_TENANT
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

OVERHEAD_BYTES = 512
LARGEST_SHARE = 8  # one conversation takes more only if all at once
HEAD, PART = "conv_", "part_"  # how names of records begin
_ITEM_BYTES = 200


class Entry(msgspec.Struct, frozen=True, array_like=True):
    number: int  # within its conversation; never used again
    id: str
    data: bytes  # JSON

    @property
    def cost(self) -> int:
        return len(self.data) + len(self.id) + _ITEM_BYTES

    def shown(self) -> JsonObject:
        found: JsonObject = read_json(self.data)
        return found


class Head(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is on disk of a conversation, but for its items."""

    id: str
    created: float  # Unix time
    count: int  # of its items
    next: int  # number of the next one
    metadata: dict[str, str] = {}
    session: str | None = None  # public id of the one that its last response ran in
    tenant: str = DEFAULT_TENANT


class Conversation:
    """One of them. Only `Conversations` changes it."""

    def __init__(
        self,
        id_: str,
        created: float,
        metadata: Mapping[str, str] | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self.id = id_
        self.tenant = tenant
        self.created = created
        self.metadata = dict(metadata or {})
        self.next = 0
        self.session: str | None = None
        self.cost = OVERHEAD_BYTES
        self._entries: dict[str, Entry] = {}  # by id, in their order
        self._parts: dict[int, list[str]] = {}  # ids that came together, by the number of the first
        self._part_of: dict[str, int] = {}

    def __contains__(self, item: str) -> bool:
        return item in self._entries

    @property
    def count(self) -> int:
        return len(self._entries)

    def shown(self) -> JsonObject:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": int(self.created),
            "metadata": self.metadata,
        }

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def entry(self, id_: str) -> Entry | None:
        return self._entries.get(id_)

    def head(self) -> Head:
        return Head(
            self.id,
            self.created,
            len(self._entries),
            self.next,
            self.metadata,
            self.session,
            self.tenant,
        )

    def parts(self) -> dict[str, bytes]:
        """All records of its items."""
        return {part_name(self.id, first): self.part(first) or b"" for first in self._parts}

    def part(self, first: int) -> bytes | None:
        ids = self._parts.get(first)
        return None if ids is None else msgspec.msgpack.encode([self._entries[id_] for id_ in ids])

    # --- for Conversations -------------------------------------------------------------

    def take(self, first: int, entries: Sequence[Entry]) -> None:
        """Items that came together. ValueError where one is in it already."""
        if any(entry.id in self._entries for entry in entries) or len({e.id for e in entries}) < len(entries):
            raise ValueError(f"{self.id}: an item cannot be in it twice")
        if entries:
            self._parts[first] = [entry.id for entry in entries]
        for entry in entries:
            self._entries[entry.id] = entry
            self._part_of[entry.id] = first
            self.cost += entry.cost
            self.next = max(self.next, entry.number + 1)

    def drop(self, id_: str) -> int:
        """Gives the number of the part that it was in."""
        self.cost -= self._entries.pop(id_).cost
        first = self._part_of.pop(id_)
        self._parts[first].remove(id_)
        if not self._parts[first]:
            del self._parts[first]
        return first


def shown(entries: Iterable[Entry]) -> list[JsonObject]:
    return [entry.shown() for entry in entries]


def part_name(id_: str, first: int) -> str:
    return f"{PART}{id_}:{first}"


def named_part(name: str) -> tuple[str, int]:
    """Whose part it is, and which. ValueError."""
    id_, _, first = name.removeprefix(PART).rpartition(":")
    return id_, int(first)


class Conversations:
    """All of them; of too many the longest unused go, of the tenant that has most, but for those that a
    response is being made for."""

    def __init__(self, *, max_count: int, max_bytes: int, book: ResponseBook | None = None) -> None:
        self._max_bytes = max_bytes
        self._book = book
        self._kept: dict[str, Conversation] = {}
        self._held: Holdings[str] = Holdings(max_count, max_bytes)
        self.busy: set[str] = set()  # a response is being made for it

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._held.size

    def bytes_of(self, tenant: str) -> int:
        return self._held.size_of(tenant)

    def get(self, id_: str) -> Conversation | None:
        """Of whichever tenant."""
        found = self._kept.get(id_)
        if found is not None:
            self._held.touch(found.tenant, id_)
        return found

    def encoded(self, name: str) -> bytes | None:
        """A record as it is now; None where there is none of that name."""
        try:
            id_, first = named_part(name) if name.startswith(PART) else (name, None)
        except ValueError:
            return None
        found = self._kept.get(id_)
        if found is None:
            return None
        return msgspec.msgpack.encode(found.head()) if first is None else found.part(first)

    def lock(self, id_: str) -> None:
        """Until it is taken out of `busy`. ApiError where it is in, or has no room for more."""
        found = self._kept.get(id_)
        if found is not None and found.cost > self._max_bytes // LARGEST_SHARE:
            raise ApiError(
                "conversation: it is full; begin another, or delete items of it",
                status=413,
                param="conversation",
                code="conversation_full",
            )
        if id_ in self.busy:
            raise ApiError(
                "conversation: a response is being made for it",
                status=409,
                param="conversation",
                code="conversation_locked",
                headers={"retry-after": "1", "x-should-retry": "true"},
            )
        self.busy.add(id_)

    def open(self, conversation: Conversation, items: Sequence[JsonObject] = ()) -> Future[None] | None:
        """A new one."""
        self._kept[conversation.id] = conversation
        self._held.put(conversation.tenant, conversation.id, conversation.cost)
        return self.add(conversation, items)

    def add(
        self, to: Conversation, items: Sequence[JsonObject], session: str | None = None
    ) -> Future[None] | None:
        """ValueError where an item is in it already. `session`: that it goes on in."""
        first = to.next
        numbered = enumerate(items, first)
        to.take(first, [Entry(number, item["id"], write_json(item)) for number, item in numbered])
        to.session = session or to.session
        return self._changed(to, first if items else None)

    def remove(self, of: Conversation, item: str) -> Future[None] | None:
        """An item that it has."""
        return self._changed(of, of.drop(item))

    def describe(self, conversation: Conversation, metadata: Mapping[str, str]) -> Future[None] | None:
        conversation.metadata = dict(metadata)
        return self._changed(conversation, None)

    def take_back(self, of: Conversation, items: Iterable[str], session: str | None) -> Future[None] | None:
        """Items that were added and did not reach the disk; its session is what it was."""
        firsts = {of.drop(item) for item in items if item in of}
        of.session = session
        return self._changed(of, *firsts)

    def delete(self, id_: str) -> Future[None] | None:
        gone = self._kept.pop(id_)
        self._held.drop(gone.tenant, id_)
        if self._book is None:
            return None
        return self._book.write([(id_, None), *((name, None) for name in gone.parts())])

    def restore(self, heads: Iterable[Head], parts: Mapping[str, Mapping[int, Sequence[Entry]]]) -> int:
        """Take in what a book gives back. Those of which items are missing are let go of, there too: gives
        their number."""
        broken = 0
        gone: list[str] = []
        orphans = dict(parts)
        for head in sorted(heads, key=lambda one: one.created):
            made = Conversation(head.id, head.created, head.metadata, head.tenant)
            found = orphans.pop(head.id, {})
            try:
                for first, entries in sorted(found.items()):
                    made.take(first, entries)
                if made.count != head.count or made.next > head.next:
                    raise ValueError("items of it are missing")
            except ValueError:
                broken += 1
                gone += [head.id, *(part_name(head.id, first) for first in found)]
                continue
            made.next, made.session = head.next, head.session
            self._kept[made.id] = made
            self._held.put(made.tenant, made.id, made.cost)
        gone += [part_name(id_, first) for id_, found in orphans.items() for first in found]
        if gone and self._book is not None:
            self._book.write([(name, None) for name in gone])
        self._make_room(None)
        return broken + len(orphans)

    def _changed(self, one: Conversation, *parts: int | None) -> Future[None] | None:
        if self._kept.get(one.id) is not one:
            return None  # it was deleted meanwhile
        self._held.resize(one.tenant, one.id, one.cost)
        written = None
        if self._book is not None:
            records: list[tuple[str, bytes | None]] = [(one.id, msgspec.msgpack.encode(one.head()))]
            records += [(part_name(one.id, first), one.part(first)) for first in parts if first is not None]
            written = self._book.write(records)
        self._make_room(one.id)
        return written

    def _make_room(self, spared: str | None) -> None:
        def may_go(id_: str) -> bool:
            return id_ != spared and id_ not in self.busy

        while (id_ := self._held.next_out(may_go)) is not None:
            self.delete(id_)
