"""Every scheduling policy over random histories: all turns end as cold runs do, no limit is passed, nobody
starves, and nothing is left over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan
from agentserve.core.scheduling.registry import policy_names
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.types import NO_SLO, Slo, TurnId
from tests.engines import Rig, TierRig
from tests.histories import OPERATIONS, TIER_OPERATIONS, History

COST = StepCost(fixed=0.01, per_row=0.002, per_token=0.004, per_context=1e-5)
SLOS = (NO_SLO, Slo(ttft=2.0, tbt=0.5), Slo(tbt=0.02), Slo(ttft=0.5, tpot=3.0), Slo(total=30.0))
POLICIES = policy_names()


def shared_out(rig: Rig) -> None:
    """Give each session a tenant, a program and promises of its own; check each plan."""
    submit, check = rig.submit, rig._check_ahead

    def submit_for(name: str, tokens: list[int], **changes: object) -> TurnId:
        number = sum(map(ord, name))
        own = {"tenant": f"t{number % 3}", "program": f"p{number % 4}", "slo": SLOS[number % len(SLOS)]}
        return submit(name, tokens, **own, **changes)  # type: ignore[arg-type]

    def check_plan(plan: Plan) -> None:
        check(plan)
        within_limits(rig, plan)

    rig.submit = submit_for  # type: ignore[method-assign,assignment]
    rig._check_ahead = check_plan  # type: ignore[method-assign]


def settings_of(policy: str) -> SchedulingConfig:
    return SchedulingConfig(policy=policy, weights={"t0": 3.0}, memory_charge=0.01, quantum=20)


def finish(rig: Rig, operations: list) -> None:  # type: ignore[type-arg]
    shared_out(rig)
    history = History(rig)
    for operation in operations:
        history.apply(operation)
    rig.drain()
    history.check_said()
    assert not rig.core.scheduler.waiting
    rig.core.check()


def within_limits(rig: Rig, plan: Plan) -> None:
    form, config = rig.core.scheduler.policy.form, rig.config
    turns = [(chunk, s) for chunk in plan.chunks if (s := rig.core.sessions.get(chunk.session)) and s.turn]
    prompts = [chunk for chunk, session in turns if chunk.start < session.running_turn.prompt]
    assert len(turns) <= config.max_num_seqs
    if form.chunked:
        assert plan.tokens <= config.max_batched_tokens
        for chunk in prompts:
            assert chunk.sample is not None or (chunk.start + len(chunk.tokens)) % config.page_size == 0
    else:
        assert all(chunk.sample is not None for chunk in prompts), "a prompt was cut"
        assert plan.tokens <= config.max_batched_tokens or prompts, "decodes alone never pass the limit"
    told = {session for session, _ in plan.reasons}
    planned = {chunk.session for chunk in plan.chunks}
    if form.decodes_ride:
        for session in rig.core.scheduler.running:
            assert session.lag != 1 or session.id in planned | told, "a decode was left out without a word"
    if any(reason == "preempted" for _, reason in plan.reasons):
        entered = [session for _, session in turns if session.running_turn.admitted == rig.now]
        assert not entered, "admitted in a step with a preemption"
    if not form.decodes_ride:
        assert len(prompts) in (0, len(turns)), "prefill and decodes share a step"


@pytest.mark.parametrize("policy", POLICIES)
@given(st.lists(OPERATIONS, min_size=5, max_size=40), st.integers(20, 60), st.sampled_from([4, 8, 64]))
@settings(max_examples=25, deadline=None)
def test_every_turn_ends(policy: str, operations: list, pages: int, budget: int) -> None:  # type: ignore[type-arg]
    rig = Rig(
        pages=(pages,), max_batched_tokens=budget, max_num_seqs=4, cost=COST, scheduling=settings_of(policy)
    )
    finish(rig, operations)
    assert all(pool.live == 0 for pool in rig.core.kv.pools)


@pytest.mark.parametrize("policy", POLICIES)
@given(st.lists(TIER_OPERATIONS, min_size=5, max_size=30), st.integers(20, 40))
@settings(max_examples=10, deadline=None)
def test_every_turn_ends_with_tiers(policy: str, operations: list, pages: int) -> None:  # type: ignore[type-arg]
    rig = TierRig((pages,), host=30, max_batched_tokens=16, max_num_seqs=3, scheduling=settings_of(policy))
    finish(rig, operations)
    rig.settle()
    rig.core.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_under_a_flood(policy: str) -> None:
    """Short turns that share a prefix arrive in every step, more than can run. A long prompt of a tenant
    that shares nothing still ends; so it does if it is the flood's own tenant."""
    for tenant in ("flood", "other"):
        rig = Rig((60,), max_batched_tokens=16, max_num_seqs=2, cost=COST, scheduling=settings_of(policy))
        rig.submit("warm", range(16), max_tokens=1, tenant="flood")
        rig.drain()
        long = rig.submit("long", range(500, 560), max_tokens=4, tenant=tenant, program="long")
        number = 0
        while not any(e for e in rig.events if getattr(e, "session", "") == "long" and hasattr(e, "usage")):
            number += 1
            prompt = [*range(16), 100 + number]
            rig.submit(f"s{number}", prompt, max_tokens=1, tenant="flood", program=f"p{number}")
            assert rig.step() is not None
            assert number < 300, f"{policy}: the long prompt waits for ever"
        assert rig.ended("long", long).usage.generated == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_log_gives_the_same_plans(policy: str) -> None:
    plans = []
    for _ in range(2):
        rig = Rig((24,), max_batched_tokens=8, max_num_seqs=3, cost=COST, scheduling=settings_of(policy))
        for number in range(8):
            rig.submit(
                f"s{number}", [*range(number % 3 * 5), *range(900, 905 + number)], tenant=f"t{number % 3}"
            )
            rig.step()
        rig.drain()
        plans.append([str(plan) for plan in rig.plans])
    assert plans[0] == plans[1]
