"""One policy, one machine, one trace: the server's own core in virtual time, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from agentserve.clock import VirtualClock
from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan, StepResult
from agentserve.messages import Command, WorkerView
from agentserve.sim.hardware import Hardware
from agentserve.sim.shootout.machine import TimedExecutor, VirtualMover
from agentserve.sim.traces.players import Players
from agentserve.sim.traces.record import Played, percentile
from agentserve.types import FinishReason
from tiering.types import Change, Transfer, TransferDone

VOCAB_SIZE = 32_000
PATIENCE = 600.0  # virtual seconds without a step, while turns want one: a wedge
IDLE_ROUNDS = 10_000  # rounds in which neither time nor work moved: a wedge
SAMPLE_STEPS = 32  # how often the demand for KV is looked at


class Core(Protocol):
    """The engine core with its tiers, as a driver sees it."""

    def handle(self, command: Command, now: float) -> None: ...
    def begin_step(self, now: float) -> Plan | None: ...
    def finish_step(self, result: StepResult, now: float) -> None: ...
    def take_events(self) -> list[CoreEvent]: ...
    def take_transfers(self) -> list[Transfer]: ...
    def take_changes(self) -> list[Change]: ...
    def finish_transfers(self, done: Sequence[TransferDone], now: float) -> None: ...
    def next_timer(self) -> float | None: ...
    def tick(self, now: float) -> None: ...
    def view(self) -> WorkerView: ...
    def check(self) -> None: ...
    @property
    def has_work(self) -> bool: ...


class Outcome(msgspec.Struct, frozen=True):
    """What one run came to. Counts and times are of turns that ended between warm-up and horizon, but for
    `moved`, `steps` and `wedged`, which are of the whole run."""

    turns: int
    turns_per_second: float
    resume_ttft_p50: float
    resume_ttft_p95: float
    first_ttft_p50: float
    recomputed: int  # prompt and generated tokens that were computed a second time
    computed: int
    preemptions: int
    moved: dict[str, int]  # bytes by move
    oversubscribed: float  # contexts alive over the device pool, averaged
    steps: int
    failed: int  # turns that were refused or broke
    wedged: str = ""  # why the run stood still, or what was held when all had ended; empty: neither


class World:
    """A run. `core` and `players` are fresh; the machine's clock starts at 0."""

    def __init__(self, hardware: Hardware, core: Core, players: Players) -> None:
        self.core = core
        self.players = players
        self._hardware = hardware
        self._executor = TimedExecutor(hardware, VOCAB_SIZE)
        self._mover = VirtualMover(hardware)
        self._clock = VirtualClock()
        self._steps = 0
        self._demand: list[int] = []
        self._idle_rounds = 0
        self._last_step = 0.0

    def run(self, warm_up: float, horizon: float) -> Outcome:
        """Play until `horizon` (virtual seconds), let the turns that run then end, and count.

        Raises AssertionError if the core's own invariants are broken afterwards: host slots, disk bytes and
        pins agree with the transfers in flight, of which there are none then.
        """
        wedged = self._play(lambda: self._clock.now() >= horizon)
        self.players.stop()
        wedged = wedged or self._play(lambda: not self.core.has_work)
        wedged = wedged or self._settle()
        return self._outcome(warm_up, horizon, wedged)

    # --- time ---------------------------------------------------------------------------------

    def _play(self, enough: Callable[[], bool]) -> str:
        """Until `enough`, or until nothing moves any more: then why."""
        while not enough():
            now = self._clock.now()
            self._exchange(now)
            if self.core.has_work and self._step(now):
                continue
            if self.core.has_work and now - self._last_step > PATIENCE:
                return f"at {now:.1f} s: no step for {PATIENCE:.0f} s, though turns want one"
            times = (self.players.next_due(), self._mover.next_done(), self.core.next_timer())
            when = min((time for time in times if time is not None), default=None)
            if when is None:
                return f"at {now:.1f} s: turns wait, and nothing will happen" if self.core.has_work else ""
            self._idle_rounds = self._idle_rounds + 1 if when <= now else 0
            if self._idle_rounds > IDLE_ROUNDS:
                return f"at {now:.1f} s: time stands still"
            if not self.core.has_work:
                self._last_step = max(now, when)
            self._clock.advance_to(max(now, when))
        return ""

    def _exchange(self, now: float) -> None:
        """All that comes and goes between steps."""
        for command in self.players.due(now):
            self.core.handle(command, now)
        done = self._mover.done_by(now)
        if done:
            self.core.finish_transfers(done, now)
        timer = self.core.next_timer()
        if timer is not None and timer <= now:
            self.core.tick(now)
        self._events(now)

    def _events(self, now: float) -> None:
        for event in self.core.take_events():
            self.players.heard(event, now)
        for command in self.players.due(now):  # a turn's end is parked before anything else is planned
            self.core.handle(command, now)
        self._order(now)

    def _order(self, now: float) -> None:
        self._mover.submit(self.core.take_transfers(), now)
        self._mover.change(self.core.take_changes())

    def _step(self, now: float) -> bool:
        plan = self.core.begin_step(now)
        self._order(now)
        if plan is None:
            return False
        result = self._executor.run(plan)
        self._clock.advance_to(now + result.seconds)
        self._last_step = self._clock.now()
        self._idle_rounds = 0
        self.core.finish_step(result, self._clock.now())
        self._events(self._clock.now())
        if self._steps % SAMPLE_STEPS == 0:
            self._demand.append(self.players.live_tokens)
        self._steps += 1
        return True

    def _settle(self) -> str:
        """Nothing is owed to anybody: what is moved ends, and nothing is held any more; else what is."""
        while (when := self._mover.next_done()) is not None:
            self._clock.advance_to(max(when, self._clock.now()))
            self.core.finish_transfers(self._mover.done_by(self._clock.now()), self._clock.now())
            self._order(self._clock.now())
        self.core.check()
        view = self.core.view()
        held = {"live pages": view.pages_live, "waiting turns": view.waiting, "running turns": view.running}
        if view.tiers is not None:
            held |= {"blocks that move": view.tiers.moving, "pages that these pin": view.tiers.pinned}
        left = [f"{number} {what}" for what, number in held.items() if number]
        return f"left at the end: {', '.join(left)}" if left else ""

    # --- what came of it ------------------------------------------------------------------------

    def _outcome(self, warm_up: float, horizon: float, wedged: str) -> Outcome:
        counted = [turn for turn in self.players.played if warm_up <= turn.ended < horizon]
        good = [turn for turn in counted if turn.reason in (FinishReason.STOP, FinishReason.LENGTH)]
        resumes = [turn.ttft for turn in good if turn.resumed]
        size = self._hardware.block_bytes
        return Outcome(
            turns=len(good),
            turns_per_second=len(good) / (horizon - warm_up),
            resume_ttft_p50=percentile(resumes, 0.5),
            resume_ttft_p95=percentile(resumes, 0.95),
            first_ttft_p50=percentile([turn.ttft for turn in good if not turn.resumed], 0.5),
            recomputed=_sum(good, lambda turn: turn.recomputed),
            computed=_sum(good, lambda turn: turn.computed),
            preemptions=_sum(good, lambda turn: turn.preemptions),
            moved={move.value: blocks * size for move, blocks in self._mover.blocks.items()},
            oversubscribed=sum(self._demand) / max(1, len(self._demand)) / self._hardware.pool_tokens,
            steps=self._steps,
            failed=len(self.players.refused),
            wedged=wedged,
        )


def _sum(turns: Sequence[Played], what: Callable[[Played], int]) -> int:
    return sum(what(turn) for turn in turns)
