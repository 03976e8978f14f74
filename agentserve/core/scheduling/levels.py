"""Orders by service that was attained: who has had least is next, in levels.

Objective: short mean completion times without knowing how long anything will run. Both displace: who is
of a higher level takes the seat of who has sunk below it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import TypeVar

from agentserve.core.scheduling.feedback import FeedbackQueues, FeedbackSettings
from agentserve.core.scheduling.policy import Outlook, Ran
from agentserve.core.session import Session
from agentserve.types import SessionId

P = TypeVar("P")


class Feedback:
    """Turns in skip-join feedback queues (FastServe). A turn keeps its level while it runs and waits."""

    def __init__(self, outlook: Outlook, settings: FeedbackSettings) -> None:
        self._outlook = outlook
        self._queues = FeedbackQueues(settings)
        self._waiting: dict[SessionId, Session] = {}
        self._seats = 1  # turns that ran at the same time last

    def entered(self, session: Session, now: float) -> None:
        self._waiting[session.id] = session
        if not session.running_turn.preemptions:
            self._queues.join(session.id, self._outlook.seconds(session), now)

    def left(self, session: Session, now: float) -> None:
        self._waiting.pop(session.id, None)

    def line(self, now: float) -> Iterator[Session]:
        self._queues.age(now)
        yield from sorted(self._waiting.values(), key=self._place)

    def _place(self, session: Session) -> tuple[int, int]:
        return self._queues.rank(session.id)

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        """Who is needed again soonest first: KV is taken from who is needed last (proactive swap)."""
        self._seats = max(len(running), 1)
        by_id = {session.id: session for session in running}
        order = self._queues.swap_order(by_id, self._seats, now)
        return [by_id[SessionId(str(name))] for name in reversed(order)]

    def outranks(self, waiting: Session, running: Session) -> bool:
        return self._queues.level(waiting.id) < self._queues.level(running.id)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        for each in ran:
            self._queues.ran(each.session.id, seconds, now)

    def ended(self, session: Session, now: float) -> None:
        self._queues.leave(session.id)


class LeastAttained:
    """Programs by the service that all their turns have had (Autellix, arXiv 2502.13965: PLAS).

    An agent's turns are one program. Its turns join the level of what the program has had; a turn that has
    waited for `ratio` times that goes to the top. Objective: short programs are not held up by long ones,
    whatever the lengths of their single turns.
    """

    def __init__(self, settings: FeedbackSettings, *, ratio: float = 1.0, remembered: int = 50_000) -> None:
        """remembered: programs whose service is known; the one that ran longest ago is forgotten first."""
        self._settings = settings
        self._ratio = ratio
        self._remembered = remembered
        self._service: dict[str, float] = {}  # by program, the one that ran last at the end
        self._by_level: list[tuple[tuple[int, float, int], Session]] = []
        self._by_patience: list[tuple[tuple[float, int], Session]] = []
        self._places: dict[SessionId, tuple[tuple[int, float, int], tuple[float, int]]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def attained(self, program: str) -> float:
        """Seconds of steps that its turns took part in."""
        return self._service.get(program, 0.0)

    def level(self, session: Session) -> int:
        return self._settings.joins_at(self.attained(session.running_turn.program))

    def entered(self, session: Session, now: float) -> None:
        turn = session.running_turn
        least = max(self.attained(turn.program), self._settings.patience)
        place = (self.level(session), turn.arrived, turn.rank[1])
        promoted = (now + self._ratio * least, turn.rank[1])
        self._places[session.id] = place, promoted
        insort(self._by_level, (place, session), key=_first)
        insort(self._by_patience, (promoted, session), key=_first)

    def left(self, session: Session, now: float) -> None:
        places = self._places.pop(session.id, None)
        if places is not None:
            del self._by_level[bisect_left(self._by_level, places[0], key=_first)]
            del self._by_patience[bisect_left(self._by_patience, places[1], key=_first)]

    def line(self, now: float) -> Iterator[Session]:
        promoted: set[SessionId] = set()
        for (due, _), session in self._by_patience:
            if due > now:
                break
            promoted.add(session.id)
            yield session
        for _, session in self._by_level:
            if session.id not in promoted:
                yield session

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        return sorted(running, key=lambda s: (self.level(s), s.running_turn.rank[1]))

    def outranks(self, waiting: Session, running: Session) -> bool:
        return self.level(waiting) < self.level(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        for program in {each.session.running_turn.program for each in ran}:
            self._service[program] = self._service.pop(program, 0.0) + seconds
        while len(self._service) > self._remembered:
            del self._service[next(iter(self._service))]

    def ended(self, session: Session, now: float) -> None:
        pass


def _first(entry: tuple[P, Session]) -> P:
    return entry[0]
