"""Agents on the engine in this process: virtual tools that wait in real time, no HTTP between.

What the worker's loop does, without its socket: commands, transfers, a plan, its result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from agentserve.bench.agents.summary import Turn
from agentserve.clock import Clock
from agentserve.core.ports import Executor
from agentserve.messages import Token
from agentserve.sim.shootout.world import Core
from agentserve.sim.traces.players import Players
from agentserve.types import FinishReason
from tiering.types import Change, Transfer, TransferDone

NAP = 0.002  # seconds between looks while only copies are under way
LONG_NAP = 0.05


class Mover(Protocol):
    """Who moves blocks between the tiers of a real engine."""

    def submit(self, transfer: Transfer) -> None: ...
    def change(self, change: Change) -> None: ...
    def poll(self) -> list[TransferDone]: ...


class Standstill(RuntimeError):
    """Turns want a step, and none has come for a long time."""


class LiveRun:
    """One run, until all agents of `players` have left. Times are those of `clock`."""

    def __init__(
        self,
        core: Core,
        executor: Executor,
        players: Players,
        clock: Clock,
        mover: Mover | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = 120.0,
    ) -> None:
        self._core = core
        self._executor = executor
        self._players = players
        self._clock = clock
        self._mover = mover
        self._sleep = sleep
        self._patience = patience
        self._began = clock.now()
        self._last_step = self._began
        self._marks: dict[tuple[str, int], list[float]] = {}

    def run(self) -> tuple[list[Turn], float]:
        """The turns, and how many seconds all of it took. Raises Standstill."""
        while self._players.alive or self._players.next_due() is not None or self._core.has_work:
            self._exchange()
            if self._core.has_work and self._step():
                self._last_step = self._clock.now()
                continue
            self._rest()
        return self._turns(), self._clock.now() - self._began

    def _now(self) -> float:
        """Players count from 0, as in a simulation."""
        return self._clock.now() - self._began

    def _exchange(self) -> None:
        now = self._now()
        for command in self._players.due(now):
            self._core.handle(command, now)
        if self._mover is not None:
            done = self._mover.poll()
            if done:
                self._core.finish_transfers(done, now)
        timer = self._core.next_timer()
        if timer is not None and timer <= now:
            self._core.tick(now)
        self._events(now)

    def _events(self, now: float) -> None:
        for event in self._core.take_events():
            if isinstance(event, Token):
                self._marks.setdefault((event.session, event.turn), []).append(now)
            self._players.heard(event, now)
        for command in self._players.due(now):
            self._core.handle(command, now)
        self._hand_over()

    def _hand_over(self) -> None:
        self._order(self._core.take_transfers())
        for change in self._core.take_changes():
            if self._mover is not None:
                self._mover.change(change)

    def _order(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            if self._mover is None:
                raise ValueError("the core moves KV, but there is nobody to move it")
            self._mover.submit(transfer)

    def _step(self) -> bool:
        plan = self._core.begin_step(self._now())
        self._hand_over()
        if plan is None:
            return False
        self._core.finish_step(self._executor.run(plan), self._now())
        self._events(self._now())
        return True

    def _rest(self) -> None:
        """Nothing to compute: sleep until something is due, but not past a copy's end."""
        if self._core.has_work:
            if self._clock.now() - self._last_step > self._patience:
                raise Standstill(f"no step for {self._patience:.0f} s, though turns want one")
            self._sleep(NAP)
            return
        self._last_step = self._clock.now()
        due = (self._players.next_due(), self._core.next_timer())
        when = min((time for time in due if time is not None), default=self._now() + LONG_NAP)
        self._sleep(min(max(when - self._now(), 0.0), NAP if self._mover is not None else LONG_NAP))

    def _turns(self) -> list[Turn]:
        turns = []
        for played in self._players.played:
            if played.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                continue
            marks = self._marks.get((played.session, played.turn), [])
            turns.append(
                Turn(
                    resumed=played.resumed,
                    ttft=played.ttft,
                    seconds=played.ended - played.arrived,
                    prompt=played.prompt,
                    cached=played.cached,
                    generated=played.generated,
                    gaps=tuple(later - earlier for earlier, later in pairwise(marks)),
                )
            )
        return turns
