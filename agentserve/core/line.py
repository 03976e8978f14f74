"""Who stands where in line, where several tenants do.

Places belong to tenants, in the order in which turns came; what a client says of its turns' priority, or a
policy thinks of them, only changes which of its tenant's turns stands in which of that tenant's places. So
no word of a tenant moves another's turns. With one tenant alone this is the order that was wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from agentserve.core.session import Session


def arrival(session: Session) -> int:
    return session.running_turn.rank[1]


def rank(session: Session) -> tuple[int, int]:
    """Among its tenant's: the more urgent first, then who came first."""
    return session.running_turn.rank


def exchanged(places: Sequence[Session], wanted: Iterable[Session]) -> list[Session]:
    """As many as there are places, each tenant's in the order `wanted`, which has all that hold places."""
    queues: dict[str, deque[Session]] = {}
    for session in wanted:
        queues.setdefault(session.tenant, deque()).append(session)
    return [queues[session.tenant].popleft() for session in places]


def first_of(by_arrival: Sequence[Session], most: int) -> list[Session]:
    """The first in line."""
    places = by_arrival[:most]
    if not any(session.running_turn.rank[0] for session in by_arrival):
        return list(places)
    return exchanged(places, sorted(by_arrival, key=rank))


def lined_up(sessions: Iterable[Session]) -> list[Session]:
    """All of them, in whichever order they are given."""
    by_arrival = sorted(sessions, key=arrival)
    return first_of(by_arrival, len(by_arrival))


def let_through(line: Sequence[Session], quick: Callable[[Session], bool]) -> list[Session]:
    """The quick ones pass the others, but nobody passes one of its own tenant's that is more urgent."""
    line = exchanged(line, sorted(line, key=lambda s: (s.running_turn.rank[0], not quick(s))))
    stopped: dict[str, int] = {}  # tenant -> the most urgent one that does not pass
    ahead: list[Session] = []
    behind: list[Session] = []
    for session in line:
        level = session.running_turn.rank[0]
        if quick(session) and level <= stopped.get(session.tenant, level):
            ahead.append(session)
        else:
            behind.append(session)
            stopped[session.tenant] = min(level, stopped.get(session.tenant, level))
    return ahead + behind
