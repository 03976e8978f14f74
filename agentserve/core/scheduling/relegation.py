"""Turns that cannot be in time any more go behind those that still can (QoServe's relegation).

Objective: as many turns as possible that keep their promise. What is late already is late whether it waits
a little longer or not, and what is computed for it first makes the next one late, too.

Within one tenant. Late turns are not starved: one of `EVERY` turns of the tenant that leave the line is the
late one that has waited longest, whatever else arrives. So with n late turns before it, a late turn enters
after at most EVERY x (n + 1) others of its tenant have; late turns that were preempted come back before it.
Where no other waits, late turns go at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from agentserve.core.line import by_priority
from agentserve.core.scheduling.orders import Keyed, Place
from agentserve.core.scheduling.policy import Order, Ran
from agentserve.core.scheduling.tenants import Lined
from agentserve.core.session import Session
from agentserve.types import SessionId

EVERY = 4


def _since(session: Session, now: float) -> Place:
    return float(session.running_turn.preemptions == 0), now


class Relegating(Order):
    """An order of turns that may be in time, and behind it those that were relegated, in that order."""

    def __init__(self, inner: Callable[[], Lined], every: int = EVERY) -> None:
        self._hopeful = inner()
        self._late = Keyed(_since)
        self._relegated: set[SessionId] = set()  # that stand among the late
        self._every = every
        self._passed = 0  # turns that have left the line since a late one did

    def __len__(self) -> int:
        return len(self._hopeful) + len(self._late)

    def _side(self, session: Session) -> Lined:
        return self._late if session.id in self._relegated else self._hopeful

    def entered(self, session: Session, now: float) -> None:
        if session.running_turn.relegated:
            self._relegated.add(session.id)
        self._side(session).entered(session, now)

    def left(self, session: Session, now: float) -> None:
        self._side(session).left(session, now)
        if session.id in self._relegated:
            self._relegated.discard(session.id)
            self._passed = 0
        else:
            self._passed = self._passed + 1 if len(self._late) else 0

    def line(self, now: float) -> Iterator[Session]:
        hopeful, late, passed = self._hopeful.line(now), self._late.line(now), self._passed
        if not len(self._late):
            yield from hopeful
            return
        while True:
            turn = passed + 1 >= self._every
            session = next(late if turn else hopeful, None)
            if session is None:
                yield from hopeful if turn else late
                return
            passed = 0 if turn else passed + 1
            yield session

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        return by_priority(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        self._hopeful.stepped(ran, seconds, now)

    def ended(self, session: Session, now: float) -> None:
        self._hopeful.ended(session, now)
