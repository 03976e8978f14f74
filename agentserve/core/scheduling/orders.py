"""Orders that look at each turn by itself."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import groupby, islice

from agentserve.core.scheduling.deadlines import within
from agentserve.core.scheduling.policy import Order, Outlook
from agentserve.core.session import Session
from agentserve.types import SessionId

Place = tuple[float, ...]
"""Smaller goes first."""

Key = Callable[[Session, float], Place]
"""The place of a turn that enters the line now. It keeps it while it waits."""


def arrival(session: Session, now: float = 0.0) -> Place:
    """First come, first served; who was preempted keeps its place."""
    return (session.running_turn.rank[1],)


def urgency(session: Session, now: float = 0.0) -> Place:
    """Among turns of one tenant: by priority, then first come, first served."""
    return session.running_turn.rank


def promised(session: Session, now: float = 0.0) -> Place:
    """Among turns of one tenant: by priority, then who is wanted first. Where all were promised alike that is
    first come, first served; and whoever has waited for a minute is passed by nobody who comes."""
    turn = session.running_turn
    return turn.rank[0], turn.arrived + within(turn.slo)


class Keyed(Order):
    """Turns by a key that is taken once, as they enter the line.

    A key that grows with the time of arrival ages by itself: who arrives late enough comes after
    everybody who waits, however it compares otherwise.
    """

    def __init__(self, key: Key = arrival) -> None:
        self._key = key
        self._line: list[tuple[Place, tuple[int, int], Session]] = []
        self._places: dict[SessionId, Place] = {}

    def __len__(self) -> int:
        return len(self._line)

    def entered(self, session: Session, now: float) -> None:
        place = self._places[session.id] = self._key(session, now)
        insort(self._line, (place, session.running_turn.rank, session), key=_place)

    def left(self, session: Session, now: float) -> None:
        place = self._places.pop(session.id, None)
        if place is not None:
            found = bisect_left(self._line, (place, session.running_turn.rank), key=_place)
            del self._line[found]

    def line(self, now: float) -> Iterator[Session]:
        return (session for _, _, session in self._line)


def _priority(session: Session) -> int:
    return session.running_turn.rank[0]


def _place(entry: tuple[Place, tuple[int, int], Session]) -> tuple[Place, tuple[int, int]]:
    return entry[:2]


def by_deadline(outlook: Outlook, weight: float) -> Key:
    """When its first token is due, later by `weight` x the seconds that it takes to get there (QoServe's
    order, whose weight is time per token): of two that are due together the shorter goes first, since
    more can then be in time. Without a promise it is due on arrival."""

    def key(session: Session, now: float) -> Place:
        turn = session.running_turn
        slo = turn.slo.ttft if turn.slo.ttft is not None else turn.slo.total
        return (turn.arrived + (slo or 0.0) + weight * outlook.seconds(session),)

    return key


class ResumesFirst(Order):
    """Of one tenant: turns of which all but one step's tokens have KV, as after a tool, go before whole new
    prompts; the rest as the tiers would admit them. Nobody is passed who has waited for `patience` seconds.

    Objective: no agent that comes back with a tool's result waits behind the prompts of others.
    """

    def __init__(self, outlook: Outlook, short: int, *, patience: float, examined: int, tried: int) -> None:
        """short: tokens of a step; examined: turns that are put in order, from the first on; tried: of
        these, how many may turn out to be short."""
        self._outlook = outlook
        self._short = short
        self._patience = patience
        self._examined = examined
        self._tried = tried
        self._arrivals = Keyed(promised)

    def __len__(self) -> int:
        return len(self._arrivals)

    def entered(self, session: Session, now: float) -> None:
        self._arrivals.entered(session, now)

    def left(self, session: Session, now: float) -> None:
        self._arrivals.left(session, now)

    def line(self, now: float) -> Iterator[Session]:
        waiting = self._outlook.ranked(list(islice(self._arrivals.line(now), self._examined)), now)
        waiting.sort(key=_priority)
        looked_at = 0
        for _, alike in groupby(waiting, _priority):
            others = []
            for session in alike:  # drawn only as far as there is room: most are never looked at
                goes_first = now - session.running_turn.arrived >= self._patience
                if not goes_first and looked_at < self._tried:
                    goes_first = self._outlook.lacking(session) <= self._short
                looked_at += 1
                if goes_first:
                    yield session
                else:
                    others.append(session)
            yield from others
