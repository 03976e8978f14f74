"""Whether an endpoint that keeps failing is tried at all.

Closed: attempts go on. Open: none, until a moment. Half open: one attempt at a time, whose end decides.
A receiver that only has too much to do is paused, which is no failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """`failures` in a row open it, for `cooldown` seconds, then for twice as long each time, up to `most`."""

    failures: int = 5
    cooldown: float = 10.0
    most: float = 600.0


class Breaker:
    """Of one endpoint. Every method is told the time, in seconds. What it knows, a restart forgets: then the
    endpoint is tried anew."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._failures = 0  # in a row
        self._opens = 0  # in a row, without a success between
        self._until: float | None = None  # it is open, or half open from then on
        self._paused = 0.0
        self._tickets = 0
        self._probe: int | None = None  # the ticket of the one attempt that decides

    def circuit(self, now: float) -> Circuit:
        if self._until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._until else Circuit.HALF_OPEN

    def ready_at(self, now: float) -> float | None:
        """When an attempt may begin: `now`, or later; None: when the one that decides has ended."""
        if self._probe is not None:
            return None
        return max(now, self._paused, self._until or 0.0)

    def began(self, now: float) -> int:
        """An attempt begins; `ready_at` said so. The ticket to end it with."""
        self._tickets += 1
        if self.circuit(now) is Circuit.HALF_OPEN:
            self._probe = self._tickets
        return self._tickets

    def succeeded(self, ticket: int) -> None:
        """Also an attempt that began before it opened: the endpoint works."""
        self._failures = self._opens = 0
        self._until = self._probe = None

    def failed(self, ticket: int, now: float) -> None:
        if self._until is not None:
            if ticket != self._probe:
                return  # it began before this opened, and says nothing new
            self._probe = None
            self._open(now)
            return
        self._failures += 1
        if self._failures >= self._settings.failures:
            self._open(now)

    def paused(self, ticket: int, until: float) -> None:
        """The receiver is there and says when to come back."""
        self.succeeded(ticket)
        self.pause(until)

    def pause(self, until: float) -> None:
        self._paused = max(self._paused, until)

    def reset(self) -> None:
        """The endpoint was changed: it is tried anew."""
        self._failures = self._opens = 0
        self._until = self._probe = None
        self._paused = 0.0

    def cancelled(self, ticket: int) -> None:
        """It says nothing about the endpoint."""
        if ticket == self._probe:
            self._probe = None

    def _open(self, now: float) -> None:
        cooldown = self._settings.cooldown * 2.0 ** min(self._opens, 30)
        self._until = now + min(cooldown, self._settings.most)
        self._opens += 1
        self._failures = 0
