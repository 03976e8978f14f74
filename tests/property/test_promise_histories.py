"""Promises of any kind, kept or absurd, over random histories: nobody starves, nothing hangs or changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan
from agentserve.core.scheduling.registry import policy_names
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.core.timekeeper import PATIENCE
from agentserve.types import NO_SLO, FinishReason, Slo, TurnId
from tests.engines import Rig, TierRig
from tests.histories import OPERATIONS, TIER_OPERATIONS, History
from tests.promises_rig import COST, PromisesRig

SECONDS = st.sampled_from([1e-300, 1e-6, 0.011, 0.02, 0.05, 0.3, 2.0, 60.0, 1e300])
SLOS = st.one_of(
    st.just(NO_SLO),
    st.builds(
        Slo,
        ttft=SECONDS | st.none(),
        tbt=SECONDS | st.none(),
        tpot=SECONDS,
        gap=SECONDS | st.none(),
        total=SECONDS | st.none(),
    ),
    st.builds(Slo, ttft=SECONDS, tbt=SECONDS),
)
ASKED = st.lists(st.tuples(SLOS, st.booleans(), st.sampled_from("ab")), min_size=1, max_size=6)
PROMISING = [name for name in policy_names() if name in ("deadline", "fair-resumes")]
KINDS = {"ttft", "tbt", "gap", "tpot", "total"}


class Promised(PromisesRig):
    """What is submitted is promised what stands next in a list, again and again."""

    def __init__(
        self, asked: Sequence[tuple[Slo, bool, str]], policy: str, *, safety: float = 1.2, **config: object
    ) -> None:
        super().__init__(scheduling=SchedulingConfig(policy=policy, safety=safety), **config)  # type: ignore[arg-type]
        self._asked = cycle(asked)
        self.promised: dict[tuple[str, int], tuple[Slo, bool]] = {}
        self.read_last = self.now  # when a prompt was read last, or none was there to be read

    def submit(self, name: str, tokens: Sequence[int], **more: object) -> TurnId:
        slo, shed, tenant = next(self._asked)
        turn = super().submit(name, tokens, slo=slo, shed=shed, tenant=tenant, **more)  # type: ignore[arg-type]
        self.promised[name, turn] = slo, shed
        return turn

    def step(self) -> Plan | None:
        scheduler = self.core.scheduler
        if not scheduler.waiting and all(session.lag == 1 for session in scheduler.running):
            self.read_last = self.now
        began, plan = self.now, super().step()
        if plan is None:
            return None
        if any(len(chunk.tokens) > 1 or chunk.sample is None for chunk in plan.chunks):
            self.read_last = self.now
        elif began - self.read_last >= PATIENCE:
            limits = {limit for _, limit in plan.reasons}
            assert "time" not in limits, f"deadlines kept prompts waiting for {began - self.read_last} s"
        return plan


def run(operations: list, rig: Promised) -> None:  # type: ignore[type-arg]
    history = History(rig)
    for operation in operations:
        history.apply(operation)
    rig.drain()
    history.check_said()
    for (name, turn), (slo, shed) in rig.promised.items():
        ended = rig.ended(name, turn)
        usage, promised = ended.usage, {kind for kind in KINDS if getattr(slo, kind) is not None}
        assert not set(usage.kept) & set(usage.missed)
        assert set(usage.kept) | set(usage.missed) <= promised
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert set(usage.kept) | set(usage.missed) == promised
        if ended.reason is FinishReason.SHED:
            assert shed
            assert ended.wait > 0
            assert not rig.output(name, turn)
        if usage.relegated:
            assert {"ttft", "total"} & promised
    time = rig.core.scheduler.time
    assert not any((time._line, time._estimates, *time._latest.values())), "kept after its end"
    rig.core.kv.evict_all()
    assert all(pool.free == pool.pages for pool in rig.core.kv.pools), "pages leaked"


@pytest.mark.parametrize("policy", PROMISING)
@given(
    st.lists(OPERATIONS, min_size=20, max_size=50), ASKED, st.integers(20, 60), st.sampled_from([4, 16, 64])
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_promised_every_turn_ends_and_says_the_same(  # type: ignore[no-untyped-def]
    policy: str, operations: list, asked, pages: int, budget: int
) -> None:
    run(operations, Promised(asked, policy, pages=(pages,), max_batched_tokens=budget, max_num_seqs=4))


@given(st.lists(OPERATIONS, min_size=10, max_size=30), ASKED)
@settings(max_examples=25, deadline=None)
def test_a_log_replayed_gives_the_same_plans(operations: list, asked) -> None:  # type: ignore[no-untyped-def,type-arg]
    first, again = (Promised(asked, "fair-resumes", pages=(40,), max_num_seqs=3) for _ in range(2))
    run(operations, first)
    run(operations, again)
    assert [str(plan) for plan in first.plans] == [str(plan) for plan in again.plans]
    assert first.events == again.events


class PromisedWithTiers(TierRig):
    """The same above a host and a disk tier."""

    def __init__(self, asked: Sequence[tuple[Slo, bool, str]]) -> None:
        super().__init__((30,), host=20, disk=40, cost=COST, max_num_seqs=4)
        self.now = 1.0
        self._asked = cycle(asked)

    def submit(self, name: str, tokens: Sequence[int], **more: object) -> TurnId:
        slo, shed, tenant = next(self._asked)
        return super().submit(name, tokens, slo=slo, shed=shed, tenant=tenant, **more)  # type: ignore[arg-type]


@given(st.lists(TIER_OPERATIONS, min_size=15, max_size=40), ASKED)
@settings(max_examples=30, deadline=None)
def test_tiers_below_make_no_difference(operations: list, asked) -> None:  # type: ignore[no-untyped-def,type-arg]
    rig = PromisedWithTiers(asked)
    history = History(rig)
    for operation in operations:
        history.apply(operation)
    rig.drain()
    history.check_said()


SLOW = StepCost(fixed=0.5, per_row=0.01, per_token=0.01)  # a decode step is longer than half a second


@given(
    st.lists(
        st.builds(Slo, ttft=SECONDS | st.none(), tbt=SECONDS | st.floats(0.5, 2.0)), min_size=1, max_size=4
    ),
    st.lists(st.integers(2, 90), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_prompts_are_read_beside_decodes_whatever_these_were_promised(
    decodes: list[Slo], prompts: list[int], tight: bool
) -> None:
    """Room for all: only deadlines could keep a prompt from being read, and they do for `PATIENCE` at most.
    tight: a step with nothing but the decodes is just in time, again and again."""
    if tight:
        decodes = [Slo(tbt=SLOW.step([(0, 1)] * len(decodes)) + 1e-4)] * len(decodes)
    asked = [(slo, False, "a") for slo in decodes]
    rig = Promised(asked, "fair-resumes", pages=(200,), cost=SLOW, safety=1.0 if tight else 1.2)
    for number in range(len(decodes)):
        rig.submit(f"d{number}", [number] * 5, max_tokens=90)
    while any(session.lag > 1 for session in rig.core.scheduler.running) or rig.core.scheduler.waiting:
        rig.step()
    began = rig.now
    for number, length in enumerate(prompts):
        Rig.submit(rig, f"p{number}", [1000 + number] * length, max_tokens=1, tenant="b")
    rig.drain()
    steps = sum(-(-length // rig.config.max_batched_tokens) for length in prompts)
    longest = SLOW.step([(0, rig.config.max_batched_tokens), *[(100, 1)] * len(decodes)])
    for number in range(len(prompts)):
        waited = rig.ended(f"p{number}").usage.first_token - began
        assert waited <= (steps + 1) * (PATIENCE + 2 * longest)


def test_unattainable_deadlines_cut_no_step() -> None:
    """A microsecond between tokens cannot be kept, so the prompt beside it is read as if nobody had asked."""
    chunks = []
    for slo in (NO_SLO, Slo(tbt=1e-6)):
        rig = Promised([(slo, False, "a")], "fair-resumes", pages=(200,), cost=SLOW)
        rig.submit("d", [1] * 5, max_tokens=40)
        rig.step()
        Rig.submit(rig, "p", list(range(200)), max_tokens=1, tenant="b")
        rig.drain()
        chunks.append([len(chunk.tokens) for plan in rig.plans for chunk in plan.chunks])
        assert bool(rig.core.scheduler.time.unattainable) is (slo is not NO_SLO)
        assert rig.ended("d").usage.missed == (("tbt",) if slo is not NO_SLO else ())
    assert chunks[0] == chunks[1]
