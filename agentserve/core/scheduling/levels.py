"""Orders by service that was attained: who has had least is next, in levels.

Objective: short mean completion times without knowing how long anything will run. Both displace: who is
of a higher level takes the seat of who has sunk below it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import TypeVar

from agentserve.core.scheduling.feedback import FeedbackQueues, FeedbackSettings
from agentserve.core.scheduling.policy import Order, Outlook, Ran
from agentserve.core.session import Session
from agentserve.types import SessionId

P = TypeVar("P")


class Feedback(Order):
    """Turns in skip-join feedback queues (FastServe). A turn keeps its level while it runs and waits."""

    def __init__(self, outlook: Outlook, settings: FeedbackSettings) -> None:
        self._outlook = outlook
        self._queues: FeedbackQueues[Session] = FeedbackQueues(settings)
        self._line: list[tuple[tuple[int, int], Session]] = []  # by rank
        self._ranks: dict[SessionId, tuple[int, int]] = {}  # of those in line, as they stand there

    def entered(self, session: Session, now: float) -> None:
        if not session.running_turn.preemptions:
            self._queues.join(session, self._outlook.seconds(session), now)
        self._line_up(session)

    def _line_up(self, session: Session) -> None:
        rank = self._ranks[session.id] = self._queues.rank(session)
        insort(self._line, (rank, session), key=_first)

    def left(self, session: Session, now: float) -> None:
        rank = self._ranks.pop(session.id, None)
        if rank is not None:
            del self._line[bisect_left(self._line, rank, key=_first)]

    def line(self, now: float) -> Iterator[Session]:
        for session in self._queues.age(now):
            if session.id in self._ranks:
                self.left(session, now)
                self._line_up(session)
        return (session for _, session in self._line)

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        """Who is needed again soonest first: KV is taken from who is needed last (proactive swap)."""
        order = self._queues.swap_order(running, len(running), now)
        order.reverse()
        return order

    def outranks(self, waiting: Session, running: Session) -> bool:
        return self._queues.level(waiting) < self._queues.level(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        for each in ran:
            self._queues.ran(each.session, seconds, now)

    def ended(self, session: Session, now: float) -> None:
        self._queues.leave(session)


class LeastAttained(Order):
    """Programs by the service that all their turns have had (Autellix, arXiv 2502.13965: PLAS).

    An agent's turns are one program. Its turns join the level of what the program has had; a turn that has
    waited for `ratio` times that goes to the top. Objective: short programs are not held up by long ones,
    whatever the lengths of their single turns.
    """

    def __init__(self, settings: FeedbackSettings, *, ratio: float = 1.0, remembered: int = 50_000) -> None:
        """remembered: programs whose service is known; the one that ran longest ago is forgotten first."""
        self._settings = settings
        self._quanta = [settings.quantum_of(level) for level in range(settings.levels - 1)]
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
        return bisect_left(self._quanta, self._service.get(session.running_turn.program, 0.0))

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
        return sorted(running, key=self.level)  # they are by arrival

    def outranks(self, waiting: Session, running: Session) -> bool:
        return self.level(waiting) < self.level(running)

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        for program in {each.session.running_turn.program for each in ran}:
            self._service[program] = self._service.pop(program, 0.0) + seconds
        while len(self._service) > self._remembered:
            del self._service[next(iter(self._service))]


def _first(entry: tuple[P, Session]) -> P:
    return entry[0]
