"""Prefill ahead: what is computed of a prompt that is not here yet, in whose time, and what becomes of it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from agentserve.core.ahead import EXAMINED, SHARE
from agentserve.core.cost import StepCost
from agentserve.core.plan import Plan
from agentserve.core.states import Phase
from agentserve.messages import (
    Abort,
    AheadCounts,
    Close,
    Command,
    Devalue,
    Fork,
    Park,
    ResetPrefixCache,
    ToolSignal,
    pack_tokens,
)
from agentserve.types import SessionId, TurnId
from tests.engines import Rig, cold
from tiering.policy.base import Departure, Signal

MORE = list(range(500, 540))


def waiting(rig: Rig, name: str, prompt: list[int], count: int = 2) -> list[int]:
    """A session whose turn has ended in a tool call: its context."""
    turn = rig.submit(name, prompt, max_tokens=count)
    rig.drain()
    rig.core.handle(Park(SessionId(name), turn, waiting_tool=True), rig.now)
    rig._collect()
    return prompt + rig.output(name, turn)


def tell(rig: Rig, name: str, tokens: list[int], turn: int = 1) -> None:
    packed = pack_tokens(array("i", tokens))
    rig.core.handle(ToolSignal(SessionId(name), TurnId(turn), Signal.STREAMING, packed), rig.now)
    rig.core.check()


def quiet(rig: Rig, most: int = 100) -> list[Plan]:
    """Steps until there is nothing to compute any more: their plans."""
    plans = []
    for _ in range(most):
        plan = rig.step()
        if plan is None:
            return plans
        plans.append(plan)
    raise AssertionError("it goes on for ever")


def chunks(plans: list[Plan], name: str) -> list[tuple[int, int]]:
    return [
        (chunk.start, len(chunk.tokens)) for plan in plans for chunk in plan.chunks if chunk.session == name
    ]


def take(rig: Rig, name: str, prompt: list[int], turn: int = 2, count: int = 3) -> int:
    """The next turn: it says what a cold one would. Returns the prompt tokens that it computed."""
    rig.submit(name, prompt, max_tokens=count)
    before = len(rig.plans)
    rig.drain()
    assert rig.output(name, turn) == cold(prompt, count)
    usage = rig.ended(name, turn).usage
    rows = sum(length for _, length in chunks(rig.plans[before:], name))
    assert (usage.computed, usage.prompt - usage.cached) == (rows, rows - count + 1)
    return usage.prompt - usage.cached


# --- what it is for ---------------------------------------------------------------------------


def test_a_turn_computes_only_what_was_not_told_before() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    seen = len(rig.events)
    tell(rig, "a", context + MORE[:30])
    plans = quiet(rig)
    assert chunks(plans, "a") == [(11, 13), (24, 16), (40, 2)]  # all on page edges but the last
    assert all(chunk.sample is None for plan in plans for chunk in plan.chunks)
    assert rig.events[seen:] == [], "nobody hears of it"
    assert rig.core.sessions.get(SessionId("a")).phase is Phase.WAITING_TOOL  # type: ignore[union-attr]
    assert all(pool.live == 0 for pool in rig.core.kv.pools)
    assert rig.core.view().ahead == AheadCounts(31, 0)
    assert take(rig, "a", [*context, *MORE[:30], 7, 8]) == 2
    assert rig.core.view().ahead == AheadCounts(31, 31)


def test_news_extend_it_where_it_ended() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    for end in (5, 6, 6, 19, 33):
        tell(rig, "a", context + MORE[:end])
        quiet(rig)
    computed = [range(start, start + length) for start, length in chunks(rig.plans, "a")]
    positions = [position for places in computed for position in places]
    assert positions == list(range(len(context) + 33)), "each once"
    assert take(rig, "a", [*context, *MORE[:33], 7]) == 1


@pytest.mark.parametrize("same", [0, 3, 4, 17, 29])
def test_a_prompt_that_comes_out_otherwise_matches_what_is_the_same(same: int) -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE[:30])
    quiet(rig)
    assert take(rig, "a", context + MORE[:same] + [7] * 5) == 5
    assert rig.core.view().ahead == AheadCounts(31, same + 1)  # and the last token of the turn before


def test_a_turn_while_it_is_being_computed_begins_with_what_is_there() -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.step()
    assert take(rig, "a", [*context, *MORE, 7]) == len(context) + 41 - 16
    assert rig.core.view().ahead == AheadCounts(5, 5)


def test_what_was_dropped_meanwhile_is_computed_again() -> None:
    rig = Rig((64,))
    context = waiting(rig, "a", list(range(10)))
    rig.core.handle(ResetPrefixCache(1), rig.now)
    tell(rig, "a", context + MORE[:5])
    assert chunks(quiet(rig), "a") == [(0, 16), (16, 1)]
    assert take(rig, "a", [*context, *MORE[:5], 7]) == 1


def test_two_groups_and_a_child_that_shares() -> None:
    rig = Rig((64, 70))
    context = waiting(rig, "a", list(range(10)))
    rig.core.handle(Fork(SessionId("a"), SessionId("b"), 99), rig.now)
    tell(rig, "a", context + MORE[:9])
    quiet(rig)
    assert take(rig, "b", [*context, *MORE[:9], 7], turn=1) == 1, "by content, as all KV"
    assert rig.core.view().ahead == AheadCounts(10, 0), "but it was not computed for that turn"
    assert take(rig, "a", [*context, *MORE[:9], 8]) == 1
    assert rig.core.view().ahead == AheadCounts(10, 10)


# --- in whose time ----------------------------------------------------------------------------


def test_it_takes_a_share_of_a_step_and_no_more_than_is_left() -> None:
    rig = Rig((64,), max_batched_tokens=32)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.submit("b", [900 + i for i in range(60)], max_tokens=4)
    plans = quiet(rig)
    for plan in plans:
        rows = {str(chunk.session): len(chunk.tokens) for chunk in plan.chunks}
        assert sum(rows.values()) <= 32
        assert rows.get("a", 0) <= 32 // SHARE
    assert chunks(plans[:2], "b") == [(0, 32), (32, 28)]
    assert chunks(plans[:2], "a") == [(11, 1)], "the first step is full, four tokens end the second"
    assert sum(length for _, length in chunks(plans, "a")) == len(context) + len(MORE) - 11
    assert rig.output("b") == cold([900 + i for i in range(60)], 4)


def test_a_step_takes_no_longer_for_it_than_allowed() -> None:
    cost = StepCost(fixed=0.01, per_row=0.01, per_token=0.001)
    rig = Rig((64,), cost=cost, max_step_seconds=0.035)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.submit("b", [1, 2, 3], max_tokens=30)
    plans = quiet(rig)
    assert chunks(plans, "a")
    assert all(plan.predicted_seconds <= 0.035 for plan in plans)
    assert rig.output("b") == cold([1, 2, 3], 30)


def test_a_step_that_allows_no_page_of_it_leaves_it_out() -> None:
    rig = Rig((64,), cost=StepCost(per_token=0.01), max_step_seconds=0.03)
    context = waiting(rig, "a", [1, 2, 3, 4, 5, 6, 7])
    tell(rig, "a", context + MORE)
    assert quiet(rig) == []
    assert not rig.core.has_work


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"pages": (12,)}])
def test_while_anybody_waits_nothing_is_computed_ahead(limits: dict[str, object]) -> None:
    rig = Rig(**{"pages": (64,), **limits})  # type: ignore[arg-type]
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE[:5])
    for name in "bcd":
        rig.submit(name, [ord(name)] * 25, max_tokens=5)
    seen = 0
    while rig.core.has_work:
        plan = rig.step()
        assert plan is not None
        if rig.core.scheduler.waiting:
            seen += 1
            assert not chunks([plan], "a")
    assert seen > 2
    quiet(rig)
    assert chunks(rig.plans, "a")[-1][0] + chunks(rig.plans, "a")[-1][1] == len(context) + 5


def test_seats_bound_it() -> None:
    rig = Rig((64,), max_num_seqs=1)
    context = waiting(rig, "a", list(range(10)))
    tell(rig, "a", context + MORE)
    rig.submit("b", [1, 2, 3], max_tokens=4)
    plans = quiet(rig)
    assert {len(plan.chunks) for plan in plans} == {1}


def test_the_same_turns_are_admitted_at_the_same_time_with_and_without_it() -> None:
    """A pool that is always full, uploads all the time: no turn is computed a step later."""

    def run(streams: bool) -> list[list[tuple[str, int]]]:
        rig = Rig((24,), max_batched_tokens=16)
        contexts = {name: waiting(rig, name, [ord(name)] * 9) for name in "abc"}
        said = []
        for turn in range(30):
            if streams:
                for name, context in contexts.items():
                    tell(rig, name, [*context, *[turn % 7] * (turn + 1)])
            if turn % 3 == 0:
                rig.submit(f"t{turn}", [turn] * 21, max_tokens=6)
            plan = rig.step()
            said.append(
                [
                    (str(chunk.session), len(chunk.tokens))
                    for chunk in (plan.chunks if plan else ())
                    if chunk.session not in contexts
                ]
            )
        assert bool(rig.core.view().ahead.computed) == streams
        return said

    assert run(streams=True) == run(streams=False)


def test_each_in_turn() -> None:
    rig = Rig((200,), max_batched_tokens=32)
    names = [f"s{number}" for number in range(EXAMINED + 2)]
    contexts = {name: waiting(rig, name, [number] * 10) for number, name in enumerate(names)}
    for name, context in contexts.items():
        tell(rig, name, context + MORE[:21])
    plans = quiet(rig)
    assert [str(plan.chunks[0].session) for plan in plans[: len(names)]] == names
    for number, name in enumerate(names):
        assert chunks(plans, name)[-1] == (32, 1)
        assert take(rig, name, [*contexts[name], *MORE[:21], number]) == 1


# --- its end ----------------------------------------------------------------------------------


ENDS = {
    "close": Close(SessionId("a")),
    "devalue": Devalue(SessionId("a"), Departure.ABANDONED),
    "abort": Abort(SessionId("a"), TurnId(1)),
    "park": Park(SessionId("a"), TurnId(1), waiting_tool=False),
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
    assert rig.core.kv.cached_tokens(rig.core._namespace(""), array("i", context + MORE)) >= 8


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
