"""Turns between workers, with made-up worker objects: who is asked, who goes, what each hears in which order,
and what becomes of a turn when something else happens meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from agentserve.messages import (
    Abort,
    Close,
    Command,
    Displaced,
    Event,
    Neighbour,
    PreemptionCounts,
    StateChange,
    StepDone,
    Submit,
    Token,
    TurnEnded,
    TurnUsage,
    Withdraw,
    Withdrawn,
    WorkerView,
    unpack_tokens,
)
from agentserve.server.workers.fleet import Fleet
from agentserve.server.workers.grammar_room import MAX_GRAMMAR_BYTES, MAX_GRAMMARS, surplus
from agentserve.server.workers.moving import MOST_MIGRATIONS, PAUSE, TOLD_EVERY
from agentserve.server.workers.running import RunningTurn
from agentserve.server.workers.tally import summed
from agentserve.types import FinishReason, SessionId, SessionState, TurnId
from tests.unit.test_fleet import POLICY, Starter, Worker, submit, until

S, T = SessionId("s"), TurnId(1)
VIEW = WorkerView(running=0, waiting=0, sessions=0, pages=100, pages_free=100, pages_cached=0, pages_live=0)


def view(**changed: int) -> WorkerView:
    return msgspec.structs.replace(VIEW, **changed)


def token(index: int, session: SessionId = S) -> Token:
    return Token(session, T, index, 50 + index)


def usage(**changed: float) -> TurnUsage:
    return msgspec.structs.replace(TurnUsage(2, 1, 2, 5, 1, 1.0, 2.0, 3.0, 4.0, swaps=1), **changed)


class SetClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class Town:
    """A fleet of workers that say what they are told to, on a clock that is set by hand."""

    def __init__(self, workers: int = 2, spare: int = 1) -> None:
        self.workers = [Worker() for _ in range(workers)]
        self.spare = [Worker() for _ in range(spare)]
        self.clock = SetClock()
        self.fleet = Fleet(Starter(*self.workers, *self.spare), workers, POLICY, self.clock)

    async def __aenter__(self) -> Town:
        await self.fleet.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.stop()

    def say(self, index: int, *events: Event, seen: WorkerView | None = None) -> None:
        """A worker tells this, and it is heard."""
        self.fleet._dispatch(self.fleet._slots[index], StepDone(list(events), seen))  # type: ignore[arg-type]

    def full(self, turns: int = 2, pages: int = 20) -> list[RunningTurn]:
        """Worker 0 runs so many turns, all at home there, and is full; the other one has room."""
        begun = []
        for number in range(turns):
            name = "s" if not number else f"s{number}"
            self.fleet._homes[SessionId(name)] = 0
            begun.append(self.fleet.submit(submit(name)))
        self.say(1, seen=view(pages_live=100 - pages - 10))
        self.clock.time += 1.0
        self.say(0, seen=view(running=turns, pages_live=100, pages_free=0))
        return begun

    def sent(self, index: int, kind: type[Command]) -> list[Command]:
        return [command for command in self.workers[index].sent if isinstance(command, kind)]


async def test_a_turn_goes_on_elsewhere_with_all_that_its_client_has_been_told() -> None:
    async with Town() as town:
        turn, _ = town.full()
        town.say(0, token(0), token(1), Displaced(S, T, 12))
        assert town.sent(0, Withdraw) == [Withdraw(S, T)]
        assert not town.sent(1, Submit), "not before it was given up"
        town.say(0, Withdrawn(S, T, usage()))
        (moved,) = town.sent(1, Submit)
        assert isinstance(moved, Submit)
        assert unpack_tokens(moved.tokens).tolist() == [1, 2, 50, 51]
        assert (moved.session, moved.turn, moved.generated) == (S, T, 2)
        assert not town.sent(0, Close), "what it has on disk is still to be read"
        town.say(0, token(2))  # it would be a fault; nobody hears it
        town.say(1, token(2))
        assert town.sent(0, Close) == [Close(S)]
        town.say(1, TurnEnded(S, T, FinishReason.STOP, usage(cached=0, computed=7, preemptions=2)))
        events = [event async for event in turn]
        assert [event.index for event in events if isinstance(event, Token)] == [0, 1, 2]
        (shown,) = [event for event in events if isinstance(event, StateChange)]
        assert (shown.state, shown.reason) == (SessionState.PREEMPTED, "pressure")
        last = events[-1]
        assert isinstance(last, TurnEnded)
        whole = last.usage
        assert (whole.prompt, whole.cached, whole.generated, whole.computed) == (2, 0, 3, 12)
        assert (whole.preemptions, whole.swaps, whole.migrations) == (3, 2, 1)
        assert town.fleet.holds(S)
        town.fleet.close(S)
        assert town.sent(1, Close) == [Close(S)], "its home is where it went"


async def test_nobody_is_asked_to_give_up_a_turn_that_has_nowhere_to_go() -> None:
    async with Town() as town:
        town.full(pages=20)
        town.say(0, Displaced(S, T, 21))  # a page more than a worker may be filled with
        town.say(0, Displaced(SessionId("nobody"), T, 1))
        town.say(1, Displaced(S, T, 1))  # it does not run there
        town.say(1, seen=view(waiting=1))
        town.say(0, Displaced(S, T, 1))
        town.fleet.submit(submit("elsewhere"))  # on its way to the other one: its pages are in no view yet
        town.say(1, seen=view())
        town.say(0, Displaced(S, T, 1))
        assert not town.sent(0, Withdraw)


async def test_a_turn_goes_to_who_has_fewer_turns() -> None:
    async with Town() as town:
        town.full(turns=1)
        for number in range(2):
            town.fleet.submit(submit(f"other{number}"))
        load = [turn.slot for turn in town.fleet._turns.values()].count(1)
        town.say(1, seen=view(running=load))
        town.say(0, seen=view(running=3 - load, pages_live=100))
        town.say(0, Displaced(S, T, 1))
        assert bool(town.sent(0, Withdraw)) == (load < 3 - load)


async def test_no_ping_pong() -> None:
    async with Town() as town:
        turn, *_ = town.full(turns=3)
        at = 0
        for move in range(MOST_MIGRATIONS + 2):
            before = len(town.sent(at, Withdraw))
            town.say(at, Displaced(S, T, 1))
            asked = len(town.sent(at, Withdraw)) > before
            assert asked == (move < MOST_MIGRATIONS)
            if not asked:
                continue
            town.say(at, Withdrawn(S, T, usage()))
            at = 1 - at
            assert turn.slot == at
            for number in range(2, 5):  # where it went others come
                town.fleet._homes[SessionId(f"m{move}{number}")] = at
                town.fleet.submit(submit(f"m{move}{number}"))
            load = [one.slot for one in town.fleet._turns.values()]
            for index in (0, 1):
                town.say(index, seen=view(running=load.count(index)))
            assert load.count(1 - at) < load.count(at)
            before = len(town.sent(at, Withdraw))
            town.say(at, Displaced(S, T, 1))
            assert len(town.sent(at, Withdraw)) == before, "too soon"
            town.clock.time += PAUSE
        assert turn.migrations == MOST_MIGRATIONS


async def test_one_that_runs_again_stays_and_may_be_asked_for_later() -> None:
    async with Town() as town:
        turn, _ = town.full()
        for _ in range(2):
            town.say(0, Displaced(S, T, 1), Displaced(S, T, 1))
            town.say(0, Withdrawn(S, T, None))
        assert len(town.sent(0, Withdraw)) == 2
        town.say(0, Withdrawn(S, T, usage()))  # nobody asked
        assert (turn.slot, turn.migrations) == (0, 0)
        assert not town.sent(1, Submit)


async def test_one_that_has_nowhere_to_go_any_more_goes_on_where_it_was() -> None:
    async with Town() as town:
        turn, _ = town.full()
        town.say(0, token(0), Displaced(S, T, 1))
        town.say(1, seen=view(waiting=3))
        town.say(0, Withdrawn(S, T, usage()))
        again = town.sent(0, Submit)[-1]
        assert isinstance(again, Submit)
        assert (again.session, again.generated) == (S, 1)
        town.say(0, token(1), TurnEnded(S, T, FinishReason.STOP, usage(preemptions=0, swaps=0)))
        assert not town.sent(0, Close)
        last = [event async for event in turn][-1]
        assert isinstance(last, TurnEnded)
        assert (last.usage.preemptions, last.usage.swaps, last.usage.migrations) == (1, 1, 0)


@pytest.mark.parametrize("closed", [False, True])
async def test_an_abort_while_it_leaves_ends_it(closed: bool) -> None:
    async with Town() as town:
        turn, _ = town.full()
        town.say(0, Displaced(S, T, 1))
        if closed:
            town.fleet.close(S)
        else:
            town.fleet.abort(S, T)
            assert town.sent(0, Abort) == [Abort(S, T)]
        town.say(0, Withdrawn(S, T, usage()))
        assert not town.sent(1, Submit)
        last = [event async for event in turn][-1]
        assert isinstance(last, TurnEnded)
        assert last.reason is FinishReason.ABORTED


async def test_the_worker_dies_that_a_turn_leaves_or_that_it_went_to() -> None:
    async with Town(spare=2) as town:
        turn, _ = town.full()
        town.say(0, token(0), Displaced(S, T, 1))
        town.workers[0].kill()  # before it has answered: as any turn of a worker that dies
        await until(lambda: bool(town.sent(1, Submit)))
        assert not turn.leaving
        assert (turn.slot, turn.moves, turn.migrations) == (1, 1, 0)
    async with Town(spare=2) as town:
        turn, _ = town.full()
        town.say(0, token(0), Displaced(S, T, 1))
        town.say(0, Withdrawn(S, T, usage()))
        assert turn.slot == 1
        town.workers[1].kill()  # before it has said anything
        await until(lambda: turn.slot == 0)
        again = town.sent(0, Submit)[-1]
        assert isinstance(again, Submit)
        assert (again.session, again.generated) == (S, 1)
        town.say(0, token(1), TurnEnded(S, T, FinishReason.STOP, usage(preemptions=0)))
        assert not town.sent(0, Close), "it is at home there again"
        last = [event async for event in turn][-1]
        assert isinstance(last, TurnEnded)
        assert (last.usage.preemptions, last.usage.migrations) == (2, 1)


async def test_workers_hear_what_room_the_others_have_but_not_at_every_step() -> None:
    async with Town() as town:
        town.say(1, seen=view(pages_live=40))
        assert town.sent(0, Neighbour) == []  # it has not said what it is
        town.clock.time += TOLD_EVERY
        town.say(0, seen=view(pages_live=100))
        assert town.sent(0, Neighbour) == [Neighbour(50)]
        assert town.sent(1, Neighbour) == []
        town.say(1, seen=view(pages_live=80))
        assert len(town.sent(0, Neighbour)) == 1, "too soon"
        town.clock.time += TOLD_EVERY
        town.say(1, seen=view(pages_live=42))
        assert len(town.sent(0, Neighbour)) == 1, "too little has changed"
        town.clock.time += TOLD_EVERY
        town.say(1, seen=view(pages_live=42, waiting=1))
        assert town.sent(0, Neighbour)[-1] == Neighbour(0)
        town.clock.time += TOLD_EVERY
        town.workers[0].kill()
        await until(lambda: town.fleet._slots[0].worker is town.spare[0])
        town.workers[0] = town.spare[0]
        town.say(1, seen=view(pages_live=30))
        assert town.sent(0, Neighbour) == [Neighbour(60)], "a new one has been told nothing"


async def test_one_worker_alone_hears_of_nobody() -> None:
    async with Town(workers=1) as town:
        town.clock.time += 1.0
        town.say(0, seen=view())
        assert not town.workers[0].sent


def test_counts_of_the_workers_of_a_place_add_up() -> None:
    one = PreemptionCounts({"decode": {"swap": 1}}, 2, 3, 4, 5)
    two = PreemptionCounts({"decode": {"swap": 1, "recompute": 2}, "seat": {"swap": 7}}, 1, 1, 1, 1)
    made = {"decode": {"swap": 2, "recompute": 2}, "seat": {"swap": 7}}
    assert summed(one, two) == PreemptionCounts(made, 3, 4, 5, 6)


def test_old_grammars_go_while_there_are_too_many_but_for_those_in_use() -> None:
    many = {str(number): "x" for number in range(MAX_GRAMMARS + 2)}
    assert surplus(many, {"0", None}) == ["1", "2"]
    large = {"a": "x" * (MAX_GRAMMAR_BYTES // 2), "b": "x", "c": "x" * (MAX_GRAMMAR_BYTES // 2)}
    assert surplus(large, set()) == ["a"]
    assert surplus({"a": "x" * (MAX_GRAMMAR_BYTES + 1)}, set()) == []
