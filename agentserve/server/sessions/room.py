"""How much room sessions take, of all and of each tenant, and how much a tenant may have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from agentserve.server.sessions.session_record import Session
from agentserve.types import SessionId


class DirectoryFull(Exception):
    """Every session has a running turn and no further one may be opened."""

    def __init__(self, reason: str = "every session has a running turn") -> None:
        super().__init__(reason)


class TenantFull(DirectoryFull):
    """The same of the sessions that one tenant may have."""

    def __init__(self) -> None:
        super().__init__("every session that you may have has a running turn")


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one tenant; None: as much as there is."""

    sessions: int | None = None
    bytes: int | None = None


NO_QUOTA = Quota()


@dataclass(slots=True)
class Taken:
    sessions: int = 0
    bytes: int = 0


class Room:
    def __init__(self, max_sessions: int, max_bytes: int, quota: Callable[[str], Quota]) -> None:
        self._all = Quota(max_sessions, max_bytes)
        self._quota = quota
        self._taken: dict[str, Taken] = {}  # of tenants that have sessions
        self._total = Taken()

    @property
    def bytes(self) -> int:
        return self._total.bytes

    def of(self, tenant: str) -> Taken:
        return self._taken.get(tenant) or Taken()

    def take(self, tenant: str, size: int, sessions: int = 0) -> None:
        """So many bytes more, or fewer."""
        taken = self._taken.setdefault(tenant, Taken())
        for each in (taken, self._total):
            each.bytes += size
            each.sessions += sessions
        if not taken.sessions:
            del self._taken[tenant]

    def beyond(self, coming: int, tenant: str | None) -> bool:
        """With so many sessions more a tenant (None: all together) has more than it may."""
        quota, taken = (self._all, self._total) if tenant is None else (self._quota(tenant), self.of(tenant))
        too_many = quota.sessions is not None and taken.sessions + coming > quota.sessions
        return too_many or (quota.bytes is not None and taken.bytes > quota.bytes)

    def givers(self, coming: int, asks: str | None) -> list[str]:
        """Whose sessions may go for `coming` ones of the tenant that asks, where all is too much: of those
        that have more than each could have if all had the same, who has most first; then its own."""
        by_count = self._total.sessions + coming > (self._all.sessions or 0)
        have = {name: one.sessions if by_count else one.bytes for name, one in self._taken.items()}
        most = (self._all.sessions if by_count else self._all.bytes) or 0
        fair = most / max(len(have.keys() | {asks} - {None}), 1)
        found = sorted((name for name, held in have.items() if held > fair), key=lambda name: -have[name])
        return found if asks is None or asks in found else [*found, asks]


def longest_unused(
    sessions: Collection[Session], waits: Container[SessionId], tenants: Iterable[str]
) -> Session | None:
    """Of sessions at rest, the least recently used first, of the first of the tenants that has such; one that
    waits for a tool only if none is idle."""
    for tenant in tenants:
        waiting: Session | None = None
        for session in sessions:
            if session.running is not None or session.tenant != tenant:
                continue
            if session.key not in waits:
                return session
            waiting = waiting or session
        if waiting is not None:
            return waiting
    return None


def owners(find: Callable[[SessionId], Session | None]) -> Callable[[SessionId], str]:
    """Whose a session is; nobody's where it is gone."""

    def owner(key: SessionId) -> str:
        return "" if (found := find(key)) is None else found.tenant

    return owner
