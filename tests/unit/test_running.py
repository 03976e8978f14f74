"""A turn in flight: continuous indexes, whole usage, and a continuation that carries all it has."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from agentserve.messages import StateChange, Submit, Token, TurnEnded, TurnUsage, pack_tokens, unpack_tokens
from agentserve.server.workers.running import RunningTurn
from agentserve.types import FinishReason, Sampling, SessionId, SessionState, Slo, TurnId

S, T = SessionId("s"), TurnId(3)


def submit(generated: int = 0) -> Submit:
    sampling = Sampling(max_tokens=9, min_tokens=4, seed=5, stop=("x",))
    return Submit(S, T, pack_tokens(array("i", [1, 2, 3])), sampling, "salt", 2, generated=generated)


def token(index: int) -> Token:
    return Token(S, T, index, 100 + index)


def ended(usage: TurnUsage) -> TurnEnded:
    return TurnEnded(S, T, FinishReason.STOP, usage)


async def drained(turn: RunningTurn) -> list[object]:
    return [event async for event in turn]


async def test_an_undisturbed_turn_passes_through_untouched() -> None:
    turn = RunningTurn(submit(), 1.0)
    usage = TurnUsage(3, 2, 2, 3, 0, 1.0, 2.0, 3.0, 4.0)
    events = [StateChange(S, T, SessionState.DECODING, 2.0), token(0), token(1), ended(usage)]
    for event in events:
        turn.accept(event, event.usage.ended if isinstance(event, TurnEnded) else 3.0)
    assert await drained(turn) == events
    assert turn.continuation().tokens != submit().tokens
    asked = msgspec.structs.replace(submit(), arrived=1.0)
    assert RunningTurn(submit(), 1.0).continuation() == asked


def test_a_continuation_is_the_same_turn_with_more_context() -> None:
    turn = RunningTurn(submit(), 1.0)
    for index in range(3):
        turn.accept(token(index), 2.0)
    turn.lost(5.0)
    moved = turn.continuation()
    assert unpack_tokens(moved.tokens).tolist() == [1, 2, 3, 100, 101, 102]
    assert moved.generated == 3
    assert (moved.sampling, moved.namespace, moved.priority) == (submit().sampling, "salt", 2)


async def test_the_wait_for_the_running_step_counts() -> None:
    turn = RunningTurn(submit(), 1.0)
    turn.accept(token(0), 7.5)  # the worker read the command at 4, after a step
    turn.accept(ended(TurnUsage(3, 0, 1, 3, 0, 4.0, 5.0, 7.0, 8.0)), 8.5)
    (_, last) = await drained(turn)
    assert isinstance(last, TurnEnded)
    assert last.usage == TurnUsage(3, 0, 1, 3, 0, 1.0, 5.0, 7.5, 8.0)


async def test_usage_of_a_moved_turn_is_the_whole_turns() -> None:
    turn = RunningTurn(submit(), 1.0)
    turn.accept(token(0), 2.5)
    turn.lost(5.0)
    turn.accept(token(1), 8.0)
    turn.accept(ended(TurnUsage(3, 90, 2, 4, 1, 6.0, 7.0, 8.0, 9.0)), 9.0)
    last = (await drained(turn))[-1]
    assert isinstance(last, TurnEnded)
    assert last.usage == TurnUsage(3, 3, 2, 4, 2, 1.0, 2.5, 2.5, 9.0)


def test_what_another_worker_begun_is_not_refused() -> None:
    turn = RunningTurn(msgspec.structs.replace(submit(), shed=True), 1.0)
    assert turn.continuation().shed
    turn.slot = 0
    turn.migrated(TurnUsage(3, 0, 0, 3, 1, 1.0, 2.0, 0.0, 4.0), 5.0)
    assert not turn.continuation().shed
    assert turn.continuation().arrived == 1.0, "it is as old as it was"


def test_a_repeated_or_lost_token_is_an_error() -> None:
    turn = RunningTurn(submit(), 1.0)
    turn.accept(token(0), 2.0)
    for index in (0, 2):
        with pytest.raises(ValueError, match=f"token {index} of a turn that has 1"):
            turn.accept(token(index), 3.0)


async def test_nothing_comes_after_the_end() -> None:
    turn = RunningTurn(submit(), 1.0)
    turn.end(FinishReason.ERROR, "why", 2.0)
    turn.end(FinishReason.ABORTED, "", 3.0)
    turn.accept(token(0), 4.0)
    (only,) = await drained(turn)
    assert isinstance(only, TurnEnded)
    assert (only.reason, only.error) == (FinishReason.ERROR, "why")


def test_a_turn_with_all_its_tokens_is_exhausted() -> None:
    turn = RunningTurn(submit(), 1.0)
    for index in range(9):
        assert not turn.exhausted
        turn.accept(token(index), 2.0)
    assert turn.exhausted


def promised() -> Submit:
    return msgspec.structs.replace(submit(), slo=Slo(ttft=5.0, tbt=1.0), shed=True)


def test_what_was_begun_is_not_shed_elsewhere() -> None:
    turn = RunningTurn(promised(), 1.0)
    assert turn.continuation().shed
    turn.slot = 0
    turn.migrated(TurnUsage(3, 0, 0, 3, 1, 1.0, 1.0, 0.0, 2.0), 2.0)
    assert not turn.continuation().shed
    again = RunningTurn(promised(), 1.0)
    again.lost(2.0)
    assert not again.continuation().shed
    assert again.continuation().arrived == 1.0, "its promise counts from where it began"


@pytest.mark.parametrize(("first", "kind"), [(5.5, "kept"), (6.5, "missed")])
async def test_a_turn_that_moved_is_judged_as_a_whole(first: float, kind: str) -> None:
    turn = RunningTurn(promised(), 1.0)
    turn.slot = 0
    turn.accept(token(0), first)
    earlier = TurnUsage(
        3, 0, 1, 3, 1, 1.0, 2.0, first, 7.0, missed=("tbt",), relegated=True, held={"pages": 2, "seats": 1}
    )
    turn.migrated(earlier, 7.0)
    turn.accept(token(1), 8.0)
    last_held = {"pages": 3}
    turn.accept(ended(TurnUsage(3, 0, 2, 4, 0, 1.0, 7.0, 8.0, 8.0, kept=("tbt",), held=last_held)), 8.0)
    last = (await drained(turn))[-1]
    assert isinstance(last, TurnEnded)
    usage = last.usage
    assert "tbt" in usage.missed
    assert "ttft" in getattr(usage, kind)
    assert not set(usage.kept) & set(usage.missed)
    assert usage.relegated
    assert usage.held == {"pages": 5, "seats": 1}
