"""When a turn that waits would write its first token, as far as its queue tells. Pure arithmetic.

Prompts are read in the steps that decodes leave room in, and seats and pages come from turns that end.
Objective: to know before anything is computed whether a promise can be kept. Where nobody can know (how
long others will write), it errs to the side of the turn: it is believed to be in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Of prompts: what must be computed, and what the turns need to run."""

    tokens: float = 0.0
    seconds: float = 0.0  # predicted, without what every step takes
    turns: float = 0.0
    blocks: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.turns + other.turns,
            self.blocks + other.blocks,
        )

    def part(self, share: float) -> Work:
        return Work(self.tokens * share, self.seconds * share, self.turns * share, self.blocks * share)


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast prompts are read now."""

    overhead: float  # seconds that a step takes without them
    tokens: int  # of them in a step, at least 1
    seconds: float = math.inf  # of them in a step, above 0; inf: steps may be long

    def reading(self, work: Work, *, busy: bool = False) -> float:
        """Seconds until so much has been read. busy: others fill what it leaves of a step."""
        return self.takes(work.tokens, work.seconds, busy=busy)

    def takes(self, tokens: float, seconds: float, *, busy: bool) -> float:
        steps = math.ceil(tokens / self.tokens)
        if self.seconds < math.inf:
            steps = max(steps, math.ceil(min(seconds / self.seconds, 1e12)))
        if busy and tokens:
            full = min(seconds / tokens * self.tokens, self.seconds)
            seconds = max(seconds, steps * full)
        return seconds + steps * self.overhead


@dataclass(frozen=True, slots=True)
class Room:
    """What turns that run hold, and how soon they make room."""

    seats: int  # free
    blocks: int  # free, or to be had
    running: int
    held: int  # blocks of those that run
    lasting: float  # seconds that a turn writes for, on average; 0: not known

    def wait(self, needed: Work) -> float:
        """Seconds until there is room for so much, turns ending evenly."""
        if not self.running or not self.lasting:
            return 0.0
        ends = max(needed.turns - self.seats, 0.0)
        if needed.blocks > self.blocks and self.held:
            ends = max(ends, (needed.blocks - self.blocks) * self.running / self.held)
        return ends * self.lasting / self.running


def ahead_of(own: Work, others: Iterable[tuple[float, Work]]) -> Work:
    """What of other tenants' work is done before a tenant's own is, in a weighted share: all of it, or as
    much as goes to them meanwhile (generalised processor sharing; Parekh and Gallager 1993).

    others: each with its weight by this tenant's."""
    total = NOTHING
    for weight, work in others:
        meanwhile = weight * own.seconds
        total += work.part(1.0 if work.seconds <= meanwhile else meanwhile / work.seconds)
    return total


def first_token(own: Work, ahead: Work, pace: Pace, room: Room) -> float:
    """Predicted seconds until a turn that asks for `own`, behind `ahead`, has its first token."""
    busy = ahead.tokens > 0
    together = pace.reading(ahead + own, busy=busy)
    return max(together, room.wait(ahead + own) + pace.reading(own, busy=busy))
