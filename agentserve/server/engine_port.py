"""The engine as the HTTP side sees it: turns go in, events come out.

One implementation speaks to worker processes; tests use a scripted one. A worker's death never
shows here: its running turns go on elsewhere and `Token.index` stays continuous.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from agentserve.messages import (
    Decisions,
    Devalue,
    Hello,
    Hint,
    Park,
    SessionView,
    StateChange,
    Submit,
    TiersView,
    Token,
    ToolSignal,
    TurnEnded,
    WorkerView,
)
from agentserve.types import SessionId, TurnId

TurnEvent = StateChange | Token | TurnEnded
News = Hint | ToolSignal | Devalue
WORKER_LOST = "worker lost"  # the reason of a turn's change of state where its worker died
Hear = Callable[[Decisions], None]


class EngineDown(Exception):
    """No worker can take a turn, and none will come back; the message is one line for the client."""


class FleetView(msgspec.Struct, frozen=True):
    """What all workers report, one `WorkerView` each; `session` when one was asked for and is known.
    `ages`: by worker, seconds since it told."""

    workers: tuple[WorkerView, ...]
    session: SessionView | None = None
    ages: Mapping[int, float] = {}


class SeenSession(msgspec.Struct, frozen=True):
    """A session as its worker told of it `at` (monotonic seconds; None, as the view: it never did). old: its
    worker did not answer now."""

    view: SessionView | None
    at: float | None
    old: bool = False


class Silence(msgspec.Struct, frozen=True):
    """A worker that has had something to say or to do `since` (monotonic seconds), and said nothing."""

    worker: int
    since: float


class FleetHealth(msgspec.Struct, frozen=True):
    """places: workers that there should be. serving: those that live and can be counted on."""

    places: int
    serving: int
    silent: tuple[Silence, ...] = ()


class TierReport(msgspec.Struct, frozen=True):
    """The tiers below one worker's device, as it last reported them."""

    worker: int
    view: TiersView
    disk_failing_since: float | None = None  # monotonic seconds


class TurnStream(Protocol):
    """The events of one turn, in order; ends after its `TurnEnded`."""

    def __aiter__(self) -> AsyncIterator[TurnEvent]: ...


class Engine(Protocol):
    """All calls are made on the event loop and none blocks it."""

    @property
    def hello(self) -> Hello:
        """Facts of the model, as the first worker reported them."""
        ...

    @property
    def alive(self) -> int:
        """How many workers can take a turn now."""
        ...

    def submit(self, command: Submit) -> TurnStream:
        """Begin a turn on the session's worker, else on the least loaded.

        While none lives but one will come back the turn waits; `EngineDown` if none will.
        """
        ...

    def abort(self, session: SessionId, turn: TurnId) -> None:
        """End a turn and roll it back. A turn that is over or unknown is ignored."""
        ...

    def park(self, command: Park) -> None:
        """Say what an ended turn means: a wait for tools, or an idle session; with all that its client has
        said and that still holds."""
        ...

    def holds(self, session: SessionId) -> bool:
        """Whether a worker that lives knows the session."""
        ...

    def on_decisions(self, hear: Hear) -> None:
        """Call `hear` with decisions about sessions at rest that are news, from now on. It must not raise,
        nor take long."""
        ...

    def tell(self, news: News) -> None:
        """Pass on what helps the session's worker to decide. Nobody relies on its arrival."""
        ...

    def fork(self, session: SessionId, child: SessionId, length: int) -> None:
        """Open `child` on the first `length` tokens of `session`, on the same worker."""
        ...

    def close(self, session: SessionId) -> None:
        """Forget a session everywhere. Idempotent."""
        ...

    async def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """Make a compiled grammar known on every worker, also on those started later."""
        ...

    async def describe(self, session: SessionId | None = None) -> FleetView:
        """Of workers that do not answer within a moment, what they last reported."""
        ...

    async def describe_sessions(self, sessions: Sequence[SessionId]) -> dict[SessionId, SeenSession]:
        """Those that a worker should know; of a worker that does not answer, what it last told."""
        ...

    def health(self) -> FleetHealth:
        """As far as it is known now; waits for nobody."""
        ...

    def tiers(self) -> tuple[TierReport, ...]:
        """As last reported: asks nobody. Empty where there are no tiers below the device."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached pages no running turn uses; False when some worker did not answer."""
        ...
