"""An agent that comes back from its tool does not wait behind whole prompts, and nobody waits for ever."""

from __future__ import annotations

from agentserve.core.plan import Plan
from agentserve.core.scheduling.registry import PATIENCE
from tests.engines import Rig, cold

STEP = 16  # tokens


def warm(rig: Rig, name: str) -> list[int]:
    """A session whose next turn needs few tokens; its context."""
    turn = rig.submit(name, range(8), max_tokens=1)
    rig.drain()
    return [*range(8), *rig.output(name, turn), 7]


def granted(plan: Plan | None) -> dict[str, int]:
    assert plan is not None
    return {str(chunk.session): len(chunk.tokens) for chunk in plan.chunks}


def test_a_short_turn_runs_beside_a_long_prompt() -> None:
    rig = Rig((64,), max_batched_tokens=STEP)
    context = warm(rig, "a")
    rig.submit("long", range(100, 200), max_tokens=1)
    assert granted(rig.step()) == {"long": STEP}
    turn = rig.submit("a", context, max_tokens=1)
    plan = granted(rig.step())
    assert plan["a"] <= 4  # what was not cached, at most a page
    assert plan["long"] >= STEP // 2
    assert rig.output("a", turn) == cold(context, 1)


def test_a_turn_of_half_a_step_is_finished_before_the_prompt_goes_on() -> None:
    rig = Rig((64,), max_batched_tokens=STEP)
    context = [*warm(rig, "a"), *range(50, 62)]
    rig.submit("long", range(100, 200), max_tokens=1)
    rig.step()
    turn = rig.submit("a", context, max_tokens=1)
    rig.step()
    rig.step()
    assert rig.output("a", turn) == cold(context, 1)
    assert rig.core.has_work, "the long prompt is not finished yet"


def test_short_turns_pass_a_prompt_that_has_not_waited_long() -> None:
    rig = Rig((64,), max_batched_tokens=STEP, max_num_seqs=1)
    context = warm(rig, "a")
    rig.submit("runs", [90, 91], max_tokens=2)
    rig.step()
    rig.submit("long", range(100, 200), max_tokens=1)
    rig.submit("a", context, max_tokens=1)
    rig.step()
    assert list(granted(rig.step())) == ["a"]


def test_nobody_is_passed_who_has_waited_for_long() -> None:
    rig = Rig((64,), max_batched_tokens=STEP, max_num_seqs=1)
    context = warm(rig, "a")
    rig.submit("runs", [90, 91], max_tokens=int(PATIENCE) + 3)
    rig.step()
    rig.submit("long", range(100, 200), max_tokens=1)
    for _ in range(int(PATIENCE) + 1):
        rig.step()
    rig.submit("a", context, max_tokens=1)
    while "runs" in (plan := granted(rig.step())):
        pass
    assert list(plan) == ["long"]


def test_no_room_is_left_for_a_turn_that_cannot_begin() -> None:
    rig = Rig((64,), max_batched_tokens=STEP, max_num_seqs=1)
    context = warm(rig, "a")
    rig.submit("long", range(100, 200), max_tokens=1)
    rig.step()
    rig.submit("a", context, max_tokens=1)
    assert granted(rig.step()) == {"long": STEP}


def test_a_step_of_one_page_is_not_cut_in_two() -> None:
    """Of half a page nothing can be computed: two lagging turns once gave each other up, and nothing ran."""
    rig = Rig((20,), max_batched_tokens=4)
    rig.submit("x", [5], max_tokens=1)
    rig.submit("y", [6], max_tokens=1)
    rig.submit("a", [0, 1, 2, 3, 4, 5, 0], max_tokens=1)
    rig.step()
    rig.submit("x", [5], max_tokens=1)
    rig.step()
    rig.submit("y", [6, *rig.output("y"), 0], max_tokens=1)
    rig.submit("b", [0] * 7, max_tokens=1, priority=1)
    rig.drain()  # every step has a chunk
    assert rig.output("b") == cold([0] * 7, 1)
    assert not any(usage.preemptions for usage in (rig.ended("a").usage, rig.ended("b").usage))
