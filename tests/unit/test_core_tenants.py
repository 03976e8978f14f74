"""In the engine: a client's word moves its own tenant's turns alone, and what is learned is each tenant's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentserve.core.line import by_priority, exchanged
from agentserve.core.scheduling.registry import policy_names
from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.core.session import Session, Turn
from agentserve.types import Sampling, SessionId, TurnId
from tests.engines import Rig
from tiering.policy.base import Departure, Hints, Market, Park, Policy, Prices, Residency, Rest, Signal
from tiering.policy.learned import LearnedByTenant
from tiering.policy.outlook import Outlook
from tiering.policy.priced import PricedPolicy
from tiering.policy.registry import policy_named
from tiering.waits import WaitSettings

PRICES = Prices(
    block_bytes=1 << 16,
    save=(1e-4, 1e-5),
    load=(1e-4, 1e-5),
    write=(1e-3, 1e-4),
    fetch=(1e-3, 1e-4),
    prefill=(1e-2, 1e-3, 1e-7),
    page_size=4,
)


def session(tenant: str, arrival: int, priority: int = 0) -> Session:
    found = Session(SessionId(f"{tenant}{arrival}"), tenant=tenant)
    found.turn = Turn(TurnId(1), 1, Sampling(), 9, (-priority, arrival), 0.0, found.tokens)
    return found


def names(line: Sequence[Session]) -> str:
    return " ".join(one.id for one in line)


def test_priority_exchanges_a_tenant_s_own_places() -> None:
    line = [session("a", 1), session("b", 2), session("a", 3, 9), session("b", 4), session("a", 5, 2)]
    assert names(by_priority(line)) == "a3 b2 a5 b4 a1"
    alone = [session("a", 1), session("a", 2, 5), session("a", 3, -1)]
    assert names(by_priority(alone)) == "a2 a1 a3"


def test_places_keep_their_tenants_whatever_a_policy_wants() -> None:
    line = [session("a", 1), session("b", 2), session("b", 3), session("a", 4)]
    assert names(exchanged(line, reversed(line))) == "a4 b3 b2 a1"


# The two that displace do over again what A's turns take from each other, and that takes B's time.
@pytest.mark.parametrize("policy", sorted({*policy_names()} - {"feedback", "programs"}))
def test_another_tenant_s_priority_neither_passes_nor_preempts(policy: str) -> None:
    """A floods with the highest priority there is; B's turn, which came before, runs as if A had none."""

    def course(priority: int) -> list[tuple[str, int]]:
        rig = Rig(pages=(16,), max_num_seqs=2, scheduling=SchedulingConfig(policy=policy))
        rig.submit("b", range(20), tenant="b", max_tokens=16)
        for number in range(4):
            rig.submit(f"a{number}", range(100 * number + 50, 100 * number + 70), tenant="a", max_tokens=16)
        rig.submit("loud", range(900, 920), tenant="a", max_tokens=16, priority=priority)
        rig.submit("b2", range(700, 720), tenant="b", max_tokens=16)
        rig.drain()
        return [(name, rig.ended(name).usage.ended) for name in ("b", "b2")] + [
            ("preempted", rig.ended("b").usage.preemptions)
        ]

    assert course(1_000_000) == course(0)


@pytest.mark.parametrize("policy", policy_names())
def test_within_a_tenant_it_counts(policy: str) -> None:
    rig = Rig(pages=(64,), max_num_seqs=1, scheduling=SchedulingConfig(policy=policy))
    rig.submit("first", range(8), tenant="a", max_tokens=4)
    rig.step()
    for name, priority in (("low", -1), ("plain", 0), ("high", 7)):
        rig.submit(name, range(8), tenant="a", max_tokens=2, priority=priority)
    rig.drain()
    ended = sorted(("low", "plain", "high"), key=lambda name: rig.ended(name).usage.ended)
    assert ended == ["high", "plain", "low"]


# --- what is learned -----------------------------------------------------------------------


def park(name: str, tenant: str, at: float, turn: int = 1, **hints: float) -> Park:
    said = Hints(**hints)  # type: ignore[arg-type]
    return Park(name, at, Rest.TOOL, turn, ("search",), 400, 100, 100, 0.0, 0.0, said, tenant)


def market(now: float) -> Market:
    return Market(now, 200, 50, 60, 1, 0.5, 400, 200, 1000, 500, 3, PRICES)


def live(policy: Policy, tenant: str, seconds: float, turns: int, **hints: float) -> None:
    for turn in range(turns):
        at = 1000.0 * turn
        policy.parked(park(f"{tenant}1", tenant, at, turn, **hints))
        policy.resumed(f"{tenant}1", at + seconds, seconds)


def test_what_one_tenant_s_tools_take_says_nothing_of_another_s() -> None:
    def expected(before: bool) -> tuple[list[float], float, float]:
        outlook = Outlook()
        if before:
            for turn in range(200):
                at = 1000.0 * turn
                outlook.parked(park("a1", "a", at, turn, expected_wait=1.0))
                outlook.came("a1", 300.0)
            outlook.parked(park("a2", "a", 0.0))
            outlook.gone("a2", 500.0, Departure.ABANDONED)
        outlook.parked(park("b1", "b", 5e5, expected_wait=20.0))
        found = outlook.wait("b1", 5e5)
        assert found is not None
        wait = [found[0].quantile(q) for q in (0.1, 0.5, 0.9)]
        return wait, outlook.resume("b1", 5e5 + 10, None), outlook.trust("b1")

    assert expected(before=True) == expected(before=False)
    outlook = Outlook()
    for turn in range(200):
        outlook.parked(park("b0", "b", 1000.0 * turn, turn))
        outlook.came("b0", 300.0)
    outlook.parked(park("b1", "b", 5e5, expected_wait=20.0))
    own = outlook.wait("b1", 5e5)
    assert own is not None
    assert own[0].quantile(0.5) != expected(before=False)[0][1]  # the control: its own does


def test_how_loudly_others_speak_does_not_make_one_s_word_less() -> None:
    quiet, loud = PricedPolicy(), PricedPolicy()
    live(loud, "a", 5.0, 100, priority=2)
    for policy in (quiet, loud):
        policy.parked(park("b1", "b", 2e5, priority=1))
    here = market(2e5)
    assert quiet.rank("b1", 2e5, here) == loud.rank("b1", 2e5, here)
    live(quiet, "b", 5.0, 100, priority=2)
    assert quiet.rank("b1", 2e5, here) != loud.rank("b1", 2e5, here)  # its own does


@pytest.mark.parametrize("name", ["continuum", "infercept"])
def test_published_policies_learn_of_each_tenant_apart(name: str) -> None:
    def decided(before: str) -> object:
        policy = policy_named(name, PRICES)
        live(policy, "a", 0.01, 150)
        live(policy, before, 900.0, 150)
        policy.parked(park("b9", "b", 5e5))
        policy.signalled("b9", Signal.CONNECTED, 5e5, Hints())
        return policy.decide("b9", Residency(100, 0, 0, 0), market(5e5))

    assert decided("a") == decided("c")


def test_what_is_learned_is_bounded_and_goes_by_tenant() -> None:
    learned = LearnedByTenant(WaitSettings(max_names=256))
    for tenant in range(1000):
        learned.heard(str(tenant)).curves.started("s", ("tool",), 0.0)
    assert len(learned) == 256
    assert learned.of("999") is not None
    assert learned.of("0") is None
    for number in range(110):
        for tenant in range(20):
            curves = learned.heard(f"many{tenant}").curves
            curves.started(f"s{number}", (f"tool{number}",), 0.0)
    assert sum(one.curves.known for one in learned._of.values()) <= 2048 + 1


def test_operators_see_all_tenants_waits_together() -> None:
    policy = PricedPolicy()
    live(policy, "a", 5.0, 3)
    live(policy, "b", 5.0, 4)
    assert policy.predicted["search"][0] == 7
