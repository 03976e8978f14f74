"""Turns that lost their seat: parked here by the way that was judged, or gone to another worker.

Asking for another worker gives nothing up: the turn waits here as it would otherwise, and goes only if it
still waits when the API process has found one (`Withdraw`). So it is never nowhere, and never in two places.
"""

from __future__ import annotations

from agentserve.core.scheduler import Scheduler
from agentserve.core.session import Session, SessionTable
from agentserve.core.states import Phase
from agentserve.core.tiers import Tiers
from agentserve.core.victims import Way
from agentserve.messages import Displaced, PreemptionCounts, Withdrawn
from agentserve.types import SessionId, TurnId

PRESSURE = "pressure"  # why a turn lost its seat


class Leaving:
    def __init__(self, sessions: SessionTable, scheduler: Scheduler, tiers: Tiers | None) -> None:
        self._sessions = sessions
        self._scheduler = scheduler
        self._pressure = scheduler.pressure
        self._tiers = tiers
        if tiers is not None:
            self._pressure.quotes = tiers.quotes

    def displaced(self, session: Session, now: float) -> list[Displaced]:
        """It was preempted: park it. What is to be told, if another worker is wanted for it."""
        verdict, way = self._pressure.take(session.id), Way.RECOMPUTE
        if self._tiers is not None:
            way = self._tiers.preempted(session, now, verdict)
        if way is Way.SWAP:
            self._sessions.swapped(session)
        self._pressure.count(verdict.why, way, asked=verdict.asks > 0)
        return [Displaced(session.id, session.last_turn, verdict.asks)] if verdict.asks else []

    def neighbour(self, pages: int) -> list[Displaced]:
        """Another worker has room: a turn that waits already may want to go there, the last of them first."""
        self._pressure.elsewhere = pages
        waiting, running = self._scheduler.waiting, self._scheduler.running
        last = next((session for session in reversed(waiting) if session.phase is Phase.PREEMPTED), None)
        if last is None or not running:
            return []
        asks = self._pressure.wish(last, running)
        return [Displaced(last.id, last.last_turn, asks)] if asks else []

    def withdraw(self, name: SessionId, turn: TurnId, now: float) -> list[Withdrawn]:
        """Another worker would take a turn over: give it up, as long as it waits. Its tokens stay, as those
        of a session at rest, so that what is on disk is not nobody's before the other one has read it."""
        session = self._sessions.get(name)
        if session is None or session.turn is None or session.last_turn != turn:
            return []  # its end has been told
        if session.phase is not Phase.PREEMPTED:
            return [Withdrawn(name, turn, None)]
        generated = session.generated
        self._scheduler.remove(session, now)
        ended = self._sessions.end_turn(session, keep=True)
        session.shown = session.state  # its state is another worker's to tell
        if self._tiers is not None:
            self._tiers.withdrawn(session, now)
        self._pressure.migrated()
        return [Withdrawn(name, turn, ended.usage(generated, now, whole=False))]

    def counts(self) -> PreemptionCounts:
        tiers = self._tiers
        if tiers is None:
            return self._pressure.counts()
        return self._pressure.counts(tiers.spills.swapped, tiers.returned)
