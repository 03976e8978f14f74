"""Engine core: limits, order, preemption, ends of turns, refusals, accounting."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.plan import Sampled
from agentserve.core.states import TRANSITIONS, Happening, Phase, TransitionError, after, public_state
from agentserve.messages import Abort, Close, Describe, Description, Park, StateChange, Submit, pack_tokens
from agentserve.types import FinishReason, Sampling, SessionId, SessionState, TurnId
from tests.engines import Rig, cold


def states(rig: Rig, name: str) -> list[str]:
    return [e.state.value for e in rig.events if isinstance(e, StateChange) and e.session == name]


def chunks(plan) -> list[tuple[str, int, int]]:  # type: ignore[no-untyped-def]
    return [(chunk.session, chunk.start, len(chunk.tokens)) for chunk in plan.chunks]


def test_a_session_through_a_tool_call() -> None:
    rig = Rig(max_batched_tokens=8)
    turn = rig.submit("a", range(20), max_tokens=5)
    rig.drain()
    rig.core.handle(Park(SessionId("a"), turn, True), rig.now)
    rig._collect()
    session = rig.core.sessions.get(SessionId("a"))
    assert session is not None
    follow = [*session.tokens, 7, 7, 7]
    rig.submit("a", follow, max_tokens=2)
    rig.drain()
    turn_states = ["WAITING", "PREFILLING", "DECODING", "IDLE"]
    assert states(rig, "a") == [*turn_states, "WAITING_TOOL", *turn_states]
    usage = rig.ended("a", 2).usage
    assert (usage.prompt, usage.cached, usage.computed) == (28, 24, 5)  # the tail's last token and the result
    assert rig.output("a", 2) == cold(follow, 2)


def test_chunks_end_on_page_edges_unless_they_are_the_last() -> None:
    rig = Rig(max_batched_tokens=10)
    rig.submit("a", range(23), max_tokens=1)
    rig.drain()
    assert [chunks(plan)[0] for plan in rig.plans] == [("a", 0, 8), ("a", 8, 8), ("a", 16, 7)]
    assert ("a", "tokens") in rig.plans[0].reasons


def test_decodes_go_first_and_prefill_gets_the_rest() -> None:
    rig = Rig(max_batched_tokens=16, pages=(64,))
    for name in ("a", "b"):
        rig.submit(name, [1, 2, 3], max_tokens=30)
    rig.step()
    rig.submit("c", range(100, 140), max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert chunks(plan) == [("a", 3, 1), ("b", 3, 1), ("c", 0, 12)]


def test_the_youngest_is_preempted_and_says_the_same() -> None:
    rig = Rig(pages=(8,), max_num_seqs=4)
    for index, name in enumerate("abc"):
        rig.submit(name, [index] * 6, max_tokens=14)
    rig.drain()
    for index, name in enumerate("abc"):
        assert rig.output(name) == cold([index] * 6, 14)
    assert rig.ended("a").usage.preemptions == 0
    assert rig.ended("c").usage.preemptions > 0
    assert "PREEMPTED" in states(rig, "c")


def test_no_admission_in_a_step_with_a_preemption() -> None:
    rig = Rig(pages=(8,), max_num_seqs=8)
    for index in range(6):
        rig.submit(f"s{index}", [index] * 6, max_tokens=14)
    known: set[str] = set()
    while rig.core.has_work:
        plan = rig.step()
        assert plan is not None
        entered = {chunk.session for chunk in plan.chunks} - known
        preempted = {session for session, reason in plan.reasons if reason == "preempted"}
        assert not (entered and preempted)
        known = {session.id for session in rig.core.scheduler.running}


def test_prefills_that_block_each_other_do_not_wedge() -> None:
    """Gate off: prompts enter on their first pages, then all stand still. The youngest must go."""
    rig = Rig(pages=(10,), max_batched_tokens=8, full_input_gate=False, max_num_seqs=4, page_reserve=0.0)
    for index in range(4):
        rig.submit(f"s{index}", [index] * 30, max_tokens=3)
    rig.drain()
    for index in range(4):
        assert rig.output(f"s{index}") == cold([index] * 30, 3)


def test_the_gate_lets_nobody_in_whose_input_does_not_fit() -> None:
    rig = Rig(pages=(12,), max_batched_tokens=8, max_num_seqs=4)
    rig.submit("a", [1] * 30, max_tokens=2)
    rig.submit("b", [2] * 20, max_tokens=2)
    plan = rig.step()
    assert plan is not None
    assert ("b", "tokens") in plan.reasons or ("b", "gate") in plan.reasons
    while rig.core.scheduler.running[0].lag > 1:
        plan = rig.step()
    assert ("b", "gate") in plan.reasons  # type: ignore[union-attr]
    rig.drain()
    assert rig.ended("b").usage.preemptions == 0


def test_a_shared_prefix_is_computed_once_even_when_all_arrive_together() -> None:
    rig = Rig(pages=(64,), max_batched_tokens=16)
    shared = list(range(40))
    for index in range(4):
        rig.submit(f"s{index}", [*shared, 100 + index], max_tokens=2)
    rig.drain()
    rows = sum(len(chunk.tokens) for plan in rig.plans for chunk in plan.chunks)
    assert rows == 41 + 3 * 1 + 4
    assert [rig.ended(f"s{index}").usage.cached for index in range(4)] == [0, 40, 40, 40]


def test_cached_tokens_are_counted_once_and_recomputation_apart() -> None:
    """Random prompts share nothing: the hit rate stays zero however often they are preempted (class 40)."""
    rig = Rig(pages=(8,), max_num_seqs=4)
    for index in range(5):
        rig.submit(f"s{index}", [index] * 7, max_tokens=14)
    rig.drain()
    usages = [rig.ended(f"s{index}").usage for index in range(5)]
    assert sum(usage.preemptions for usage in usages) > 0
    assert sum(usage.cached for usage in usages) == 0
    assert sum(usage.prompt for usage in usages) == 35
    assert sum(usage.computed for usage in usages) > 35 + 5 * 13


def test_what_was_cached_and_then_lost_and_computed_does_not_count_as_cached() -> None:
    rig = Rig(pages=(12,), max_num_seqs=4, max_batched_tokens=16)
    shared = list(range(16))
    rig.submit("first", shared, max_tokens=1)
    rig.drain()
    rig.submit("old", [9] * 10, max_tokens=30)
    rig.step()
    rig.submit("young", [*shared, *range(50, 66)], max_tokens=2)
    rig.drain()
    usage = rig.ended("young").usage
    assert usage.preemptions > 0
    ran = {
        position
        for plan in rig.plans
        for chunk in plan.chunks
        if chunk.session == "young"
        for position in range(chunk.start, chunk.start + len(chunk.tokens))
        if position < 32
    }
    assert usage.cached == 32 - len(ran)


def test_looking_at_a_session_keeps_nothing_longer() -> None:
    def survivor(look: bool) -> int:
        rig = Rig(pages=(12,))
        for number in (1, 2):
            rig.submit(f"s{number}", [number] * 15, max_tokens=1)
            rig.drain()
        if look:
            rig.core.handle(Describe(1, SessionId("s1")), rig.now)
        rig.submit("other", [7] * 24, max_tokens=1)
        rig.drain()
        session = rig.core.sessions.get(SessionId("s1"))
        assert session is not None
        return rig.core.kv.cached_tokens(session.namespace, array("i", [1] * 15))

    assert survivor(look=True) == survivor(look=False) < 15


def test_what_can_never_fit_is_refused_and_the_others_run() -> None:
    rig = Rig(pages=(8,))
    rig.submit("big", range(28), max_tokens=1)
    rig.submit("ok", range(5), max_tokens=2)
    rig.drain()
    assert rig.ended("big").reason is FinishReason.REFUSED
    assert "KV pool" in rig.ended("big").error
    assert rig.output("ok") == cold(range(5), 2)
    rig.submit("fits", range(27), max_tokens=50)  # grows into the edge of the pool, alone
    rig.drain()
    assert rig.ended("fits").reason is FinishReason.LENGTH
    assert len(rig.output("fits")) == 1


@pytest.mark.parametrize("tokens", [[], [1] * 30])
def test_refusals_leave_no_trace(tokens: list[int]) -> None:
    rig = Rig(pages=(64,), max_model_len=30)
    rig.submit("a", tokens)
    assert rig.ended("a").reason is FinishReason.REFUSED
    assert not rig.core.has_work
    assert rig.core.sessions.get(SessionId("a")) is None


def test_a_second_turn_at_once_is_refused() -> None:
    rig = Rig()
    rig.submit("a", [1, 2])
    rig.submit("a", [1, 2, 3])
    assert rig.ended("a", 2).reason is FinishReason.REFUSED
    rig.drain()
    assert rig.ended("a", 1).reason is FinishReason.LENGTH


def test_abort_rolls_back_to_the_last_committed_turn() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3], max_tokens=2)
    rig.drain()
    session = rig.core.sessions.get(SessionId("a"))
    assert session is not None
    committed = list(session.tokens)
    turn = rig.submit("a", [*committed, 9], max_tokens=20)
    rig.step()
    rig.core.handle(Abort(SessionId("a"), turn), rig.now)
    rig._collect()
    assert list(session.tokens) == committed
    assert rig.ended("a", 2).reason is FinishReason.ABORTED
    assert not rig.core.has_work


def test_close_is_idempotent_and_ends_a_running_turn() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    rig.step()
    for _ in range(2):
        rig.core.handle(Close(SessionId("a")), rig.now)
        rig._collect()
    assert rig.ended("a").reason is FinishReason.ABORTED
    assert states(rig, "a")[-1] == "FINISHED"
    assert len(rig.core.sessions) == 0


def test_ends_of_a_turn() -> None:
    said = cold([5, 6], 8)
    rig = Rig(eos_token_ids=(said[2],))
    rig.submit("eos", [5, 6])
    rig.submit("ignored", [5, 6], ignore_eos=True)
    rig.submit("later", [5, 6], min_tokens=4)
    rig.submit("stop", [5, 6], ignore_eos=True, stop_token_ids=(said[4],))
    rig.drain()
    assert rig.output("eos") == said[:3]
    assert rig.ended("eos").reason is FinishReason.STOP
    assert rig.output("ignored") == said
    assert rig.ended("ignored").reason is FinishReason.LENGTH
    assert rig.output("later") == said
    assert rig.output("stop") == said[:5]


def test_a_moved_turn_goes_on_where_it_was() -> None:
    """A restarted worker gets the tokens so far, and counts from the turn's own prompt."""
    rig = Rig()
    said = cold([1, 2, 3], 8)
    tokens = pack_tokens(array("i", [1, 2, 3, *said[:3]]))
    rig.core.handle(Submit(SessionId("m"), TurnId(1), tokens, Sampling(max_tokens=8), generated=3), 0.0)
    rig._collect()
    rig.drain()
    assert rig.output("m") == said[3:]
    assert [e.index for e in rig.events if hasattr(e, "index")] == [3, 4, 5, 6, 7]
    assert rig.ended("m").usage.prompt == 3


def test_stale_and_failed_results() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    rig.submit("b", [4, 5, 6])
    plan = rig.core.begin_step(1.0)
    assert plan is not None
    result = rig.executor.run(plan)
    stale = replace(result.chunks[0], epoch=result.chunks[0].epoch + 1)
    failed = replace(result.chunks[1], error="logits are not finite", sampled=None)
    rig.core.finish_step(replace(result, chunks=(stale, failed)), 1.0)
    rig._collect()
    assert rig.output("a") == []
    assert rig.ended("b").reason is FinishReason.ERROR
    assert rig.ended("b").error == "logits are not finite"
    rig.drain()
    assert rig.output("a") == cold([1, 2, 3], 8)


def test_a_turn_that_is_at_fault_itself_is_refused_and_rolled_back() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    rig.submit("b", [4, 5, 6])
    plan = rig.core.begin_step(1.0)
    assert plan is not None
    result = rig.executor.run(plan)
    refused = replace(result.chunks[1], error="too ambiguous", refused=True, sampled=None)
    rig.core.finish_step(replace(result, chunks=(result.chunks[0], refused)), 1.0)
    rig._collect()
    assert (rig.ended("b").reason, rig.ended("b").error) == (FinishReason.REFUSED, "too ambiguous")
    rig.drain()
    assert rig.output("a") == cold([1, 2, 3], 8)
    turn = rig.submit("b", [4, 5, 6])
    rig.drain()
    assert rig.output("b", turn) == cold([4, 5, 6], 8)


def test_a_failed_step_fails_its_own_turns_only() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("a", [1, 2, 3])
    rig.submit("b", [4, 5, 6])
    plan = rig.core.begin_step(1.0)
    assert plan is not None
    rig.core.fail_step(plan, "out of memory", 1.0)
    rig._collect()
    assert rig.ended("a").error == "out of memory"
    rig.drain()
    assert rig.output("b") == cold([4, 5, 6], 8)


def test_an_executor_that_ends_a_turn() -> None:
    rig = Rig()
    rig.submit("a", [1, 2, 3])
    plan = rig.core.begin_step(1.0)
    assert plan is not None
    result = rig.executor.run(plan)
    ended = replace(result.chunks[0], sampled=Sampled(7, ended=True))
    rig.core.finish_step(replace(result, chunks=(ended,)), 1.0)
    rig._collect()
    assert rig.ended("a").reason is FinishReason.STOP


def test_priority_goes_before_age() -> None:
    rig = Rig(max_num_seqs=1)
    rig.submit("first", [1, 2], max_tokens=2)
    rig.submit("low", [3, 4], max_tokens=2, priority=-1)
    rig.submit("high", [5, 6], max_tokens=2, priority=1)
    rig.drain()
    order = [plan.chunks[0].session for plan in rig.plans]
    assert order == ["high", "high", "first", "first", "low", "low"]


def test_predicted_time_limits_a_chunk() -> None:
    cost = StepCost(fixed=0.1, per_row=0.0, per_token=0.01)
    rig = Rig(pages=(64,), cost=cost, max_batched_tokens=64, max_step_seconds=0.3)
    rig.submit("a", [1, 2, 3], max_tokens=20)
    rig.step()
    rig.submit("b", range(100, 150), max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert chunks(plan) == [("a", 3, 1), ("b", 0, 16)]  # 19 tokens fit in 0.19 s: 16 end on an edge
    assert plan.predicted_seconds <= 0.3
    assert ("b", "time") in plan.reasons


def test_predicted_time_limits_the_first_chunk_and_the_rows() -> None:
    cost = StepCost(fixed=0.1, per_row=0.05, per_token=0.01)
    rig = Rig(pages=(64,), cost=cost, max_batched_tokens=64, max_step_seconds=0.305, max_num_seqs=8)
    rig.submit("a", range(50), max_tokens=3)
    plan = rig.step()
    assert plan is not None
    assert chunks(plan) == [("a", 0, 12)]  # 15 tokens fit in 0.155 s
    for name in "bcde":
        rig.submit(name, [ord(name)] * 3, max_tokens=30)
    rig.drain()
    assert {name: rig.ended(name).reason for name in "abcde"} == dict.fromkeys("abcde", FinishReason.LENGTH)
    assert max(len(plan.chunks) for plan in rig.plans) == 3  # rows of 0.06 s in 0.205 s
    assert any(reason == "time" for plan in rig.plans for _, reason in plan.reasons)
    assert all(plan.predicted_seconds <= 0.305 + 1e-9 for plan in rig.plans)


def test_what_takes_longer_than_the_limit_runs_page_by_page() -> None:
    rig = Rig(pages=(64,), cost=StepCost(fixed=1.0), max_batched_tokens=64, max_step_seconds=0.3)
    rig.submit("a", range(10), max_tokens=2)
    rig.submit("b", range(20, 26), max_tokens=2)
    rig.drain()
    assert [len(plan.chunks) for plan in rig.plans] == [1] * len(rig.plans)
    assert [chunks(plan)[0][1:] for plan in rig.plans[:3]] == [(0, 4), (4, 4), (8, 2)]


def test_describe() -> None:
    rig = Rig()
    rig.submit("a", range(9), max_tokens=3)
    rig.drain()
    rig.core.handle(Describe(7, SessionId("a")), rig.now)
    (description,) = [e for e in rig.core.take_events() if isinstance(e, Description)]
    assert description.request == 7
    assert description.session is not None
    view = description.session
    assert (view.tokens, view.computed, view.pages) == (12, 11, 3)
    assert view.state is SessionState.IDLE


def test_transitions_are_a_table_and_unknown_events_are_errors() -> None:
    for phase in Phase:
        for happening in Happening:
            if (phase, happening) in TRANSITIONS:
                assert isinstance(after(phase, happening), Phase)
            else:
                with pytest.raises(TransitionError, match=happening.name):
                    after(phase, happening)
    assert public_state(Phase.RUNNING, 2) is SessionState.PREFILLING
    assert public_state(Phase.RUNNING, 1) is SessionState.DECODING
    reachable = {Phase.IDLE}
    for _ in Phase:
        reachable |= {end for (start, _), end in TRANSITIONS.items() if start in reachable}
    assert reachable == set(Phase)


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_size", 0), ("max_num_seqs", 0), ("max_batched_tokens", 3), ("page_reserve", 1.0)],
)
def test_bad_limits_stop_the_start(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        CoreConfig(**{"page_size": 4, "max_batched_tokens": 8, field: value})  # type: ignore[arg-type]
