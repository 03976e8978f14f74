"""What a step costs in the core grows with those that run, hardly with those that wait.

Counted in instructions of Python that are executed, which are the same on every machine.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import pytest

from agentserve.bench.scheduler import Rig
from agentserve.core.scheduling.registry import policy_names


class Counted(Rig):
    """Counts what its steps execute."""

    executed = 0

    def step(self, *_: Any) -> tuple[float, float]:
        return super().step(lambda: float(self.executed))

    def per_step(self, steps: int) -> tuple[float, float]:
        """Instructions of planning and of booking, on average."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            taken = [self.step() for _ in range(steps)]
        finally:
            sys.settrace(before)
        begin, finish = (sum(half) / steps for half in zip(*taken, strict=True))
        return begin, finish

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.executed += event == "opcode"
        return self._trace


def executed(policy: str, load: str, running: int, waiting: int) -> float:
    rig = Counted(policy, load, running, waiting)
    for _ in range(4):
        rig.step()
    return sum(rig.per_step(6))


@pytest.mark.parametrize("load", ["decode", "pages"])
@pytest.mark.parametrize("policy", policy_names())
def test_a_step_costs_what_runs_in_it(policy: str, load: str) -> None:
    few = executed(policy, load, 16, 150)
    assert executed(policy, load, 16, 600) <= 1.1 * few, "who waits is looked at in every step"
    assert executed(policy, load, 64, 150) <= few * 64 * math.log(64) / (16 * math.log(16))


def test_what_is_counted() -> None:
    """A step that looks at everybody would be noticed."""
    rigs = [Counted("chunked", "decode", 4, waiting) for waiting in (40, 160)]
    for rig in rigs:
        rig.core.scheduler.stepped = lambda *_, rig=rig: [s.lag for s in rig.core.scheduler.waiting]  # type: ignore
    few, many = (sum(rig.per_step(2)) for rig in rigs)
    assert many > 1.5 * few


def test_what_is_reserved_is_summed_once_a_step() -> None:
    """Where room for all that a turn may write is kept, many fit by themselves that do not fit together."""
    few, many = (executed("orca", "pages", running, 200) for running in (32, 128))
    assert many <= few * 128 * math.log(128) / (32 * math.log(32))
