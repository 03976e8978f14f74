"""Turns that the queue cannot keep a promise to are not begun, and leave no trace."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agentserve.core.scheduling.settings import SchedulingConfig
from agentserve.messages import Park, PromiseCounts, StateChange, Submit, TurnEnded, pack_tokens
from agentserve.types import FinishReason, Sampling, SessionId, SessionState, Slo, TurnId
from tests.engines import cold
from tests.promises_rig import COST, PromisesRig

STEP = COST.step([(0, 64)])  # a full one


def crowded(turns: int, **config: object) -> PromisesRig:
    """Each of these is read in one step, and is wanted as soon as those who come then."""
    rig = PromisesRig((400,), **config)
    for number in range(turns):
        rig.submit(f"q{number}", [number] * 64, max_tokens=1, tenant="crowd", slo=Slo(ttft=4 * STEP))
    return rig


def test_a_queue_that_takes_too_long_refuses_and_says_when_to_come_back() -> None:
    rig = crowded(10, max_num_seqs=4)
    promised = Slo(ttft=4 * STEP)
    rig.submit("late", [77] * 64, tenant="crowd", slo=promised, shed=True)
    ended = rig.ended("late")
    assert ended.reason is FinishReason.SHED
    assert ended.wait == pytest.approx(7 * STEP, rel=0.2)
    assert ended.error.startswith("0.3 s were promised")
    assert rig.core.view().promises == PromiseCounts(shed=1)
    while rig.now < 1.0 + ended.wait:
        rig.step()
    again = rig.submit("late", [77] * 64, tenant="crowd", slo=promised, shed=True, max_tokens=2)
    rig.drain()
    assert rig.output("late", again) == cold([77] * 64, 2)
    assert rig.ended("late", again).usage.kept == ("ttft",)


def test_only_who_asks_for_it_is_refused() -> None:
    rig = crowded(10)
    rig.submit("no promise", [77] * 64, tenant="crowd", shed=True, max_tokens=1)
    rig.submit("serve me late", [78] * 64, tenant="crowd", slo=Slo(ttft=STEP), max_tokens=1)
    rig.drain()
    assert rig.ended("no promise").reason is FinishReason.LENGTH
    assert rig.ended("serve me late").reason is FinishReason.LENGTH
    assert rig.ended("serve me late").usage.missed == ("ttft",)


def test_what_could_not_be_kept_if_nobody_else_came_is_served_late() -> None:
    """To come back would change nothing."""
    rig = crowded(4)
    rig.submit("long", [77] * 640, tenant="crowd", slo=Slo(ttft=5 * STEP), shed=True, max_tokens=1)
    rig.submit("absurd", [78] * 5, tenant="crowd", slo=Slo(ttft=1e-6), shed=True, max_tokens=1)
    rig.submit("lax", [79] * 5, tenant="crowd", slo=Slo(total=1e300), shed=True, max_tokens=1)
    rig.drain()
    assert {rig.ended(name).reason for name in ("long", "absurd", "lax")} == {FinishReason.LENGTH}
    assert rig.ended("lax").usage.kept == ("total",)


def test_a_tenant_waits_for_its_share_not_for_all_of_anothers_queue() -> None:
    weights = {"light": 1.0, "heavy": 4.0}
    rig = crowded(20, scheduling=SchedulingConfig(weights=weights))
    rig.submit("light", [77] * 64, tenant="light", slo=Slo(ttft=4 * STEP), shed=True, max_tokens=1)
    rig.submit("heavy", [78] * 64, tenant="heavy", slo=Slo(ttft=4 * STEP), shed=True, max_tokens=1)
    rig.drain()
    for name in ("light", "heavy"):
        assert rig.ended(name).reason is FinishReason.LENGTH
        assert rig.ended(name).usage.kept == ("ttft",)
    fcfs = crowded(20, scheduling=SchedulingConfig(policy="chunked", weights=weights))
    fcfs.submit("heavy", [78] * 64, tenant="heavy", slo=Slo(ttft=4 * STEP), shed=True, max_tokens=1)
    assert fcfs.ended("heavy").reason is FinishReason.SHED, "there everybody waits for everybody"


def test_seats_that_stay_taken_are_seen_in_advance() -> None:
    rig = PromisesRig((400,), max_num_seqs=2)
    rig.submit("before", [5] * 8, max_tokens=100)
    rig.drain()  # so long do turns write here
    for number in range(4):
        rig.submit(f"w{number}", [number] * 8, max_tokens=100)
    rig.step()
    rig.step()
    rig.submit("late", [77] * 8, slo=Slo(ttft=5 * STEP), shed=True)
    assert rig.ended("late").reason is FinishReason.SHED


def test_what_has_its_kv_is_little_work() -> None:
    """An agent that comes back from its tool is refused for what is new, not for its history."""
    rig = PromisesRig((400,))
    rig.submit("agent", list(range(600)), max_tokens=1)
    rig.drain()
    slo = Slo(ttft=4 * STEP)
    back = [*range(600), *rig.output("agent"), 5]
    for number in range(2):
        rig.submit(f"q{number}", [900 + number] * 64, max_tokens=1)
    rig.submit("agent", back, slo=slo, shed=True, max_tokens=1)
    rig.submit("new", [*range(100, 700)], slo=slo, shed=True, max_tokens=1)
    rig.drain()
    assert rig.ended("agent", 2).usage.kept == ("ttft",)


def test_a_turn_that_moved_is_never_refused() -> None:
    rig = crowded(10)
    moved = Submit(
        SessionId("moved"),
        TurnId(1),
        pack_tokens(array("i", [*[77] * 64, *cold([77] * 64, 1)])),
        Sampling(max_tokens=3, temperature=0.0),
        tenant="crowd",
        slo=Slo(ttft=STEP, total=99.0),
        shed=True,
        generated=1,
        arrived=0.5,
    )
    rig.core.handle(moved, rig.now)
    rig.drain()
    usage = rig.ended("moved").usage
    assert usage.arrived == 0.5
    assert usage.kept == ("total",), "when its first token came its first worker knew"


@given(st.integers(1, 12), st.integers(1, 200), st.sampled_from([1e-6, STEP, 3 * STEP, 1e300]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_refused_turn_leaves_no_trace(queue: int, length: int, ttft: float, waits: bool) -> None:
    """Whatever follows is as if it had never been asked, in the same session too."""
    rigs = [PromisesRig((200,), max_num_seqs=3) for _ in range(2)]
    for rig in rigs:
        rig.submit("own", list(range(30)), max_tokens=2)
        rig.drain()
        rig.core.handle(Park(SessionId("own"), TurnId(1), waits), rig.now)
        for number in range(queue):
            rig.submit(f"q{number}", [500 + number] * 40, max_tokens=3, slo=Slo(ttft=ttft))
        rig.step()
    first, second = rigs
    prompt = [*range(30), *first.output("own"), *[7] * length]
    before = len(first.events)
    first.submit("own", prompt, slo=Slo(ttft=ttft), shed=True, max_tokens=2)
    first.submit("new", [*prompt, 8], slo=Slo(ttft=ttft), shed=True, max_tokens=2)
    refused = [one for one in first.events[before:] if isinstance(one, TurnEnded)]
    if len(refused) < 2:
        event("not both were refused")
        return
    event("refused")
    assert not any(isinstance(one, StateChange) for one in first.events[before:])
    session = first.core.sessions.get(SessionId("own"))
    assert session is not None
    assert session.state is (SessionState.WAITING_TOOL if waits else SessionState.IDLE)
    assert session.last_turn == 1
    assert first.core.sessions.get(SessionId("new")) is None
    for rig in rigs:
        rig.submit("own", prompt, max_tokens=2)
        rig.drain()
    assert _planned(first) == _planned(second)


def _planned(rig: PromisesRig) -> list:  # type: ignore[type-arg]
    """But for the numbers of turns: a refused one has used one up."""
    return [
        [(chunk.session, chunk.start, chunk.tokens, chunk.tables) for chunk in plan.chunks]
        for plan in rig.plans
    ]
