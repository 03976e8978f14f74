"""One worker's place in the fleet: who holds it now, how often it died, what it last reported."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from agentserve.messages import Command, WorkerView
from agentserve.server.workers.supervisor import WorkerProcess

_GAUGES = ("running", "waiting", "sessions", "pages_cached", "pages_live")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a dead worker is replaced, and when to stop trying. Seconds."""

    first_pause: float = 0.1
    longest_pause: float = 10.0
    quick: float = 30.0  # a worker that lived shorter died quickly
    attempts: int = 5  # quick deaths in a row, failed starts included


class Slot:
    """A place for one worker; the fleet is its only user."""

    def __init__(self, index: int, policy: RestartPolicy) -> None:
        self.index = index
        self.worker: WorkerProcess | None = None
        self.last_view: WorkerView | None = None
        self.quick_deaths = 0
        self.given_up = False
        self.unanswered = False  # it was asked something since it last answered
        self._policy = policy
        self._since = 0.0

    @property
    def pages_live(self) -> int:
        return self.last_view.pages_live if self.last_view is not None else 0

    def up(self, worker: WorkerProcess, now: float) -> None:
        self.worker = worker
        self.unanswered = False
        self._since = now

    def down(self, now: float) -> None:
        """Its worker is gone, and with it its load."""
        self.worker = None
        self.quick_deaths = self.quick_deaths + 1 if now - self._since < self._policy.quick else 1
        if self.last_view is not None:
            cleared = dict.fromkeys(_GAUGES, 0)
            self.last_view = msgspec.structs.replace(
                self.last_view, pages_free=self.last_view.pages, **cleared
            )

    def failed_start(self) -> None:
        self.quick_deaths += 1

    def next_pause(self) -> float | None:
        """Seconds until the next start; None, for good, when there were too many quick deaths."""
        if self.quick_deaths >= self._policy.attempts:
            self.given_up = True
            return None
        pause: float = self._policy.first_pause * 2.0 ** max(0, self.quick_deaths - 1)
        return min(self._policy.longest_pause, pause)

    def send(self, command: Command) -> None:
        if self.worker is not None:
            self.worker.send(command)
