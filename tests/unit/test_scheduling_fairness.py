"""Virtual token counters and deficit round robin: published examples, and bounds over random histories."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.core.scheduling.fairness import DeficitRoundRobin, VirtualTokens


def test_virtual_tokens_by_the_example() -> None:
    counters = VirtualTokens()
    counters.arrived("A", [])
    counters.charge("A", read=100)  # A1
    counters.arrived("B", ["A"])  # A2 and A3 wait
    assert counters.counter("B") == 100
    assert counters.next({"A": 0.0, "B": 1.0}) == "A", "a tie goes to who came first"
    counters.charge("A", read=100)
    assert counters.next({"A": 0.0, "B": 1.0}) == "B"
    counters.charge("B", read=10)
    counters.charge("A", read=100)
    assert (counters.counter("A"), counters.counter("B")) == (300, 110)
    counters.charge("A", written=3 * 5)
    counters.charge("B", written=5)
    assert (counters.counter("A"), counters.counter("B")) == (330, 120)


def test_nobody_is_lifted_when_nobody_waits() -> None:
    counters = VirtualTokens()
    counters.charge("A", read=500)
    counters.arrived("B", [])
    assert counters.counter("B") == 0


def test_weights_divide_what_is_charged() -> None:
    counters = VirtualTokens({"A": 1.0, "B": 4.0}.__getitem__)
    counters.charge("A", read=100, other=20)
    counters.charge("B", read=100, other=20)
    assert (counters.counter("A"), counters.counter("B")) == (120, 30)


def rounds(quantum: float, queues: dict[str, list[float]]) -> tuple[list[str], DeficitRoundRobin]:
    """Serve all; who was served, in order."""
    rule, waiting = DeficitRoundRobin(quantum), {name: deque(costs) for name, costs in queues.items()}
    for name in queues:
        rule.arrived(name)
    served = []
    while (name := rule.next()) is not None:
        rule.charge(name, waiting[name].popleft())
        served.append(name)
        if not waiting[name]:
            rule.emptied(name)
    return served, rule


def test_deficit_round_robin_by_the_example() -> None:
    served, rule = rounds(100, {"A": [60, 60, 60], "B": [150]})
    assert served == ["A", "A", "B", "A"]
    assert (rule.deficit("A"), rule.deficit("B")) == (0, 0), "nobody keeps credit for being idle"


def test_a_debt_of_several_rounds_is_paid_off() -> None:
    served, _ = rounds(10, {"A": [95, 5], "B": [5] * 20})
    assert served.index("A") == 0
    assert served[1:].index("A") == 18, "nine rounds of ten tokens"


def test_a_quantum_must_be_positive() -> None:
    with pytest.raises(ValueError, match="quantum"):
        DeficitRoundRobin(0)


@given(
    st.dictionaries(
        st.sampled_from("ABCD"), st.lists(st.integers(1, 300), min_size=1, max_size=40), min_size=1
    ),
    st.integers(1, 500),
)
def test_round_robin_serves_all_and_keeps_the_gap_bounded(
    queues: dict[str, list[float]], quantum: int
) -> None:
    rule, waiting = DeficitRoundRobin(quantum), {name: deque(costs) for name, costs in queues.items()}
    received = dict.fromkeys(queues, 0.0)
    for name in queues:
        rule.arrived(name)
    while (name := rule.next()) is not None:
        cost = waiting[name].popleft()
        received[name] += cost
        rule.charge(name, cost)
        if not waiting[name]:
            rule.emptied(name)
        behind = [received[other] for other in queues if waiting[other]]
        # Each is within one quantum and one turn of its due.
        assert not behind or max(behind) - min(behind) <= 2 * (quantum + 300)
    assert not any(waiting.values())


@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.integers(1, 200), st.integers(0, 100)), max_size=200),
    st.dictionaries(st.sampled_from("ABC"), st.integers(1, 5)),
)
def test_virtual_tokens_keep_the_gap_bounded(
    turns: list[tuple[str, int, int]], weights: dict[str, int]
) -> None:
    """All turns wait from the start: a tenant that still waits is never behind by more than the bound."""
    counters = VirtualTokens(lambda tenant: weights.get(tenant, 1))
    waiting: dict[str, deque[tuple[int, int, int]]] = {}
    for number, (tenant, read, written) in enumerate(turns):
        if tenant not in waiting:
            counters.arrived(tenant, waiting)
        waiting.setdefault(tenant, deque()).append((number, read, written))
    while waiting:
        tenant = counters.next({name: line[0][0] for name, line in waiting.items()})
        _, read, written = waiting[tenant].popleft()
        if not waiting[tenant]:
            del waiting[tenant]
        counters.charge(tenant, read=read, written=written)
        gaps = [counters.counter(name) for name in waiting]
        assert not gaps or max(gaps) - min(gaps) <= 2 * (200 + 2 * 100)


def test_a_debt_of_many_rounds_is_paid_at_once() -> None:
    """The last turn may overdraw by any prompt, and a weight be small: rounds that serve nobody are not
    walked through one by one."""
    weights = {"small": 1e-6, "smaller": 0.5e-6}
    rule = DeficitRoundRobin(512.0, weights.__getitem__)
    for tenant in weights:
        rule.arrived(tenant)
        rule.charge(tenant, 100_000.0)
    visits = 0

    class Counted(dict[str, float]):
        def __getitem__(self, tenant: str) -> float:
            nonlocal visits
            visits += 1
            assert visits < 100, "round by round"
            return super().__getitem__(tenant)

    rule._deficits = Counted(rule._deficits)
    assert rule.next() == "small", "it pays off twice as fast"
    assert rule.deficit("small") > 0 > rule.deficit("smaller")
    assert rule.deficit("smaller") == pytest.approx(-50_000.0, rel=1e-3)


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 9000)), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_rounds_that_are_passed_over_change_no_order(tenants: list[tuple[float, int]], served: int) -> None:
    """As if each had been walked through."""
    names = [f"t{number}" for number in range(len(tenants))]
    weights = {name: weight for name, (weight, _) in zip(names, tenants, strict=True)}
    rule = DeficitRoundRobin(64.0, weights.__getitem__)
    for name in names:
        rule.arrived(name)
    for name in (names * 5)[:served]:
        assert rule.next() is not None
        rule.charge(name, 200.0)
    for name, (_, debt) in zip(names, tenants, strict=True):
        rule.charge(name, debt)
    line, fresh, deficits = list(rule._round), rule._fresh, dict(rule._deficits)
    while True:  # the rule as it is written down
        head = line[0]
        if fresh and deficits[head] <= 0:
            deficits[head] += 64.0 * weights[head]
        fresh = False
        if deficits[head] > 0:
            break
        line, fresh = line[1:] + line[:1], True
    assert rule.next() == head
    assert rule._deficits == deficits
