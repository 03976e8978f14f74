"""Published policies: their formulas and constants by hand, and what they decide from them."""

from __future__ import annotations

import math

import pytest

from tests.unit.policy_rig import PRICES, in_host, market, on_device, park
from tiering.policy.base import Choice, Departure, Hints, Prices, Rest
from tiering.policy.continuum import (
    ContinuumParameters,
    ContinuumPolicy,
    Correlation,
    best_ttl,
    exponential_ttl,
)
from tiering.policy.infercept import (
    InferCeptParameters,
    InferCeptPolicy,
    discard_waste,
    preserve_waste,
)
from tiering.policy.lru import LruPolicy
from tiering.policy.mori import MoriParameters, MoriPolicy
from tiering.policy.pin import PinPolicy
from tiering.policy.thunderagent import (
    ThunderAgentParameters,
    ThunderAgentPolicy,
    decayed,
    pause_score,
    restore_score,
)
from tiering.types import Tier

# --- lru -----------------------------------------------------------------------------------------


def test_lru_copies_what_rests_and_takes_the_oldest() -> None:
    policy = LruPolicy()
    policy.parked(park("old", 1.0))
    policy.parked(park("new", 2.0))
    policy.parked(park("busy", 0.0))
    policy.resumed("busy", 3.0, 3.0)
    assert policy.decide("old", on_device(), market()).choice is Choice.HOST
    assert policy.decide("old", on_device(), market(host=0)).choice is Choice.HOLD
    assert policy.decide("old", on_device(), market(disk=5)).choice is Choice.DISK
    order = sorted(("busy", "new", "old"), key=lambda s: policy.worth(s, Tier.DEVICE, on_device(), market()))
    assert order == ["old", "new", "busy"]
    assert policy.rank("new", 7.0, market()) == (7.0,)
    policy.gone("new", 4.0, Departure.SUPERSEDED)
    assert policy.worth("new", Tier.HOST, in_host(), market()) == 0.0
    policy.gone("old", 4.0, Departure.FINISHED)
    assert policy.decide("new", on_device(), market()).choice is Choice.DROP
    assert policy.decide("old", on_device(), market()).choice is Choice.DROP


# --- pin -----------------------------------------------------------------------------------------


def test_pins_hold_until_resumed_and_go_when_nothing_else_is_left() -> None:
    policy = PinPolicy()
    policy.parked(park("first", 1.0))
    policy.parked(park("second", 2.0))
    policy.parked(park("idle", 1e6, rest=Rest.IDLE, tools=()))
    assert policy.decide("first", on_device(), market(1e9, demand=500)).choice is Choice.HOLD
    assert policy.decide("first", on_device(), market()).until == math.inf
    assert policy.decide("idle", on_device(), market()).choice is Choice.HOST

    def worth(s: str) -> float:
        return policy.worth(s, Tier.DEVICE, on_device(), market())

    assert worth("idle") < worth("first") < worth("second")
    policy.resumed("second", 3.0, 1.0)
    assert worth("second") < worth("first")


# --- infercept -----------------------------------------------------------------------------------

# f(x) = 0.0279 ms x + 15.4 ms and saturation S = 384: the constants in its code.
ITS_BOX = Prices(1, (0.0, 1e-3), (0.0, 1e-3), (0.0, 0.0), (0.0, 0.0), (15.4e-3, 0.0279e-3, 0.0), 16)


def test_infercept_wastes_by_hand() -> None:
    """C = 1,536 in k = 4 chunks of 384: 0.0582544 s x 1,536 / 2 + 4 x 0.0261136 s x C_other."""
    assert preserve_waste(2.0, 1536) == 3072.0
    assert discard_waste(ITS_BOX, 1536, 0, 384) == pytest.approx(44.7393792)
    assert discard_waste(ITS_BOX, 1536, 1000, 384) == pytest.approx(44.7393792 + 104.4544)
    assert discard_waste(ITS_BOX, 0, 1000, 384) == 0.0


def test_infercept_preserves_as_long_as_that_wastes_less() -> None:
    """96 blocks of 16 tokens, 1,000 others' tokens stand by: even after 149.19 / 1,536 s = 97.1 ms."""
    policy = InferCeptPolicy()
    policy.parked(park(blocks=96))
    full = {"device": 1000, "device_free": 1000 - 96 - 62, "host": 0, "prices": ITS_BOX}  # 992 tokens
    even = (44.7393792 + 4 * 0.0261136 * 992) / 1536
    first = policy.decide("s", on_device(96), market(0.0, **full))
    assert (first.choice, first.until) == (Choice.HOLD, pytest.approx(even))
    assert policy.decide("s", on_device(96), market(even * 0.99, **full)).choice is Choice.HOLD
    assert policy.decide("s", on_device(96), market(even * 1.01, **full)).choice is Choice.DROP


def test_infercept_swaps_what_hides_behind_forward_passes() -> None:
    """1 ms per block and 50 ms passes: 50 blocks at once, then 50 more every 50 ms."""
    policy = InferCeptPolicy()
    for session in "abc":
        policy.parked(park(session, blocks=50))
    at = {"prices": ITS_BOX, "device": 4000}
    assert policy.decide("a", on_device(50), market(0.0, **at)).choice is Choice.HOST
    refused = policy.decide("b", on_device(50), market(0.001, **at))
    assert refused.choice is Choice.HOLD
    assert policy.decide("b", on_device(50), market(refused.until + 0.002, **at)).choice is Choice.HOST
    assert policy.decide("c", on_device(50), market(9.0, host_free=10, **at)).choice is not Choice.HOST


@pytest.mark.parametrize(
    ("kind", "mean", "choice"),
    [
        ("math", 9e-5, Choice.HOLD),
        ("qa", 0.69, Choice.HOLD),
        ("virtual env", 0.09, Choice.HOLD),
        ("chat", 28.6, Choice.DROP),
        ("image", 20.0, Choice.DROP),
        ("tts", 17.2, Choice.DROP),
        ("between", 5.0, Choice.HOST),
    ],
)
def test_infercept_thresholds_on_its_measured_interceptions(kind: str, mean: float, choice: Choice) -> None:
    policy = InferCeptPolicy(InferCeptParameters(heuristic=True))
    policy.parked(park("before", tools=(kind,)))
    policy.resumed("before", mean, mean)
    policy.parked(park(tools=(kind,)))
    assert policy.decide("s", on_device(), market()).choice is choice


def test_infercept_thresholds_on_the_elapsed_time_of_an_unknown_tool() -> None:
    policy = InferCeptPolicy(InferCeptParameters(heuristic=True))
    policy.parked(park())
    seen = [policy.decide("s", on_device(), market(t)) for t in (0.0, 3.9, 4.0, 6.9, 7.0)]
    assert [d.choice for d in seen] == [Choice.HOLD, Choice.HOLD, Choice.HOST, Choice.HOST, Choice.DROP]
    assert [d.until for d in seen] == [4.0, 4.0, 7.0, 7.0, math.inf]


def test_infercept_queues_by_first_arrival() -> None:
    policy = InferCeptPolicy()
    policy.parked(park(program=3.0))
    assert policy.rank("s", 100.0, market()) < policy.rank("new", 50.0, market())


# --- continuum -----------------------------------------------------------------------------------


def test_continuum_ttl_by_hand() -> None:
    """Nine calls of 1 s and one of 10 s: benefit 3 -> 0.9 x 3 - 1 = 1.7 at 1 s; 1 -> nothing pays;
    200 -> 0.9 x 200 - 1 = 179 at 1 s against 190 at 10 s."""
    samples = [1.0] * 9 + [10.0]
    assert best_ttl(samples, 3.0) == 1.0
    assert best_ttl(samples, 1.0) == 0.0
    assert best_ttl(samples, 200.0) == 10.0
    assert best_ttl([], 5.0) == 0.0
    assert exponential_ttl(2.0, 2.0 * math.e) == pytest.approx(2.0)
    assert exponential_ttl(2.0, 1.9) == 0.0


def test_continuum_eta_is_one_for_programs_of_one_length_and_less_for_mixed_ones() -> None:
    same = Correlation()
    for done in range(1, 11):
        same.add(done, 10 - done)
    assert same.value() == pytest.approx(-1.0)
    assert Correlation().value() is None
    policy = ContinuumPolicy()
    assert policy.eta == 1.0
    for name, turns in (("a", 2), ("b", 40), ("c", 3)):
        policy.parked(park(name, turn=turns))
        policy.gone(name, 1.0, Departure.FINISHED)
    assert 0.0 <= policy.eta < 1.0


def test_continuum_holds_for_its_ttl_and_not_longer() -> None:
    policy = ContinuumPolicy(ContinuumParameters(samples=10))
    for _ in range(12):
        policy.parked(park("x"))
        policy.resumed("x", 1.0, 1.0)
    policy.parked(park(at=100.0))  # recompute 1.61 s: benefit 1.61 > 1 s
    held = policy.decide("s", on_device(), market(100.0, host=0))
    assert (held.choice, held.until) == (Choice.HOLD, pytest.approx(101.0))
    assert policy.decide("s", on_device(), market(101.0, host=0)).choice is Choice.DROP
    assert policy.decide("s", on_device(), market(101.0)).choice is Choice.HOST
    policy.parked(park(at=200.0))  # with a host to reload from in 0.05 s nothing is worth 1 s
    assert policy.decide("s", on_device(), market(200.0)).choice is Choice.HOST


def test_continuum_falls_back_to_all_tools_then_to_an_exponential() -> None:
    policy = ContinuumPolicy()
    policy.parked(park())
    first = policy.decide("s", on_device(), market(host=0))
    assert first.until == pytest.approx(math.log(1.61))  # mean 1 s, benefit 1.61 s
    for _ in range(101):
        policy.parked(park("x", tools=("other",)))
        policy.resumed("x", 0.25, 0.25)
    policy.parked(park())
    assert policy.decide("s", on_device(), market(host=0)).until == pytest.approx(0.25)


@pytest.mark.parametrize(("mean", "ttl"), [(1.9, 2.0), (2.0, 2.0), (2.1, 0.0)])
def test_continuum_as_its_published_code(mean: float, ttl: float) -> None:
    policy = ContinuumPolicy(ContinuumParameters(public_code=True))
    policy.parked(park("x"))
    policy.resumed("x", mean, mean)
    policy.parked(park())
    decision = policy.decide("s", on_device(), market())
    assert (decision.choice is Choice.HOLD) == (ttl > 0)
    assert ttl == 0 or decision.until == ttl


def test_continuum_admits_preempted_then_held_then_by_program_and_unpins_the_latest() -> None:
    policy = ContinuumPolicy(ContinuumParameters(public_code=True))
    policy.parked(park("x"))
    policy.resumed("x", 1.0, 1.0)
    for name, program in (("early", 5.0), ("late", 9.0), ("missed", 1.0)):
        policy.parked(park(name, program=program))
        policy.decide(name, on_device(), market())
    worths = [policy.worth(s, Tier.DEVICE, on_device(), market()) for s in ("late", "early")]
    assert worths[0] < worths[1]
    policy.resumed("early", 1.0, 1.0)
    policy.resumed("late", 1.0, 1.0)
    policy.resumed("missed", 60.0, 60.0)
    policy.parked(park("preempted", rest=Rest.PRESSURE, program=99.0))
    order = sorted(("missed", "late", "preempted", "early"), key=lambda s: policy.rank(s, 0.0, market(60.0)))
    assert order == ["preempted", "early", "late", "missed"]


# --- thunderagent --------------------------------------------------------------------------------


def test_thunderagent_scores_and_decay() -> None:
    assert pause_score(1000, True) == 1.001
    assert restore_score(500, True) == 1.002
    assert pause_score(100, False) < pause_score(10**9, True)  # all acting ones before any reasoning one
    assert [decayed(1024, t, 1.0) for t in (0.0, 1.0, 10.0)] == [1024.0, 512.0, 1.0]
    p = ThunderAgentParameters()
    assert (p.round_seconds, p.buffer, p.forced, p.half_life) == (5.0, 100, 1800.0, 1.0)


def test_thunderagent_pauses_the_shortest_acting_and_restores_when_it_fits() -> None:
    """Capacity 16,000 tokens; 9,600 + 6,400 + 3,200 and 100 for each: the two shortest have to go."""
    policy = ThunderAgentPolicy()
    for name, blocks in (("long", 600), ("middle", 400), ("short", 200)):
        policy.parked(park(name, blocks=blocks))
    kept = policy.decide("long", on_device(600), market(0.0))
    assert (kept.choice, kept.until) == (Choice.HOLD, 5.0)
    assert set(policy.paused) == {"short"} or set(policy.paused) == {"short", "middle"}
    assert policy.decide("short", on_device(200), market(0.0)).choice is Choice.DROP
    # 9,600 + 6,400 + 200 reserved > 16,000: middle was paused too.
    assert policy.decide("middle", on_device(400), market(0.0)).choice is Choice.DROP
    assert policy.rank("new", 9.0, market(1.0)) < policy.rank("short", 1.0, market(1.0))
    # By the next round the long one has acted for 5 s and counts 300 tokens: both are restored,
    # the shorter first; and in the same round the pausing side, without decay, takes them again.
    policy.resumed("short", 5.0, 5.0)
    policy.gone("long", 5.0, Departure.FINISHED)
    assert policy.decide("middle", on_device(400), market(5.0)).choice is Choice.HOLD
    assert policy.paused == ()
    assert policy.rank("short", 1.0, market(5.0)) == (0.0, 1.0)


def test_thunderagent_restores_by_force_and_offloads_if_told_to() -> None:
    policy = ThunderAgentPolicy(ThunderAgentParameters(offload=True))
    policy.parked(park("long", blocks=900))
    policy.parked(park("short", blocks=200))
    assert policy.decide("short", on_device(200), market(0.0)).choice is Choice.HOST
    policy.resumed("long", 1.0, 1.0)
    policy.resumed("short", 1.0, 1.0)
    assert policy.rank("short", 1.0, market(1795.0))[0] == 1.0
    assert policy.paused == ("short",)
    policy.parked(park("long", 1799.0, blocks=900))
    policy.decide("long", on_device(900), market(1800.0))
    assert policy.paused == ("long",)  # short was forced in, so the acting one made room


# --- mori ----------------------------------------------------------------------------------------


def cycle(
    policy: MoriPolicy, name: str, acting: float, reasoning: float, times: int, blocks: int = 100
) -> None:
    for i in range(times):
        policy.parked(park(name, float(i), blocks, service=(i + 1) * reasoning, turn=i + 1))
        policy.resumed(name, i + acting, acting)


def test_mori_idleness_over_five_cycles() -> None:
    policy = MoriPolicy()
    assert MoriParameters().cycles == 5
    cycle(policy, "busy", 1.0, 9.0, 3)
    assert policy.idleness("busy") == pytest.approx(0.1)
    for i in range(5):  # five idle cycles push the busy ones out
        policy.parked(park("busy", 10.0 + i, service=27.0 + (i + 1) * 1.0))
        policy.resumed("busy", 19.0 + i, 9.0)
    assert policy.idleness("busy") == pytest.approx(0.9)
    assert policy.idleness("new") == 0.0


def test_mori_places_the_busy_on_the_device_the_idle_in_the_host_and_drops_the_rest() -> None:
    policy = MoriPolicy()
    for name, acting in (("a", 1.0), ("b", 5.0), ("c", 9.0)):
        cycle(policy, name, acting, 10.0 - acting, 5)
        policy.parked(park(name, 50.0, service=100.0))
    small = market(50.0, device=100, host=100)
    choices = {name: policy.decide(name, on_device(), small).choice for name in "abc"}
    assert choices["a"] is Choice.HOLD
    assert sorted((choices["b"].value, choices["c"].value)) == ["drop", "host"]
    assert choices["c"] is Choice.HOST  # the host lets its busier one go first

    def worth(name: str, tier: Tier) -> float:
        return policy.worth(name, tier, on_device(), small)

    policy.parked(park("x", 50.0))
    policy.gone("x", 51.0, Departure.ABANDONED)
    assert worth("x", Tier.DEVICE) < worth("c", Tier.DEVICE) < worth("a", Tier.DEVICE)
    assert worth("x", Tier.HOST) < worth("a", Tier.HOST) < worth("c", Tier.HOST)


def test_mori_is_sticky_and_promotes_the_least_idle_when_there_is_room() -> None:
    policy = MoriPolicy()
    for name, acting in (("a", 1.0), ("b", 9.0)):
        cycle(policy, name, acting, 10.0 - acting, 5)
        policy.parked(park(name, 50.0, service=100.0))
    assert policy.decide("b", on_device(), market(50.0, device=100)).choice is Choice.HOST
    # Idleness crosses over, but no capacity is: nobody moves.
    cycle(policy, "a", 99.0, 1.0, 5)
    policy.parked(park("a", 60.0, service=200.0))
    assert policy.decide("a", on_device(), market(60.0, device=100)).choice is Choice.HOLD
    assert policy.decide("b", in_host(), market(60.0, device=100)).choice is Choice.HOST
    policy.gone("a", 61.0, Departure.FINISHED)
    assert policy.decide("b", in_host(), market(70.0, device=100, device_free=100)).choice is Choice.RESTORE


def test_mori_waits_of_the_scheduler_are_not_idleness() -> None:
    policy = MoriPolicy()
    policy.parked(park(service=1.0))
    policy.resumed("s", 100.0, 1.0)  # the tool took 1 s of the 100
    assert policy.idleness("s") == 0.5


def test_hints_do_not_move_published_policies() -> None:
    for policy in (LruPolicy(), PinPolicy(), InferCeptPolicy(), ContinuumPolicy(), ThunderAgentPolicy(),
                   MoriPolicy()):  # fmt: skip
        policy.parked(park("a"))
        policy.parked(park("b", hints=Hints(expected_wait=1e6, priority=99)))
        a, b = (policy.decide(s, on_device(), market(0.0, prices=PRICES)) for s in "ab")
        assert a.choice is b.choice or policy.name == "infercept"  # a has taken the budget there
