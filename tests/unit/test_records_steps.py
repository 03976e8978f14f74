"""From a worker's steps to what a model is fitted to: through the recording, and the same."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.core.cost import StepCost
from agentserve.core.timing.features import StepLoad
from agentserve.core.timing.tally import Attention, load_of
from agentserve.records.lines import IterationRecord, Line, decode_line, encode_line
from agentserve.records.reader import Records
from agentserve.records.steps import as_they_ran, timed_steps, whose_steps
from agentserve.server.workers.iterations import IterationLog, step_features
from tests.engines import Rig, groups_of

ATTENTION = Attention(groups_of(1), 4)
COST = StepCost(fixed=0.01, per_token=0.001, ratio=1.5)


class Kept:
    """A writer that keeps its lines as they would be read."""

    lost = 0

    def __init__(self) -> None:
        self.lines: list[IterationRecord] = []

    def add(self, line: Line) -> None:
        read = decode_line(encode_line(line))
        assert isinstance(read, IterationRecord)
        self.lines.append(read)


def recorded(rig: Rig) -> tuple[list[IterationRecord], list[StepLoad]]:
    """Its steps to the end: as they were recorded, and what was in them."""
    kept, loads = Kept(), []
    log = IterationLog(kept, step_features(ATTENTION))  # type: ignore[arg-type]
    while (plan := rig.core.begin_step(rig.now)) is not None:
        result = rig.executor.run(plan)
        rig.core.finish_step(result, rig.now)
        loads.append(load_of(plan.chunks, plan.copies, ATTENTION))
        log.ran(plan, result.seconds, rig.now, rig.now + 1)
        log.reported([], rig.core.view())
        rig._collect()
    return kept.lines, loads


@pytest.mark.parametrize("cost", [None, COST, msgspec.structs.replace(COST, per_read=1e-6)])
def test_features_come_back_whatever_the_model_looks_at(cost: StepCost | None) -> None:
    rig = Rig((64,), cost=cost, max_batched_tokens=16)
    for name in ("a", "b", "c"):  # they share two pages
        rig.submit(name, [*range(8), ord(name)], max_tokens=4, temperature=0.5 if name == "a" else 0.0)
    lines, loads = recorded(rig)
    steps, left_out = timed_steps(lines)
    assert [step.load for step in steps] == loads
    assert left_out == 0
    assert any(load.read < load.context for load in loads)
    assert any(load.drawn for load in loads)
    if cost is not None:
        assert [step.seconds for step in steps] == pytest.approx([cost.predict(load) for load in loads])


def test_a_step_is_recorded_with_what_was_predicted_and_its_bound() -> None:
    rig = Rig((64,), cost=COST)
    rig.submit("a", range(20), max_tokens=3)
    lines, _ = recorded(rig)
    assert lines[0].predicted_ms == pytest.approx(10 + 20)
    assert [line.bound_ms for line in lines] == pytest.approx([1.5 * line.predicted_ms for line in lines])
    ran = as_they_ran(lines)
    assert ran is not None
    assert (ran.steps, ran.exceeded) == (len(lines), 0)
    assert ran.mape == pytest.approx(0, abs=1e-6)
    assert ran.width == pytest.approx(1.5)


def test_what_was_not_predicted_or_failed_says_nothing_of_predictions() -> None:
    rig = Rig((64,))
    rig.submit("a", range(5), max_tokens=2)
    lines, _ = recorded(rig)
    assert as_they_ran(lines) is None
    failed = [msgspec.structs.replace(line, predicted_ms=1.0, model_ms=2.0, failed=True) for line in lines]
    assert as_they_ran(failed) is None
    assert timed_steps(failed) == ([], 0)


@pytest.mark.parametrize("features", [None, {"decodes": 0.5}, {"decodes": -1.0}])
def test_features_of_another_form_are_counted(features: dict[str, float] | None) -> None:
    rig = Rig((64,), cost=COST)
    rig.submit("a", range(5), max_tokens=2)
    lines, _ = recorded(rig)
    steps, left_out = timed_steps([msgspec.structs.replace(line, features=features) for line in lines])
    assert (steps, left_out) == ([], len(lines))


def test_a_recording_that_says_nothing_is_nobodys() -> None:
    with pytest.raises(ValueError, match="nothing says whose steps"):
        whose_steps([Records()])
