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
from heapq import heappop, heappush
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T", bound=Hashable)


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


@dataclass(slots=True, eq=False)
class Standing(Generic[T]):
    """Where a turn stands."""

    turn: T
    level: int
    since: float  # when it last ran, or arrived
    order: int  # smaller came to its level earlier
    used: float = 0.0  # seconds of its quantum
    watched: bool = False  # it will be looked at when it may have waited for too long


class FeedbackQueues(Generic[T]):
    """Levels of turns, by any key. A step costs a look at each turn that ran, whoever else waits."""

    def __init__(self, settings: FeedbackSettings) -> None:
        self.settings = settings
        self._turns: dict[T, Standing[T]] = {}
        self._quanta = [settings.quantum_of(level) for level in range(settings.levels)]
        self._population = [0] * settings.levels
        self._moves = 0
        # Turns below the top with a time at which they had last run, the earliest first. They may have run
        # since: that is found out when they seem to be due.
        self._watched: list[tuple[float, int, Standing[T]]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, turn: T, first_step: float, now: float) -> None:
        """first_step: predicted seconds of its prefill."""
        self.leave(turn)
        standing = Standing(turn, self.settings.joins_at(first_step), now, self._next())
        self._turns[turn] = standing
        self._population[standing.level] += 1
        self._watch(standing)

    def leave(self, turn: T) -> None:
        standing = self._turns.pop(turn, None)
        if standing is not None:
            self._population[standing.level] -= 1

    def level(self, turn: T) -> int:
        return self._turns[turn].level

    def rank(self, turn: T) -> tuple[int, int]:
        """Smaller goes first."""
        standing = self._turns[turn]
        return standing.level, standing.order

    def ran(self, turn: T, seconds: float, now: float) -> None:
        """It took part in a step. A quantum that is used up moves it down, whose rest is not carried over."""
        standing = self._turns.get(turn)
        if standing is None:
            return
        standing.since = now
        standing.used += seconds
        if standing.used >= self._quanta[standing.level]:
            self._move(standing, min(standing.level + 1, self.settings.levels - 1))

    def age(self, now: float) -> list[T]:
        """Turns that have waited for too long go to the top, in the order in which they came. These."""
        due: list[Standing[T]] = []
        while self._watched and now - self._watched[0][0] >= self.settings.patience:
            since, _, standing = heappop(self._watched)
            standing.watched = False
            if self._turns.get(standing.turn) is not standing:
                continue
            if standing.since > since:
                self._watch(standing)
            elif standing.level:
                due.append(standing)
        for standing in sorted(due, key=lambda s: (s.since, s.order)):
            standing.since = now
            self._move(standing, 0)
        return [standing.turn for standing in due]

    def _watch(self, standing: Standing[T]) -> None:
        if standing.level and not standing.watched:
            standing.watched = True
            heappush(self._watched, (standing.since, standing.order, standing))

    def next_in(self, turn: T, running: int, now: float) -> float:
        """Estimated seconds until it is scheduled next (ENST): the sooner of its promotion and of the time
        that those above it still spend there. running: turns that run at a time."""
        standing = self._turns[turn]
        return self._next_in(standing.level, standing.since, self._ahead(), running, now)

    def _next_in(self, level: int, since: float, ahead: list[float], running: int, now: float) -> float:
        promotion = max(0.0, self.settings.patience - (now - since))
        return min(promotion, ahead[level] / max(running, 1))

    def _ahead(self) -> list[float]:
        """By level: seconds that turns of higher levels spend before they have sunk to it."""
        found, above, seconds = [], 0, 0.0
        for population, quantum in zip(self._population, self._quanta, strict=True):
            found.append(seconds)
            above += population  # these, and who sinks to here from above, spend this quantum
            seconds += above * quantum
        return found

    def swap_order(self, turns: Iterable[T], running: int, now: float) -> list[T]:
        """Whom to swap out first: who is needed last, and of these, who is lowest and came there last. The
        reverse is the order to bring back. Turns of one level that ran together are needed together: there
        are many turns and few such groups."""
        together: dict[tuple[int, float], list[tuple[int, T]]] = {}
        for turn in turns:
            standing = self._turns[turn]
            together.setdefault((standing.level, standing.since), []).append((standing.order, turn))
        ahead = self._ahead()
        places: dict[tuple[float, int], list[tuple[int, T]]] = {}
        for (level, since), group in together.items():
            places.setdefault((self._next_in(level, since, ahead, running, now), level), []).extend(group)
        return [
            turn
            for _, group in sorted(places.items(), key=lambda place: place[0], reverse=True)
            for _, turn in sorted(group, key=lambda entry: entry[0], reverse=True)
        ]

    def _move(self, standing: Standing[T], level: int) -> None:
        self._population[standing.level] -= 1
        self._population[level] += 1
        standing.level, standing.used, standing.order = level, 0.0, self._next()
        self._watch(standing)

    def _next(self) -> int:
        self._moves += 1
        return self._moves
