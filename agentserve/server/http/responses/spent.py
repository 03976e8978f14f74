"""Approvals whose calls were begun: each has one effect, however often a request is sent again.

An entry is on disk before its call is made. Of too many of a tenant the oldest go. No event loop but for
`take`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from agentserve.server.http.responses.shelf import ResponseBook
from agentserve.server.sessions.book import booked
from agentserve.server.text_port import JsonObject

SPENT = "spent_"  # how names of records begin
MOST = 10_000  # of a tenant
_CALL = ("approval_request_id", "server_label", "name", "arguments")


class SpentApproval(msgspec.Struct, frozen=True, array_like=True):
    name: str  # of its record
    tenant: str
    created: float  # Unix time


class Spent:
    def __init__(
        self, wall: Callable[[], float], *, ttl: float, book: ResponseBook | None = None, most: int = MOST
    ) -> None:
        """`ttl`: seconds, as responses are kept: after them no request of this server's is there."""
        self._wall = wall
        self._ttl = ttl
        self._book = book
        self._most = most
        self._of: dict[str, OrderedDict[str, SpentApproval]] = {}  # by tenant, the oldest first
        self._all: dict[str, SpentApproval] = {}

    def __len__(self) -> int:
        return len(self._all)

    async def take(self, tenant: str, call: JsonObject) -> bool:
        """The approval of a call that is about to be made; whether it was still there. StorageFailed: the
        disk did not take it, and the call is not to be made."""
        one = SpentApproval(_named(tenant, call), tenant, self._wall())
        if one.name in self._all:
            return False
        self._add(one)
        if self._book is None:
            return True
        try:
            await booked(self._book.put(one.name, msgspec.msgpack.encode(one)))
        except BaseException:  # nobody makes the call: also where this was cancelled
            if one.name in self._all:
                self._remove(one)
            raise
        return True

    def encoded(self, name: str) -> bytes | None:
        """A record as it is now; None where there is none of that name."""
        one = self._all.get(name)
        return None if one is None else msgspec.msgpack.encode(one)

    def restore(self, found: Iterable[SpentApproval]) -> None:
        for one in sorted(found, key=lambda one: one.created):
            self._add(one)

    def _add(self, one: SpentApproval) -> None:
        own = self._of.setdefault(one.tenant, OrderedDict())
        own[one.name] = self._all[one.name] = one
        oldest = next(iter(own.values()))
        while oldest is not one and (len(own) > self._most or self._wall() - oldest.created > self._ttl):
            self._remove(oldest)
            oldest = next(iter(own.values()))

    def _remove(self, one: SpentApproval) -> None:
        own = self._of[one.tenant]
        del own[one.name], self._all[one.name]
        if not own:
            del self._of[one.tenant]
        if self._book is not None:
            self._book.drop(one.name)


def _named(tenant: str, call: JsonObject) -> str:
    """By all that is said of it: requests of clients' own making may share their ids."""
    said = msgspec.json.encode([tenant, *(call[key].encode("utf-8", "surrogatepass") for key in _CALL)])
    return SPENT + hashlib.sha256(said).hexdigest()[:40]
