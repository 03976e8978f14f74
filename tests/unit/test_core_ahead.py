"""Prefill ahead: what is computed of a prompt that is not here yet, and in whose time."""

from __future__ import annotations

import pytest

from agentserve.core.ahead import EXAMINED, SHARE
from agentserve.core.cost import StepCost
from agentserve.core.states import Phase
from agentserve.messages import AheadCounts, Fork, ResetPrefixCache
from agentserve.types import SessionId
from tests.ahead_rig import MORE, chunks, quiet, take, tell, waiting
from tests.engines import Rig, cold

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


def test_beside_turns_it_takes_a_page_of_a_step_however_much_is_told() -> None:
    rig = Rig((256,), max_batched_tokens=256)
    contexts = {name: waiting(rig, name, [ord(name) * 10 + i for i in range(10)]) for name in "xyz"}
    more = [500 + i for i in range(200)]
    rig.submit("b", [1, 2, 3], max_tokens=12)
    for name, context in contexts.items():
        tell(rig, name, context + more)
    beside, alone = 0, 0
    for plan in quiet(rig):
        ahead = sum(len(chunk.tokens) for chunk in plan.chunks if chunk.session != "b")
        if len(plan.chunks) > 1:
            beside = max(beside, ahead)
        elif chunks([plan], "b") == []:
            alone = max(alone, ahead)
    assert (beside, alone) == (rig.config.page_size, 256 // SHARE)
    assert rig.output("b") == cold([1, 2, 3], 12)


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
