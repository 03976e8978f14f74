"""Shadow tiers: what a policy would have cost, by keys alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.policy_rig import market
from tiering.policy.base import Choice
from tiering.policy.shadow import Race, ShadowTiers
from tiering.types import Tier

SMALL = market(device=250, host=200)


def test_lru_pays_for_what_was_pushed_out_and_loads_what_was_copied() -> None:
    lru = ShadowTiers()
    for session in "abc":  # 100 blocks each; the device has 250: half of a goes
        lru.parked(session, 100, SMALL)
        lru.place(session, Choice.HOST, SMALL)  # the slab has 200: a's copy goes
    assert lru.used(Tier.DEVICE) == 250
    assert lru.used(Tier.HOST) == 200
    assert lru.resumed("c", SMALL) == 0.0
    assert lru.resumed("a", SMALL) == pytest.approx(0.01 + 0.8)  # 50 blocks of 16 tokens computed
    assert lru.resumed("b", SMALL) == pytest.approx(0.001 + 0.5 * 0.05)  # a took 50 of b: loaded


def test_running_sessions_are_not_taken_from() -> None:
    lru = ShadowTiers()
    lru.parked("a", 200, SMALL)
    lru.resumed("a", SMALL)
    lru.parked("b", 100, SMALL)  # nothing to take: both stay
    assert lru.used(Tier.DEVICE) == 300
    assert lru.resumed("b", SMALL) == 0.0


def test_the_least_valued_goes_first_dropped_ones_before_all() -> None:
    worth = {"a": 3.0, "b": 1.0, "c": 2.0}
    tiers = ShadowTiers(lambda session, tier, residency: worth[session])
    for session in "abc":
        tiers.parked(session, 80, SMALL)
    tiers.place("c", Choice.DROP, SMALL)
    worth["d"] = 9.0
    tiers.parked("d", 100, SMALL)  # 90 too many: all of c, then 10 of b
    kept = {session: tiers.residency(session) for session in "abc"}
    assert [kept[s].device for s in "abc" if kept[s] is not None] == [80, 70, 0]


def test_a_restore_hides_the_reload() -> None:
    tiers = ShadowTiers()
    tiers.parked("a", 100, SMALL)
    tiers.place("a", Choice.HOST, SMALL)
    tiers.parked("b", 250, SMALL)
    tiers.finished("b")
    tiers.place("a", Choice.RESTORE, SMALL)
    assert tiers.resumed("a", SMALL) == 0.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["park", "resume", "finish", *Choice]), st.sampled_from("abcdef"), st.integers(1, 120)
    ),
    max_size=60,
)


@settings(deadline=None)
@given(EVENTS, st.booleans())
def test_what_is_used_is_what_is_kept(events: list[tuple[object, str, int]], valued: bool) -> None:
    at = market(device=250, host=200, disk=150)
    tiers = ShadowTiers((lambda session, tier, residency: float(ord(session))) if valued else None)
    for event, session, blocks in events:
        if event == "park":
            tiers.parked(session, blocks, at)
        elif event == "resume":
            assert tiers.resumed(session, at) >= 0.0
        elif event == "finish":
            tiers.finished(session)
        elif isinstance(event, Choice):
            tiers.place(session, event, at)
        assert tiers.used(Tier.HOST) <= 200
        assert tiers.used(Tier.DISK) <= 150
        kept = [tiers.residency(session) for session in "abcdef"]
        assert tiers.used(Tier.DEVICE) == sum(r.device for r in kept if r is not None)
    for session in "abcdef":
        tiers.finished(session)
    assert [tiers.used(tier) for tier in Tier] == [0, 0, 0]


def test_a_race_forgets_what_is_long_past() -> None:
    race = Race(turns=3, lead=0.02)
    race.ran(1.0, 1.0)
    assert not race.second_leads
    race.ran(1.0, 0.9)
    assert race.second_leads
    race.ran(0.5, 0.55)
    assert race.second_leads  # 2.5 against 2.45
    race.ran(0.0, 0.2)
    assert not race.second_leads  # 1.5 against 1.65
    assert race.takeovers == 1
