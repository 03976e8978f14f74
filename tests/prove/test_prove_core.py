"""The core under far more random histories and oversubscribed simulations than every test run can afford."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentserve.types import FinishReason
from tests.crowds import oversubscribed
from tests.property.test_engine_histories import OPERATIONS, run

Tell = Callable[[str], None]


def histories(seed: int, count: int, longest: int) -> str:
    """Run `count` random histories of up to `longest` operations; what was done."""
    done: Counter[str] = Counter()

    @hypothesis.seed(seed)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(OPERATIONS, min_size=longest // 3, max_size=longest),
        st.lists(st.integers(20, 120), min_size=1, max_size=2),
        st.sampled_from([4, 8, 24, 64]),
        st.integers(1, 6),
        st.booleans(),
        st.booleans(),
    )
    def check(operations: list, pages: list, budget: int, seats: int, gate: bool, cache: bool) -> None:  # type: ignore[type-arg]
        rig = run(
            operations,
            pages=tuple(pages),
            max_batched_tokens=budget,
            max_num_seqs=seats,
            full_input_gate=gate,
            prefix_cache=cache,
        )
        done.update(histories=1, steps=len(rig.plans), operations=len(operations))

    check()
    return f"seed {seed}: {', '.join(f'{amount} {name}' for name, amount in done.items())}"


def simulations(first: int, count: int) -> str:
    """Simulate `count` seeds, ten and thirty times oversubscribed; what was done."""
    turns = preemptions = steps = 0
    for seed in range(first, first + count):
        outcome = oversubscribed(seed, times=30 if seed % 2 else 10)
        assert outcome.unfinished == (), f"seed {seed} wedged"
        assert {turn.reason for turn in outcome.turns} <= {FinishReason.STOP, FinishReason.LENGTH}
        turns += len(outcome.turns)
        steps += outcome.steps
        preemptions += sum(turn.preemptions for turn in outcome.turns)
    assert preemptions > count // 4, "the pool was never under pressure"
    return f"seeds {first} to {first + count - 1}: {turns} turns, {steps} steps, {preemptions} preemptions"


def test_histories_slice(tell: Tell) -> None:
    tell(histories(0, 60, 60))


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 11))
def test_histories(seed: int, tell: Tell) -> None:
    tell(histories(seed, 1000, 60 if seed % 2 else 200))


def test_oversubscription_slice(tell: Tell) -> None:
    tell(simulations(1_000, 24))


@pytest.mark.prove
@pytest.mark.parametrize("first", range(10_000, 15_000, 250))
def test_oversubscription(first: int, tell: Tell) -> None:
    tell(simulations(first, 250))
