"""The cost model in the core: plans keep to its bound, what ran refreshes it, tiers are priced by it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan, StepResult
from agentserve.core.record import Entry, decode_entries, encode_entry
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.core.timing.tally import EVERYTHING, Attention, load_of, load_of_shape
from agentserve.sim.executor import SimExecutor
from agentserve.sim.replay import replay
from agentserve.sim.run import Simulation
from agentserve.sim.workload import WorkloadSpec, make_workload
from agentserve.types import Slo
from tests.engines import Rig, TierRig, groups_of

COST = StepCost(
    fixed=0.01, per_decode=0.002, per_chunk=0.003, per_seen=1e-5, per_read=2e-5, per_pair=1e-5,
    per_sample=0.001, per_copy=0.001, knots=(0, 8, 24), slopes=(2e-4, 1e-3, 5e-4), ratio=1.25, extra=0.002,
)  # fmt: skip


class Slower(SimExecutor):
    """Takes `times` as long as its model says."""

    times = 1.0

    def run(self, plan: Plan) -> StepResult:
        result = super().run(plan)
        return msgspec.structs.replace(result, seconds=result.seconds * self.times)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=8),
    limit=st.floats(0.025, 0.2),
    page_size=st.sampled_from([1, 4]),
)
def test_no_step_may_be_longer_than_its_limit(
    prompts: list[tuple[int, int]], limit: float, page_size: int
) -> None:
    rig = Rig((400,), cost=COST, max_step_seconds=limit, page_size=page_size)
    attention = Attention(groups_of(1), page_size)
    for number, (length, output) in enumerate(prompts):
        rig.submit(f"s{number}", range(100 * (number % 3), 100 * (number % 3) + length), max_tokens=output)
    while (plan := rig.step()) is not None:
        assert plan.load is not None
        assert plan.load == load_of(plan.chunks, plan.copies, attention)
        assert plan.predicted_seconds == COST.predict(plan.load)
        assert plan.bound_seconds == COST.bound(plan.load)
        least = len(plan.chunks) == 1 and plan.tokens <= page_size  # something must run
        assert plan.bound_seconds <= limit or least
    assert not rig.core.has_work


def test_a_chunk_is_cut_to_what_the_bound_allows() -> None:
    """Of 40 tokens as many whole pages as the bound allows; one more page would be too many."""
    rig = Rig((64,), cost=COST, max_step_seconds=0.05)
    rig.submit("a", range(40))
    plan = rig.step()
    assert plan is not None
    assert ("a", "time") in plan.reasons
    assert plan.bound_seconds <= 0.05
    longer = rig.core.scheduler.cost.step([(0, plan.tokens + 4)])
    assert COST.at_worst(longer) > 0.05


@pytest.mark.parametrize(("ratio", "safety", "caution"), [(1.0, 1.5, 1.5), (1.5, 1.5, 1.5), (2.0, 1.5, 2.0)])
def test_caution_counts_once(ratio: float, safety: float, caution: float) -> None:
    """Where it was measured how far steps stray, nothing is guessed on top of it."""
    cost = StepCost(fixed=0.1, per_chunk_token=0.01, ratio=ratio)
    rig = Rig((64,), cost=cost, scheduling=SchedulingConfig(safety=safety))
    rig.now = 100.0
    rig.submit("a", range(4), max_tokens=4, slo=Slo(tbt=1.5))
    rig.step()
    rig.submit("b", range(100, 160))
    plan = rig.step()  # a second later: half a second is left
    assert plan is not None
    assert [chunk.session for chunk in plan.chunks] == ["a", "b"]
    fits = int((0.5 / caution - 0.1) / 0.01 + 1e-9) // 4 * 4
    assert len(plan.chunks[1].tokens) == fits


def test_a_slower_machine_is_given_smaller_steps() -> None:
    executor = Slower((400,), 4, COST)
    executor.times = 2.0
    rig = Rig((400,), executor=executor, cost=COST, max_step_seconds=0.08)
    chunks = []
    for number in range(60):
        rig.submit(f"s{number}", range(1000 * number, 1000 * number + 60), max_tokens=1)
        while (plan := rig.step()) is not None:
            chunks.append(plan.tokens)
    assert 1.9 < rig.core.learning.cost.pace < 2.1
    assert chunks[-2] < chunks[0]


def test_steps_of_which_a_part_failed_say_nothing() -> None:
    executor = Slower((64,), 4, COST)
    executor.times = 3.0
    rig = Rig((64,), executor=executor, cost=COST)
    rig.submit("a", range(8))
    plan = rig.core.begin_step(0.0)
    assert plan is not None
    result = executor.run(plan)
    failed = msgspec.structs.replace(
        result, chunks=(msgspec.structs.replace(result.chunks[0], error="broken", sampled=None),)
    )
    rig.core.finish_step(failed, 0.0)
    assert rig.core.learning.cost == COST
    rig.submit("b", range(8))
    rig.step()
    assert rig.core.learning.cost != COST


def test_a_log_replays_into_the_same_plans_though_the_model_moved() -> None:
    spec = WorkloadSpec(agents=6, turns=3, task=60, append=10, output=4, arrivals_per_second=5.0, seed=3)
    config = CoreConfig(page_size=4, max_batched_tokens=32, max_num_seqs=8, max_step_seconds=0.06)
    log: list[Entry] = []
    simulation = Simulation(make_workload(spec), config, pages=120, cost=COST, log=log.append)
    executor = simulation.executor
    executor.cost = msgspec.structs.replace(COST, pace=1.7)
    outcome = simulation.run()
    assert outcome.unfinished == ()
    assert simulation.core.learning.cost.pace > 1.5
    data = b"".join(encode_entry(entry) for entry in log)
    result = replay(decode_entries(data))
    assert (result.plans, result.differs_at) == (outcome.steps, None)


class Pricing:
    """Notes what a core's tiers are told of prices."""

    def __init__(self, rig: TierRig) -> None:
        self.told: list[tuple[float, float, float]] = []
        self.learned: list[object] = []
        book = rig.core.learning._book
        assert book is not None
        book.predicted = self.told.append  # type: ignore[method-assign]
        book.stepped = lambda *step: self.learned.append(step)  # type: ignore[method-assign]


def test_tiers_are_told_what_computing_costs() -> None:
    rig = TierRig(cost=COST)
    pricing = Pricing(rig)
    rig.submit("a", range(20), max_tokens=3)
    rig.drain()
    assert pricing.told[-1] == pytest.approx(
        rig.core.learning.cost.prefill_line(rig.config.max_batched_tokens)
    )
    assert not pricing.learned


def test_of_an_unknown_machine_tiers_learn_themselves() -> None:
    rig = TierRig()
    pricing = Pricing(rig)
    rig.submit("a", range(20), max_tokens=3)
    plan = rig.step()
    rig.drain()
    assert plan is not None
    assert (plan.predicted_seconds, plan.bound_seconds) == (0.0, 0.0)
    assert plan.load is not None
    assert plan.load.tokens == 20
    assert not pricing.told


def test_a_plan_may_be_made_while_another_runs() -> None:
    """And one that was given up is forgotten."""
    rig = Rig((64,), cost=COST)
    learning = rig.core.learning
    load = load_of_shape([(0, 8)], EVERYTHING)
    plans = [Plan(step, (), (), 0.0, (), load) for step in (1, 2, 3)]
    for plan in plans:
        learning.begun(plan)
    learning.ended(StepResult(2, (), 2 * COST.predict(load)))
    moved = learning.cost
    assert moved.pace > 1
    learning.ended(StepResult(1, (), 9.0))
    assert learning.cost == moved, "step 1 was given up"
    learning.ended(StepResult(3, (), 2 * COST.predict(load)))
    assert learning.cost.pace > moved.pace
