"""Conversations: lists of items that responses read and add to. Plain values, no event loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec

from agentserve.server.errors import ApiError
from agentserve.server.http.responses.shelf import Book, read_json
from agentserve.server.sessions.transcript import write_json
from agentserve.server.text_port import JsonObject

OVERHEAD_BYTES = 512
LARGEST_SHARE = 8  # one conversation takes more only if all at once
_ITEM_BYTES = 200


class Entry(msgspec.Struct, frozen=True, array_like=True):
    number: int  # within its conversation; never used again
    id: str
    data: bytes  # JSON

    def shown(self) -> JsonObject:
        found: JsonObject = read_json(self.data)
        return found


class Conversation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value: changes make a new one."""

    id: str
    created: float  # Unix time
    metadata: dict[str, str] = {}
    entries: tuple[Entry, ...] = ()
    next: int = 0
    session: str | None = None  # public id of the one that its last response ran in

    @property
    def cost(self) -> int:
        return OVERHEAD_BYTES + sum(len(entry.data) + len(entry.id) + _ITEM_BYTES for entry in self.entries)

    def shown(self) -> JsonObject:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": int(self.created),
            "metadata": self.metadata,
        }

    def entry(self, id_: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.id == id_), None)

    def before(self, number: int) -> list[JsonObject]:
        return [entry.shown() for entry in self.entries if entry.number < number]

    def with_items(self, items: Sequence[JsonObject], session: str | None = None) -> Conversation:
        added = tuple(
            Entry(self.next + offset, item["id"], write_json(item)) for offset, item in enumerate(items)
        )
        return msgspec.structs.replace(
            self, entries=self.entries + added, next=self.next + len(added), session=session or self.session
        )

    def without(self, id_: str) -> Conversation:
        left = tuple(entry for entry in self.entries if entry.id != id_)
        return msgspec.structs.replace(self, entries=left)


class Conversations:
    """All of them; of too many the longest unused go, but for those that a response is being made for."""

    def __init__(
        self, wall: Callable[[], float], *, max_count: int, max_bytes: int, book: Book | None = None
    ) -> None:
        self._wall = wall
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._book = book
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._bytes = 0
        self.busy: set[str] = set()  # a response is being made for it

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def get(self, id_: str) -> Conversation | None:
        found = self._kept.get(id_)
        if found is not None:
            self._kept.move_to_end(id_)
        return found

    def now(self) -> float:
        return self._wall()

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

    def put(self, conversation: Conversation) -> Future[None] | None:
        self._place(conversation)
        written = None
        if self._book is not None:
            written = self._book.put(conversation.id, msgspec.msgpack.encode(conversation))
        self._make_room(conversation.id)
        return written

    def delete(self, id_: str) -> Future[None] | None:
        self._bytes -= self._kept.pop(id_).cost
        return self._book.drop(id_) if self._book is not None else None

    def restore(self, found: Iterable[Conversation]) -> None:
        for conversation in sorted(found, key=lambda one: one.created):
            self._place(conversation)
        self._make_room(None)

    def _place(self, conversation: Conversation) -> None:
        before = self._kept.pop(conversation.id, None)
        self._bytes += conversation.cost - (before.cost if before is not None else 0)
        self._kept[conversation.id] = conversation

    def _make_room(self, spared: str | None) -> None:
        for id_ in list(self._kept):
            if len(self._kept) <= self._max_count and self._bytes <= self._max_bytes:
                return
            if id_ != spared and id_ not in self.busy:
                self.delete(id_)
