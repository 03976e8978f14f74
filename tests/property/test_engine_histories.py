"""Random histories over the whole core: same tokens whatever the path, and nothing leaks.

The executor proves by value that every chunk reads the KV its tokens produced; `Rig` checks all
invariants after every command and step.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.core.cost import StepCost
from agentserve.messages import Abort, TurnEnded
from agentserve.types import FinishReason, SessionId, TurnId
from tests.engines import Rig, cold
from tests.histories import OPERATIONS, History


def run(operations: list, **config: object) -> Rig:  # type: ignore[type-arg]
    rig = Rig(**config)  # type: ignore[arg-type]
    history = History(rig)
    for operation in operations:
        history.apply(operation)
    rig.drain()
    history.check_said()
    for name, turn in history.asked:
        usage = rig.ended(name, turn).usage
        assert 0 <= usage.cached < max(usage.prompt, 1)
    assert all(pool.live == 0 for pool in rig.core.kv.pools)
    rig.core.kv.evict_all()
    rig.core.check()
    assert all(pool.free == pool.pages for pool in rig.core.kv.pools), "pages leaked"
    assert not rig.core.kv.tree.roots, "empty roots are kept"
    return rig


@given(
    st.lists(OPERATIONS, min_size=5, max_size=50),
    st.integers(20, 60),
    st.sampled_from([4, 8, 64]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_histories(operations: list, pages: int, budget: int, gate: bool) -> None:  # type: ignore[type-arg]
    run(operations, pages=(pages,), max_batched_tokens=budget, full_input_gate=gate, max_num_seqs=4)


@given(st.lists(OPERATIONS, max_size=30), st.integers(20, 40))
@settings(max_examples=50, deadline=None)
def test_histories_with_two_kv_groups(operations: list, pages: int) -> None:  # type: ignore[type-arg]
    run(operations, pages=(pages, pages + 7), max_batched_tokens=16, max_num_seqs=3)


@given(st.lists(OPERATIONS, max_size=30), st.floats(0, 0.05), st.floats(1e-4, 0.05), st.floats(0, 1e-3))
@settings(max_examples=50, deadline=None)
def test_no_step_is_predicted_to_take_longer_than_allowed(
    operations: list,  # type: ignore[type-arg]
    per_row: float,
    per_token: float,
    per_context: float,
) -> None:
    cost = StepCost(fixed=0.01, per_row=per_row, per_token=per_token, per_context=per_context)
    limit = 1.5 * cost.step([(100, 4)])  # a page at the end of the longest context fits
    rig = run(operations, pages=(25,), cost=cost, max_batched_tokens=64, max_step_seconds=limit)
    assert all(plan.predicted_seconds <= limit + 1e-9 for plan in rig.plans)


@given(st.lists(OPERATIONS, max_size=30))
@settings(max_examples=30, deadline=None)
def test_histories_without_prefix_cache(operations: list) -> None:  # type: ignore[type-arg]
    rig = run(operations, pages=(30,), max_batched_tokens=16, prefix_cache=False)
    assert all(event.usage.cached == 0 for event in rig.events if isinstance(event, TurnEnded))


@given(st.lists(OPERATIONS, max_size=30), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_a_log_replayed_gives_the_same_plans(operations: list, pages: int) -> None:  # type: ignore[type-arg]
    first = run(operations, pages=(pages + 20,), max_batched_tokens=8)
    again = run(operations, pages=(pages + 20,), max_batched_tokens=8)
    assert [str(plan) for plan in first.plans] == [str(plan) for plan in again.plans]
    assert first.events == again.events


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("budget", [4, 5, 64])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_edges_of_cached_and_uncached(length: int, budget: int, extra: int) -> None:
    """Lengths around page edges, sent twice, then extended: at least one token is computed (class 5)."""
    rig = Rig(max_batched_tokens=budget)
    prompt = list(range(length))
    for name in ("a", "b"):
        rig.submit(name, prompt, max_tokens=3)
        rig.drain()
        assert rig.output(name) == cold(prompt, 3)
    assert rig.ended("b").usage.cached == length - 1
    longer = prompt + [7] * extra
    rig.submit("c", longer, max_tokens=3)
    rig.drain()
    assert rig.output("c") == cold(longer, 3)
    assert all(len(chunk.tokens) for plan in rig.plans for chunk in plan.chunks)


def test_stale_turns_are_ignored() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3], max_tokens=2)
    rig.core.handle(Abort(SessionId("a"), TurnId(9)), 0.0)
    rig.drain()
    assert rig.ended("a").reason is FinishReason.LENGTH
    assert isinstance(rig.core.sessions.get(SessionId("a")).tokens, array)  # type: ignore[union-attr]
