"""What a scheduling policy is: an order of turns, and the form of a step.

The scheduler owns the queues, the limits and the plan. A policy says who goes first (`Order`) and what a
step looks like (`Form`), names the objective that it serves, and must not starve: whoever waits moves up
with time, whatever else arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from agentserve.core.session import Session


class Reserve(Enum):
    """What must be free for a turn to enter."""

    INPUT = "input"  # all of its input that has no KV
    OUTPUT = "output"  # its input and all that it may write, for it and for all that run (ORCA)


@dataclass(frozen=True, slots=True)
class Form:
    """What a step may look like."""

    chunked: bool = True  # prompts are cut to what a step has left; else they run whole, one per step if long
    decodes_ride: bool = True  # decodes run beside prefill; else prefill goes first, alone
    reserve: Reserve = Reserve.INPUT
    short_first: bool = False  # prompts that one step can finish, before longer ones; room is kept for them
    keeps_deadlines: bool = False  # chunks are cut so that no token that can be in time is late
    shares: bool = False  # a tenant's turns wait for their tenant's share of the machine, not for everybody's
    victims_by_price: bool = False  # of those who may be preempted, by price (core/victims.py); else the last
    displaces: bool = False  # who stands first in line may take the seat of who stands last among the running


class Outlook(Protocol):
    """What an order may ask about a turn that waits."""

    def lacking(self, session: Session) -> int:
        """Tokens that must be computed before it can write."""
        ...

    def cached(self, session: Session) -> int:
        """Leading tokens that have KV on the device now."""
        ...

    def seconds(self, session: Session) -> float:
        """Predicted seconds of computing what it lacks, alone."""
        ...

    def ranked(self, waiting: Sequence[Session], now: float) -> list[Session]:
        """As the tiers would admit them."""
        ...


class Ran(msgspec.Struct, frozen=True, gc=False):
    """What a step did for one turn."""

    session: Session
    read: int  # tokens of input that were computed
    written: int  # tokens that were sampled


class Order(Protocol):
    """Who is served next. An index over the turns that the scheduler says wait and run.

    Whose order says nothing of turns that run inherits what is said of them here.
    """

    def entered(self, session: Session, now: float) -> None:
        """Its turn waits: it has arrived, or was preempted."""
        ...

    def left(self, session: Session, now: float) -> None:
        """It waits no more: it was admitted, or is over."""
        ...

    def line(self, now: float) -> Iterator[Session]:
        """Turns that wait, in the order in which they should enter. Drawn only as far as there is room."""
        ...

    def standing(self, running: Sequence[Session], now: float) -> Sequence[Session]:
        """Turns that run, most deserving first: who needs pages takes them from those behind it."""
        return running

    def outranks(self, waiting: Session, running: Session) -> bool:
        """Whether the first may take the seat and the pages of the second. Asked where `Form.displaces`."""
        return False

    def stepped(self, ran: Sequence[Ran], seconds: float, now: float) -> None:
        """A step of so many seconds has run."""
        return

    def ended(self, session: Session, now: float) -> None:
        """Its turn is over."""
        return


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    name: str
    objective: str
    form: Form
    order: Order
