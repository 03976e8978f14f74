"""Decisions as news for whoever follows a session, few enough that they cost nobody anything.

A policy may look at a session a hundred times a second, and at thousands of sessions. Of one session
BURST decisions in WINDOW seconds are told, of all together EVERYBODY; what is left out is counted, and
stays in the session's own log (`Known.decisions`). Nothing is made where nothing is decided.
"""

from __future__ import annotations

from collections import deque

from agentserve.core.ledger import Known
from agentserve.messages import Decided, Decisions
from agentserve.types import SessionId

WINDOW = 10.0  # seconds
BURST = 8  # of one session
EVERYBODY = 1000  # of all sessions


class DecisionNews:
    """Filled as decisions are made, emptied with the core's events."""

    def __init__(self) -> None:
        self._made: list[tuple[SessionId, int, Decided]] = []
        self._told: deque[float] = deque(maxlen=EVERYBODY)  # when

    def add(self, known: Known, made: Decided) -> None:
        """A decision that changed something. Times do not run back."""
        since = made.at - WINDOW
        log = known.decisions
        often = len(log) > BURST and log[-1 - BURST].at > since
        if often or (len(self._told) == EVERYBODY and self._told[0] > since):
            known.untold += 1
            return
        self._told.append(made.at)
        self._made.append((known.id, known.untold, made))
        known.untold = 0

    def take(self) -> Decisions | None:
        """What is to be told since the last call; None: nothing."""
        if not self._made:
            return None
        made, self._made = self._made, []
        return Decisions(tuple(made))
