"""What clients will do, as a value: sessions with tenants, arrivals at unit rate, turns with waits.

Arrivals are kept at a mean rate of one session per second; `arrivals` stretches them to the rate that is
asked for. So every rate sees the same sessions in the same order with the same relative gaps, and a knee is
not moved by luck.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from agentserve.sim.traces.agents import Run


class TraceError(ValueError):
    """A trace that cannot be used; one line."""


class Turn(msgspec.Struct, frozen=True):
    """One request of a session: what is appended to its context, how much is generated, and the wait (s)
    from its end to the session's next request."""

    append: tuple[Run, ...]
    output: int
    wait: float = 0.0

    @property
    def fresh(self) -> int:
        """Tokens that it brings."""
        return sum(run.count for run in self.append)

    def tokens(self, vocab_size: int) -> array[int]:
        found = array("i")
        for run in self.append:
            found.extend(run.tokens(vocab_size))
        return found


class Session(msgspec.Struct, frozen=True):
    """One client's session; `arrives` in mean gaps between sessions. A plain request has one turn."""

    name: str
    tenant: str
    arrives: float
    turns: tuple[Turn, ...]
    kind: str = ""

    @property
    def longest(self) -> int:
        """Tokens of its context when it has ended."""
        return sum(turn.fresh + turn.output for turn in self.turns)


class Trace(msgspec.Struct, frozen=True):
    """A whole trace. `scale` is what all lengths were multiplied by: it stands beside every figure."""

    name: str
    sessions: tuple[Session, ...]
    weights: dict[str, float]  # shares of tenants beside each other
    scale: float = 1.0
    own_rate: float | None = None  # sessions per second as recorded; None: it has no arrivals of its own

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def longest(self) -> int:
        return max((session.longest for session in self.sessions), default=0)

    @property
    def digest(self) -> str:
        """Names the trace by what is in it."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]

    @property
    def title(self) -> str:
        return self.name if self.scale == 1.0 else f"{self.name}, lengths x {self.scale:g}"


def arrivals(trace: Trace, rate: float) -> list[float]:
    """When each session is meant to arrive, in seconds, at `rate` sessions per second on average."""
    if not rate > 0:
        raise TraceError(f"rate: expected above 0, got {rate:g}")
    return [session.arrives / rate for session in trace.sessions]


def at_unit_rate(times: list[float]) -> tuple[list[float], float | None]:
    """Ascending times as mean gaps from the first on, and the rate that they had; None: all at once."""
    if len(times) < 2 or times[-1] <= times[0]:
        return [0.0] * len(times), None
    rate = (len(times) - 1) / (times[-1] - times[0])
    return [(time - times[0]) * rate for time in times], rate


def scaled(length: int, scale: float) -> int:
    """A length times the factor, at least 1."""
    return max(1, round(length * scale))


def checked(trace: Trace) -> Trace:
    """The trace, if it can be played. Raises TraceError."""
    if not trace.sessions:
        raise TraceError(f"{trace.name}: no request in it")
    names = {session.name for session in trace.sessions}
    if len(names) != len(trace.sessions):
        raise TraceError(f"{trace.name}: two sessions have one name")
    for tenant, weight in trace.weights.items():
        if not 0 < weight < float("inf"):
            raise TraceError(f"weight of tenant {tenant}: expected above 0, got {weight:g}")
    return trace
