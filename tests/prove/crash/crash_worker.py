"""The real worker, which kills itself where it is ordered to; run as a script: a folder with the orders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentserve.core.engine import CoreEvent
from agentserve.core.plan import Plan, StepResult
from agentserve.messages import Command, Fork, Park, Submit, Token
from agentserve.server.workers.build import build_engine
from agentserve.server.workers.exchange import Tiering
from agentserve.server.workers.spec import WorkerSpec
from agentserve.server.workers.worker_main import BuiltEngine, main
from tests.prove.crash.points import Trap
from tiering.types import Move, Transfer, TransferDone

_AFTER = {Submit: "plan.submitted", Park: "plan.parked", Fork: "plan.forked"}


class ArmedCore:
    """The engine core, as the worker's loop and its exchange call it."""

    def __init__(self, core: Any, mover: ArmedMover | None, trap: Trap) -> None:
        self._core = core
        self._mover = mover
        self._trap = trap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def handle(self, command: Command, now: float) -> None:
        self._core.handle(command, now)
        if (point := _AFTER.get(type(command))) is not None:
            self._trap.at(point)

    def begin_step(self, now: float) -> Plan | None:
        plan: Plan | None = self._core.begin_step(now)
        if plan is not None:
            self._trap.at("plan.before")
        return plan

    def finish_step(self, result: StepResult, now: float) -> None:
        self._trap.at("plan.ran")
        self._core.finish_step(result, now)
        self._trap.at("plan.finished")

    def take_events(self) -> list[CoreEvent]:
        events: list[CoreEvent] = self._core.take_events()
        if any(isinstance(event, Token) for event in events):
            self._trap.at("token.unsent")
        return events

    def finish_transfers(self, done: Sequence[TransferDone], now: float) -> None:
        self._core.finish_transfers(done, now)
        assert self._mover is not None
        if self._mover.restored:
            self._trap.at("plan.restored")


class ArmedMover:
    """The mover. A transfer is ordered, carried out and told; it may be cut off between any two."""

    def __init__(self, mover: Any, trap: Trap) -> None:
        self._mover = mover
        self._trap = trap
        self._moves: dict[int, Move] = {}
        self.restored = False  # what was polled last has brought something back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mover, name)

    def submit(self, transfer: Transfer) -> None:
        self._trap.at(f"{transfer.move.value}.before")
        self._moves[transfer.id] = transfer.move
        self._mover.submit(transfer)

    def poll(self) -> Sequence[TransferDone]:
        done: Sequence[TransferDone] = self._mover.poll()
        ended = [(self._moves.pop(end.id), any(end.ok)) for end in done]
        self.restored = any(ok and move in (Move.LOAD, Move.FETCH) for move, ok in ended)
        for move, ok in ended:
            if ok:
                self._trap.at(f"{move.value}.done")
        return done


def build(spec: WorkerSpec, trap: Trap) -> BuiltEngine:
    built = build_engine(spec, lambda point, data: trap.at(point))
    tiering = built.tiering
    mover = ArmedMover(tiering.mover, trap) if tiering is not None else None
    core = ArmedCore(built.core, mover, trap)
    if tiering is not None and mover is not None:
        tiering = Tiering(core, mover, tiering.release)
    trap.at("start.ready")
    return replace(built, core=core, tiering=tiering)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    trap = Trap(folder / "orders", folder / "hits")
    sys.exit(main(lambda spec: build(spec, trap)))
