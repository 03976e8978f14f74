"""Prefill ahead: what ends it, what it is not begun for, what bounds it, and steps that fail."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from agentserve.messages import (
    Abort,
    AheadCounts,
    Close,
    Command,
    Devalue,
    Park,
    ResetPrefixCache,
    ToolSignal,
)
from agentserve.types import SessionId, TurnId
from tests.ahead_rig import MORE, quiet, take, tell, waiting
from tests.engines import Rig, cold
from tiering.policy.base import Departure, Signal

# --- its end ----------------------------------------------------------------------------------


ENDS = {
    "close": Close(SessionId("a")),
    "devalue": Devalue(SessionId("a"), Departure.ABANDONED),
    "abort": Abort(SessionId("a"), TurnId(1)),
    "park": Park(SessionId("a"), TurnId(1), waiting_tool=False),
    "broken": ToolSignal(SessionId("a"), TurnId(1), Signal.BROKEN),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("in_flight", [False, True])
def test_it_ends_at_once(end: Command, in_flight: bool) -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.step()
    if in_flight:
        plan = rig.core.begin_step(rig.now)
        assert plan is not None
        rig.core.handle(end, rig.now)
        rig.core.check()
        assert all(pool.live == 0 for pool in rig.core.kv.pools)
        rig.core.finish_step(rig.executor.run(plan), rig.now)
        rig._collect()
    else:
        rig.core.handle(end, rig.now)
    assert rig.step() is None
    assert rig.core.view().ahead.computed == 5
    assert rig.core.kv.cached_tokens(rig.core.namespaces.of(""), array("i", context + MORE)) >= 8


def test_a_turn_that_comes_while_its_chunk_runs() -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.step()
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    prompt = [*context, *MORE, 7]
    rig.submit("a", prompt, max_tokens=3)
    rig.core.finish_step(rig.executor.run(plan), rig.now)
    rig._collect()
    rig.drain()
    assert rig.output("a", 2) == cold(prompt, 3)
    assert rig.core.view().ahead == AheadCounts(5, 5), "the chunk in flight is nobody's"


def test_news_while_its_chunk_runs() -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    tell(rig, "a", [*context[:10], 8, 8, 8, 8, 8])
    rig.core.finish_step(rig.executor.run(plan), rig.now)
    rig._collect()
    quiet(rig)
    assert take(rig, "a", [*context[:10], 8, 8, 8, 8, 8, 9]) == 1
    assert rig.core.view().ahead.used == 5


def test_stopped_work_begins_again_with_news() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.core.handle(ENDS["devalue"], rig.now)
    assert rig.step() is None
    tell(rig, "a", context + MORE)
    assert quiet(rig)
    assert take(rig, "a", [*context, *MORE, 7]) == 1


def test_an_aborted_turn_leaves_no_claim() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    quiet(rig)
    turn = rig.submit("a", [*context, *MORE, 7])
    rig.core.handle(Abort(SessionId("a"), turn), rig.now)
    rig._collect()
    assert take(rig, "a", [*context, *MORE, 7], turn=3) == 1
    assert rig.core.view().ahead == AheadCounts(len(context) + 40 - 11, 0)


# --- what is ignored, and bounds --------------------------------------------------------------


def test_signals_that_are_not_for_it() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE, turn=7)
    tell(rig, "nobody", context + MORE)
    tell(rig, "a", [])
    assert rig.step() is None
    rig.core.handle(Park(SessionId("a"), TurnId(1), waiting_tool=False), rig.now)
    tell(rig, "a", context + MORE)
    assert rig.step() is None, "it waits for no tool"
    rig.submit("a", [*context, 7], max_tokens=3)
    tell(rig, "a", context + MORE, turn=2)
    rig.drain()
    assert rig.core.view().ahead == AheadCounts()


def test_without_a_prefix_cache_there_is_nothing_to_leave_it_in() -> None:
    rig = Rig((64,), prefix_cache=False)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    assert rig.step() is None


@pytest.mark.parametrize(("length", "computed"), [(59, 48), (60, 0), (61, 0), (5000, 0)])
def test_a_prompt_that_will_be_refused_is_not_computed(length: int, computed: int) -> None:
    rig = Rig((16,))
    assert rig.core.limit == 60
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", (context + [7] * length)[:length])
    quiet(rig)
    assert rig.core.view().ahead.computed == computed


def test_what_is_sent_again_and_again_is_bounded() -> None:
    """Output that turns out otherwise each time has a context's worth computed, and no more."""
    rig = Rig((16,))
    context = waiting(rig, "a", list(range(10)))
    for number in range(50):
        tell(rig, "a", context + [number] * 30)
        quiet(rig)
    assert rig.core.view().ahead.computed <= rig.core.limit
    prompt = context + [49] * 30
    take(rig, "a", prompt)
    rig.core.handle(Park(SessionId("a"), TurnId(2), waiting_tool=True), rig.now)
    after = rig.core.view().ahead.computed
    tell(rig, "a", [*prompt, *rig.output("a", 2), 7, 7], turn=2)
    quiet(rig)
    assert rig.core.view().ahead.computed == after + 3, "the next wait has its own"


def test_kv_that_is_taken_away_at_once_is_not_computed_for_ever() -> None:
    rig = Rig((16,), max_batched_tokens=16)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    for _ in range(100):
        rig.core.handle(ResetPrefixCache(1), rig.now)
        rig.step()
    assert rig.core.view().ahead.computed <= rig.core.limit
    take(rig, "a", [*context, *MORE, 7])


# --- failures ---------------------------------------------------------------------------------


def test_a_chunk_that_fails_is_left_to_the_turn() -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    rig.submit("b", [1, 2, 3], max_tokens=4)
    tell(rig, "a", context + MORE)
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    result = rig.executor.run(plan)
    bad = [replace(chunk, error="not finite") if chunk.session == "a" else chunk for chunk in result.chunks]
    rig.core.finish_step(replace(result, chunks=tuple(bad)), rig.now)
    rig._collect()
    rig.drain()
    assert rig.output("b") == cold([1, 2, 3], 4)
    tell(rig, "a", [*context, *MORE, 1])
    assert rig.step() is None, "not again before the turn"
    assert rig.core.view().ahead == AheadCounts()
    take(rig, "a", [*context, *MORE, 7])


def test_a_step_that_fails() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    seen = len(rig.events)
    tell(rig, "a", context + MORE)
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    rig.core.fail_step(plan, "out of memory", rig.now)
    rig._collect()
    assert rig.step() is None
    assert rig.events[seen:] == []
    assert all(pool.live == 0 for pool in rig.core.kv.pools)
    take(rig, "a", [*context, *MORE, 7])


@pytest.mark.parametrize("again", [False, True])
def test_turns_do_not_fail_for_what_was_computed_ahead_in_their_step(again: bool) -> None:
    """What else is in the plan is run in its place, copies included; they fail if that fails."""
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    waiting(rig, "c", list(range(200, 211)))
    prompt = [*range(200, 207), 1, 2, 3]  # its second page begins as that of c does
    rig.submit("b", prompt, max_tokens=4)
    tell(rig, "a", context + MORE)
    plan = rig.core.begin_step(rig.now)
    assert plan is not None
    assert [chunk.session for chunk in plan.chunks] == ["b", "a"]
    assert plan.copies
    rest = rig.core.fail_step(plan, "out of memory", rig.now)
    rig._collect()
    assert rest is not None
    assert rest == replace(plan, chunks=plan.chunks[:1], load=rest.load)
    assert rest.load is not None
    assert rest.load.tokens == rest.tokens
    if again:
        assert rig.core.fail_step(rest, "out of memory", rig.now) is None
        rig._collect()
        assert rig.ended("b").error == "out of memory"
        assert all(pool.live == 0 for pool in rig.core.kv.pools)
    else:
        rig.core.finish_step(rig.executor.run(rest), rig.now)
        rig._collect()
        rig.drain()
        assert rig.output("b") == cold(prompt, 4)
    assert rig.step() is None, "not again before its turn"
    assert rig.core.view().ahead == AheadCounts()
    take(rig, "a", [*context, *MORE, 7])
