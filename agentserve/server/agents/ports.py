"""What the loop needs of the server around it: a session's line of turns, and somebody to tell."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from agentserve.server.agents.fold import Step
from agentserve.server.agents.history import History
from agentserve.server.agents.records import AgentConfig, Failure, Happened, Item, Output, Turn
from agentserve.server.sessions.session_record import PendingCall
from agentserve.server.sessions.turns import Piece
from agentserve.server.text_port import JsonObject


class Generation(Protocol):
    """One model call whose turn is leased."""

    @property
    def number(self) -> int:
        """Of the session's turn."""
        ...

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]: ...

    def rollback(self) -> None:
        """Undo what was never begun. Idempotent."""
        ...


class NotYet(Exception):
    """A call has no result after all: what took it could not be kept."""


class Line(Protocol):
    """The session of the directory that an agent session is."""

    def pending(self) -> Sequence[PendingCall]:
        """Calls of its last turn, in call order."""
        ...

    def held(self) -> Mapping[str, Output]:
        """Results that were taken for them, and cannot be lost."""
        ...

    @property
    def forgotten(self) -> bool:
        """The directory had no room for the session: results are on disk once they are items."""
        ...

    async def begin(self, config: AgentConfig, messages: Sequence[JsonObject], *, first: bool) -> Generation:
        """Lease the next turn: the history, the held results in call order (calls without one were
        cancelled), `messages`. `first`: of an agent's turn; else NotYet where a result is missing."""
        ...

    async def hold(self, results: Mapping[str, Output]) -> object:
        """Take results, all or none; on disk when it returns. For `give_back`. Raises what does not fit."""
        ...

    def give_back(self, before: object) -> None: ...

    def replace(self, call: str, output: Output) -> None:
        """Another result for a call that has one, before its turn begins."""
        ...

    def committed_reply(self) -> tuple[int, JsonObject, bool] | None:
        """The number of the last committed turn, and its message with the calls that are to be run; whether
        there were no others, which there are where it was cut."""
        ...

    def stop_waiting(self, reason: str) -> None:
        """Nobody takes an interest in the pending calls any more."""
        ...

    def expect(self, seconds: float) -> None:
        """All results will be there by then."""
        ...

    def explain(self, error: Exception) -> Failure | None:
        """None: it is a fault of ours."""
        ...


class Teller(Protocol):
    """Hears what happens in sessions, in order."""

    def turn_created(self, history: History, turn: Turn) -> None: ...

    def in_progress(self, history: History, turn: Turn, *, again: bool = False) -> None: ...

    def requires_action(self, history: History) -> None: ...

    def ended(self, history: History, turn: Turn) -> None:
        """The turn is over, and the session idle."""
        ...

    def wants(self, history: History, event: Happened) -> bool:
        """Somebody beyond this server is to be told of it."""
        ...

    def steps(self, history: History, turn: Turn, steps: Sequence[Step]) -> None: ...

    def added(self, history: History, turn: Turn, item: Item) -> None:
        """What the agent did not say."""
        ...

    def call_done(self, history: History, turn: Turn, call: str) -> None:
        """A call has its result, or will get none."""
        ...
