"""Deliveries that are over, for whoever wants to look at them or have them sent again.

Bounded for an endpoint and in all; where all is too much, the owner who has most of it loses the oldest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tools_bridge.webhooks.types import Delivery, Key


@dataclass(slots=True)
class _Own:
    """An owner's, the oldest first."""

    entries: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    size: int = 0  # bytes of bodies


class History:
    """`most`, `most_of_endpoint`: entries; `most_bytes`: of bodies."""

    def __init__(self, most: int, most_of_endpoint: int, most_bytes: int) -> None:
        self._most, self._most_of_endpoint, self._most_bytes = most, most_of_endpoint, most_bytes
        self._entries: dict[Key, Delivery] = {}
        self._of_endpoint: dict[str, OrderedDict[Key, None]] = {}
        self._of_owner: dict[str, _Own] = {}
        self._size = 0

    @property
    def entries(self) -> Mapping[Key, Delivery]:
        return self._entries

    def of_endpoint(self, name: str) -> Iterator[Delivery]:
        """The newest first."""
        return (self._entries[key] for key in reversed(self._of_endpoint.get(name, OrderedDict())))

    def add(self, delivery: Delivery) -> list[Key]:
        """What is forgotten for it, which may be itself."""
        key, forgotten = delivery.key, []
        own = self._of_owner.setdefault(delivery.owner, _Own())
        line = self._of_endpoint.setdefault(delivery.endpoint, OrderedDict())
        self._entries[key], own.entries[key], line[key] = delivery, None, None
        own.size += delivery.size
        self._size += delivery.size
        if len(line) > self._most_of_endpoint:
            forgotten.append(self.remove(next(iter(line))))
        while len(self._entries) > self._most:
            most = max(self._of_owner.values(), key=lambda each: len(each.entries))
            forgotten.append(self.remove(next(iter(most.entries))))
        while self._size > self._most_bytes:
            most = max(self._of_owner.values(), key=lambda each: each.size)
            forgotten.append(self.remove(next(iter(most.entries))))
        return forgotten

    def remove(self, key: Key) -> Key:
        delivery = self._entries.pop(key)
        own, line = self._of_owner[delivery.owner], self._of_endpoint[delivery.endpoint]
        del own.entries[key], line[key]
        own.size -= delivery.size
        self._size -= delivery.size
        if not own.entries:
            del self._of_owner[delivery.owner]
        if not line:
            del self._of_endpoint[delivery.endpoint]
        return key

    def remove_endpoint(self, name: str) -> list[Key]:
        """What is forgotten."""
        return [self.remove(key) for key in list(self._of_endpoint.get(name, ()))]

    def check(self) -> None:
        """Within its bounds, and counted. For tests."""
        assert len(self._entries) <= self._most
        assert self._size == sum(each.size for each in self._entries.values()) <= self._most_bytes
        for lines in (self._of_endpoint, {name: own.entries for name, own in self._of_owner.items()}):
            assert all(lines.values())
            assert {key for line in lines.values() for key in line} == self._entries.keys()
        assert all(len(line) <= self._most_of_endpoint for line in self._of_endpoint.values())
        for name, own in self._of_owner.items():
            assert own.size == sum(self._entries[key].size for key in own.entries)
            assert all(self._entries[key].owner == name for key in own.entries)
