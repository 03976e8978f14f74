"""What tenants hold of something that is bounded for all together, and who gives when it is too much.

One tenant does not push out what is another's: it goes from who holds most, the oldest first, and nobody
gives who holds no more than a fair share, which is as much as each could have if all had the same. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class Own(Generic[Name]):
    """One tenant's: the sizes of its things, the oldest first."""

    things: OrderedDict[Name, int] = field(default_factory=OrderedDict)
    size: int = 0


class Holdings(Generic[Name]):
    def __init__(self, most_count: int, most_size: int) -> None:
        self._most_count = most_count
        self.most_size = most_size
        self._of: dict[str, Own[Name]] = {}
        self.count = 0
        self.size = 0

    @property
    def too_much(self) -> bool:
        return self.count > self._most_count or self.size > self.most_size

    def size_of(self, tenant: str) -> int:
        own = self._of.get(tenant)
        return 0 if own is None else own.size

    def count_of(self, tenant: str) -> int:
        own = self._of.get(tenant)
        return 0 if own is None else len(own.things)

    def put(self, tenant: str, name: Name, size: int) -> None:
        """It is the newest of its tenant's now."""
        self.drop(tenant, name)
        own = self._of.setdefault(tenant, Own())
        own.things[name] = size
        self._grow(own, 1, size)

    def resize(self, tenant: str, name: Name, size: int) -> None:
        """It stays where it is."""
        own = self._of[tenant]
        self._grow(own, 0, size - own.things[name])
        own.things[name] = size

    def touch(self, tenant: str, name: Name) -> None:
        """It is the newest."""
        self._of[tenant].things.move_to_end(name)

    def drop(self, tenant: str, name: Name) -> None:
        """Nothing where it is not there."""
        own = self._of.get(tenant)
        if own is None or name not in own.things:
            return
        self._grow(own, -1, -own.things.pop(name))
        if not own.things:
            del self._of[tenant]

    def givers(self) -> list[str]:
        """Who may be taken from while it is too much, who has most first."""
        by_count = self.count > self._most_count
        have = {name: len(own.things) if by_count else own.size for name, own in self._of.items()}
        fair = (self._most_count if by_count else self.most_size) / max(len(have), 1)
        return sorted((name for name, held in have.items() if held > fair), key=lambda name: -have[name])

    def oldest(self, tenant: str) -> Iterator[Name]:
        """Of a tenant's things. They may not change meanwhile."""
        own = self._of.get(tenant)
        return iter(() if own is None else own.things)

    def next_out(self, may: Callable[[Name], bool] = lambda name: True) -> Name | None:
        """What goes; None: it is not too much, or nothing that `may` go is there."""
        if not self.too_much:
            return None
        for tenant in self.givers():
            found = next((name for name in self.oldest(tenant) if may(name)), None)
            if found is not None:
                return found
        return None

    def _grow(self, own: Own[Name], count: int, size: int) -> None:
        own.size += size
        self.count += count
        self.size += size
