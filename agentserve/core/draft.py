"""A plan while it is being written, and who else writes in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload

from agentserve.core.cost import StepCost
from agentserve.core.plan import Chunk, PageCopy
from agentserve.core.scheduling.policy import Order
from agentserve.core.session import Session
from agentserve.core.timing.tally import Attention, Tally
from agentserve.types import SessionId


@dataclass(slots=True)
class Draft:
    """What is left of each limit, and what was granted so far."""

    tokens: int  # may fall below 0: a prompt that must run whole is longer than a step
    seconds: float | None  # that the step's bound may come to; None: any
    tally: Tally  # what there is in the step, for its time
    lagging: list[Session]  # who runs, by arrival, but for turns that decode: found once, as hundreds run
    copies: list[PageCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    reasons: list[tuple[SessionId, str]] = field(default_factory=list)
    admitted: list[Session] = field(default_factory=list)
    preempted: list[Session] = field(default_factory=list)
    prefill: bool = False  # a chunk of a prompt was granted

    def keep(self, tokens: int, seconds: float) -> None:
        """Set so much of the step aside; below 0: give it back."""
        self.tokens -= tokens
        if self.seconds is not None:
            self.seconds -= seconds


class Standing(Sequence[Session]):
    """Turns that run, most deserving first. They are put in order when somebody looks: in most steps nothing
    is short, and nobody does."""

    def __init__(self, order: Order, running: list[Session], now: float) -> None:
        self._order = order
        self._running = running
        self._now = now
        self._found: Sequence[Session] | None = None

    def _all(self) -> Sequence[Session]:
        if self._found is None:
            self._found = self._order.standing(tuple(self._running), self._now)
        return self._found

    @overload
    def __getitem__(self, index: int) -> Session: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Session]: ...
    def __getitem__(self, index: int | slice) -> Session | Sequence[Session]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


class Times(Protocol):
    """What is known of how long steps take."""

    @property
    def cost(self) -> StepCost:
        """What steps cost by now."""
        ...

    @property
    def attention(self) -> Attention: ...


class Gate(Protocol):
    """What admission asks of the tiers below."""

    def holds_up(self, session: Session, room: int, now: float) -> str:
        """Whether the session waits for KV to be loaded ("loading") or for room for it ("pages").
        room: blocks that it may count on. What is to be loaded is ordered."""
        ...

    def lacking(self, session: Session) -> int:
        """Tokens of a waiting session that have KV nowhere."""
        ...

    def ranked(self, waiting: Sequence[Session], now: float) -> list[Session]:
        """The order in which to admit."""
        ...

    def lined_up(self, waiting: Sequence[Session]) -> None:
        """The order in which they will enter, short turns first."""
        ...

    def admitted(self, session: Session, hit: int, now: float) -> None: ...


class Filler(Protocol):
    """What may use the rest of a step."""

    @property
    def wants(self) -> bool:
        """Whether there is anything to add to a plan."""
        ...

    def fill(self, draft: Draft) -> None:
        """Add chunks of sessions at rest, within what is left of each limit."""
        ...

    def admitted(self, session: Session, hit: int) -> None: ...
