"""Skip-join multi-level feedback queues, and who is swapped out (FastServe, NSDI 2026; arXiv 2305.05920).

Objective: short mean completion times without knowing how long a turn will run. A turn joins at the
level whose quantum covers its first step, so that a long prompt does not pass through all levels above;
who has used up a quantum goes one level down; who has waited for `patience` goes to the top. We follow
the paper's rule: aging is in time, not in iterations, and a turn that moves goes to the end of its level.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import msgspec


class FeedbackSettings(msgspec.Struct, frozen=True, kw_only=True):
    quantum: float = 0.010  # seconds of service at the top level; each level below has twice as much
    patience: float = 0.300  # seconds of waiting after which a turn goes to the top ("alpha")
    levels: int = 16

    def __post_init__(self) -> None:
        if not (self.quantum > 0 and self.patience > 0 and self.levels >= 1):
            raise ValueError("feedback queues need a quantum, a patience and at least one level")

    def quantum_of(self, level: int) -> float:
        return math.ldexp(self.quantum, level)

    def joins_at(self, first_step: float) -> int:
        """The first level whose quantum covers a step of so many seconds."""
        level = 0
        while level < self.levels - 1 and self.quantum_of(level) < first_step:
            level += 1
        return level


@dataclass(slots=True)
class Standing:
    """Where a turn stands."""

    level: int
    used: float  # seconds of its quantum
    since: float  # when it last ran, or arrived
    order: int  # smaller came to its level earlier


class FeedbackQueues:
    """Levels of turns, by any key."""

    def __init__(self, settings: FeedbackSettings) -> None:
        self.settings = settings
        self._turns: dict[Hashable, Standing] = {}
        self._population = [0] * settings.levels
        self._moves = 0

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, turn: Hashable, first_step: float, now: float) -> None:
        """first_step: predicted seconds of its prefill."""
        self.leave(turn)
        standing = Standing(self.settings.joins_at(first_step), 0.0, now, self._next())
        self._turns[turn] = standing
        self._population[standing.level] += 1

    def leave(self, turn: Hashable) -> None:
        standing = self._turns.pop(turn, None)
        if standing is not None:
            self._population[standing.level] -= 1

    def level(self, turn: Hashable) -> int:
        return self._turns[turn].level

    def rank(self, turn: Hashable) -> tuple[int, int]:
        """Smaller goes first."""
        standing = self._turns[turn]
        return standing.level, standing.order

    def ran(self, turn: Hashable, seconds: float, now: float) -> None:
        """It took part in a step. A quantum that is used up moves it down, whose rest is not carried over."""
        standing = self._turns.get(turn)
        if standing is None:
            return
        standing.since = now
        standing.used += seconds
        if standing.used >= self.settings.quantum_of(standing.level):
            self._move(standing, min(standing.level + 1, self.settings.levels - 1))

    def age(self, now: float) -> None:
        """Turns that have waited for too long go to the top, in the order in which they came."""
        due = [s for s in self._turns.values() if s.level and now - s.since >= self.settings.patience]
        for standing in sorted(due, key=lambda s: (s.since, s.order)):
            standing.since = now
            self._move(standing, 0)

    def next_in(self, turn: Hashable, running: int, now: float) -> float:
        """Estimated seconds until it is scheduled next (ENST): the sooner of its promotion and of the time
        that those above it still spend there. running: turns that run at a time."""
        standing = self._turns[turn]
        promotion = max(0.0, self.settings.patience - (now - standing.since))
        return min(promotion, self._ahead_of(standing) / max(running, 1))

    def _ahead_of(self, standing: Standing) -> float:
        """Seconds that turns of higher levels spend before they have sunk to its own."""
        above = seconds = 0.0
        for level in range(standing.level):
            above += self._population[level]  # these, and who sinks to here from above, spend this quantum
            seconds += above * self.settings.quantum_of(level)
        return seconds

    def swap_order(self, turns: Iterable[Hashable], running: int, now: float) -> list[Hashable]:
        """Whom to swap out first: who is needed last. The reverse is the order to bring back."""

        def place(turn: Hashable) -> tuple[float, int, int]:
            level, order = self.rank(turn)
            return -self.next_in(turn, running, now), -level, -order

        return sorted(turns, key=place)

    def _move(self, standing: Standing, level: int) -> None:
        self._population[standing.level] -= 1
        self._population[level] += 1
        standing.level, standing.used, standing.order = level, 0.0, self._next()

    def _next(self) -> int:
        self._moves += 1
        return self._moves
