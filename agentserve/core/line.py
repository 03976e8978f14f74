"""Who stands where in line, where several tenants do.

Places belong to tenants; what a client says of its turns' priority, or a tier of their worth, only changes
which of its tenant's turns stands in which of that tenant's places. So no word of a tenant moves another's
turns. With one tenant alone this is the order that was wanted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from agentserve.core.session import Session


def arrival(session: Session) -> int:
    return session.running_turn.rank[1]


def place_of(session: Session, queue: Sequence[Session]) -> int:
    """Where it stands in a queue by arrival, in which it is."""
    return bisect_left(queue, arrival(session), key=arrival)


def exchanged(places: Sequence[Session], wanted: Iterable[Session]) -> list[Session]:
    """As many as there are places, each tenant's in the order `wanted`, which has all that hold places."""
    queues: dict[str, deque[Session]] = {}
    for session in wanted:
        queues.setdefault(session.tenant, deque()).append(session)
    return [queues[session.tenant].popleft() for session in places]


def by_priority(places: Sequence[Session]) -> Sequence[Session]:
    """Each tenant's more urgent turns first, and those that are alike as they stand."""
    if not any(_priority(session) for session in places):
        return places
    return exchanged(places, sorted(places, key=_priority))


def _priority(session: Session) -> int:
    return session.running_turn.rank[0]
