"""One worker's place in the fleet: who holds it now, how often it died, what it last reported."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from agentserve.messages import (
    AheadCounts,
    Command,
    PreemptionCounts,
    PromiseCounts,
    RunCounts,
    TiersView,
    WorkerView,
)
from agentserve.server.workers.supervisor import WorkerProcess
from agentserve.server.workers.tally import added, carried, ended, summed

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
        self.disk_failing_since: float | None = None
        # Of the workers before this one:
        self._counted: TiersView | None = None
        self._ahead = AheadCounts()
        self._unrecorded = 0
        self._promises = PromiseCounts()
        self._preempted = PreemptionCounts()
        self._runs = RunCounts()
        self.quick_deaths = 0
        self.given_up = False
        self.unanswered = False  # it was asked something since it last answered
        self.heard_at = 0.0  # when it last said something, or began
        self.owed_at = 0.0  # when it was last given something to answer or to do, having had nothing
        self._policy = policy
        self._since = 0.0

    @property
    def pages_live(self) -> int:
        return self.last_view.pages_live if self.last_view is not None else 0

    @property
    def view(self) -> WorkerView | None:
        """What it last reported, its counters those of all workers that were here."""
        last = self.last_view
        if last is None:
            return None
        tiers = carried(self._counted, last.tiers)
        return msgspec.structs.replace(
            last,
            tiers=tiers,
            ahead=added(self._ahead, last.ahead),
            promises=added(self._promises, last.promises),
            preempted=summed(self._preempted, last.preempted),
            runs=added(self._runs, last.runs),
            unrecorded=self._unrecorded + last.unrecorded,
        )

    def report(self, view: WorkerView, now: float) -> None:
        """Its worker says how it is."""
        self.last_view = view
        self.heard_at = now
        if view.tiers is None or not view.tiers.disk_error:
            self.disk_failing_since = None
        elif self.disk_failing_since is None:
            self.disk_failing_since = now

    def up(self, worker: WorkerProcess, now: float) -> None:
        self.worker = worker
        self.unanswered = False
        self._since = self.heard_at = now

    def down(self, now: float) -> None:
        """Its worker is gone, and with it its load."""
        self.worker = None
        self.quick_deaths = self.quick_deaths + 1 if now - self._since < self._policy.quick else 1
        self.disk_failing_since = None
        if self.last_view is not None:
            if self.last_view.tiers is not None:
                self._counted = carried(self._counted, ended(self.last_view.tiers))
            self._ahead = added(self._ahead, self.last_view.ahead)
            self._unrecorded += self.last_view.unrecorded
            self._promises = added(self._promises, self.last_view.promises)
            self._preempted = summed(self._preempted, self.last_view.preempted)
            self._runs = added(self._runs, self.last_view.runs)
            cleared = dict.fromkeys(_GAUGES, 0)
            self.last_view = msgspec.structs.replace(
                self.last_view,
                pages_free=self.last_view.pages,
                tiers=None,
                ahead=AheadCounts(),
                unrecorded=0,
                promises=PromiseCounts(),
                preempted=PreemptionCounts(),
                runs=RunCounts(),
                **cleared,
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
