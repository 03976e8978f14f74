"""Deadlines of one tenant's tokens beside another one's prompts."""

from __future__ import annotations

import pytest

from agentserve.core.timekeeper import LEAST, PATIENCE
from agentserve.types import SessionId, Slo
from tests.promises_rig import COST, PromisesRig

FULL = COST.step([(0, 64)])


@pytest.mark.parametrize("over", [1.001, 1.01, 1.1, 1.5])
def test_a_promise_that_leaves_prompts_next_to_nothing_slows_them_by_a_bounded_factor(over: float) -> None:
    """Its tokens are due a hair after the fastest steps, so a page now and then would be all there is room
    for, and what it is early first (its first token was not due for long) hides how tight that is."""
    rig = PromisesRig((1200,), max_model_len=3000)
    decode = COST.step([(4, 1)])
    rig.submit("a", [1] * 4, tenant="hostile", slo=Slo(ttft=0.1, tbt=over * decode), max_tokens=2900)
    for _ in range(3):
        rig.step()
    began, length = rig.now, 512
    rig.submit("b", list(range(length)), tenant="other", max_tokens=1)
    most = PATIENCE + length / 64 * FULL / LEAST
    while not any(end.session == "b" for end in rig.all_ended()) and rig.now < began + most:
        rig.step()
    assert any(end.session == "b" for end in rig.all_ended())


def test_a_promise_that_can_be_kept_beside_prompts_is() -> None:
    rig = PromisesRig((700,), max_model_len=3000)
    rig.submit("a", [1] * 4, tenant="one", slo=Slo(ttft=0.3, tbt=0.03), max_tokens=400)
    for number in range(12):
        rig.submit(f"b{number}", [number] * 100, tenant="other", max_tokens=1)
    rig.drain()
    assert rig.ended("a").usage.kept == ("ttft", "tbt")
    assert not rig.core.view().promises.overruled


def test_a_gap_is_kept_however_early_a_turn_is_and_a_pace_lets_it_be_used_up() -> None:
    def longest_step(slo: Slo) -> float:
        rig = PromisesRig((1200,), max_model_len=3000)
        rig.submit("a", [1] * 4, tenant="one", slo=slo, max_tokens=1000)
        for _ in range(60):
            rig.step()
        rig.submit("b", list(range(600)), tenant="other", max_tokens=1)
        longest = 0.0
        while not any(end.session == "b" for end in rig.all_ended()):
            began = rig.now
            assert rig.step() is not None
            longest = max(longest, rig.now - began)
        rig.drain()
        assert rig.ended("a").usage.missed == ()
        return longest

    decode = COST.step([(1000, 1)])
    promised = 2 * decode
    assert promised < FULL, "the test is none else"
    assert longest_step(Slo(gap=promised)) <= promised
    assert longest_step(Slo(tbt=promised)) > promised


@pytest.mark.parametrize("gap", [None, 1.0], ids=["steps of any length", "steps cut for a decode"])
@pytest.mark.parametrize("begun", [64, 384])
def test_a_prompt_with_time_lets_go_first_who_is_wanted_sooner(begun: int, gap: float | None) -> None:
    """However much of it was read already, and whether it is tokens or time that a step is short of."""
    rig = PromisesRig((1200,), max_model_len=3000)
    if gap is not None:
        slo = Slo(gap=COST.step([(200, 1), (400, 24)]))
        rig.submit("a", [1] * 4, tenant="one", slo=slo, max_tokens=1000)
        rig.step()
    rig.submit("long", list(range(600)), tenant="other", slo=Slo(ttft=100.0), max_tokens=1)
    while (long := rig.core.sessions.get(SessionId("long"))) is None or long.computed < begun:
        rig.step()
    rig.submit("short", list(range(1000, 1060)), tenant="third", slo=Slo(ttft=4 * FULL), max_tokens=1)
    while not any(end.session == "short" for end in rig.all_ended()):
        rig.step()
    assert rig.ended("short").usage.missed == ()
    assert not any(end.session == "long" for end in rig.all_ended())
    while not any(end.session == "long" for end in rig.all_ended()):
        rig.step()
    assert rig.ended("long").usage.missed == ()


def test_a_long_prompt_that_is_wanted_sooner_does_not_wait_for_another_one() -> None:
    rig = PromisesRig((500,), max_model_len=3000)
    rig.submit("far", [1, *range(1500)], tenant="one", slo=Slo(ttft=100.0), max_tokens=1)
    rig.step()
    rig.submit("near", [2, *range(200)], tenant="one", slo=Slo(ttft=10 * FULL), max_tokens=1)
    rig.drain()
    assert [end.session for end in rig.all_ended()] == ["near", "far"]
    assert not any(end.usage.missed for end in rig.all_ended())
