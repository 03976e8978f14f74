"""Random histories of commands and steps, applied to a rig."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from hypothesis import strategies as st

from agentserve.messages import (
    Abort,
    Close,
    Devalue,
    Fork,
    Hint,
    Park,
    ResetPrefixCache,
    ToolSignal,
    pack_tokens,
)
from agentserve.types import FinishReason, SessionId
from tests.engines import Rig, cold
from tiering.policy.base import Departure, Hints, Signal, Span

SHARED = list(range(40))


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A prefix of a common run, then a few tokens of a small alphabet: many shared, many near misses."""
    shared = draw(st.integers(0, len(SHARED)))
    return SHARED[:shared] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))


PIECES = st.lists(st.integers(0, 2), min_size=1, max_size=20)

OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), prompts(), st.integers(1, 12), st.integers(0, 2)),
    st.tuples(st.just("extend"), st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("abort in flight"), st.integers(0, 5)),
    st.tuples(st.just("fork"), st.integers(0, 5), st.integers(1, 30)),
    st.tuples(st.just("fork in flight"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.integers(0, 5)),
    st.tuples(st.just("park"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("steps"), st.integers(1, 6)),
    st.tuples(st.just("submit"), st.integers(0, 5), prompts(), st.integers(4, 12), st.integers(0, 2)),
    st.tuples(st.just("reset")),
    st.tuples(st.just("told"), st.integers(0, 5), st.lists(st.integers(0, 2), max_size=40), st.booleans()),
    st.tuples(st.just("told in flight"), st.integers(0, 5), st.lists(st.integers(0, 2), max_size=20)),
    st.tuples(st.just("devalue in flight"), st.integers(0, 5)),
    st.tuples(
        st.just("upload"), st.integers(0, 5), st.lists(PIECES, min_size=1, max_size=3), st.integers(0, 3)
    ),
    st.tuples(st.just("result"), st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
    st.tuples(st.just("result in flight"), st.integers(0, 5)),
    st.tuples(st.just("fails"), st.integers(0, 5), PIECES, st.booleans(), st.booleans()),
)


# What only tiers take notice of, and more of what makes sessions come back.
TIER_OPERATIONS = st.one_of(
    OPERATIONS,
    st.tuples(st.just("pause"), st.sampled_from([0.003, 0.05, 1.0, 30.0])),
    st.tuples(st.just("park"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("extend"), st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
    st.tuples(st.just("come back"), st.integers(0, 5)),
    st.tuples(st.just("hint"), st.integers(0, 5), st.floats(0, 100)),
    st.tuples(st.just("signal"), st.integers(0, 5), st.sampled_from(list(Signal))),
    st.tuples(st.just("devalue"), st.integers(0, 5), st.sampled_from(list(Departure))),
)


class History:
    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.asked: dict[tuple[str, int], tuple[list[int], int]] = {}
        self.forks = 0
        self.told: dict[int, list[int]] = {}  # what was last said of a session's next prompt

    def session(self, number: int):  # type: ignore[no-untyped-def]
        return self.rig.core.sessions.get(SessionId(f"s{number}"))

    def submit(self, number: int, tokens: list[int], count: int, priority: int = 0) -> None:
        session = self.session(number)
        if session is not None and session.turn is not None:
            return
        turn = self.rig.submit(f"s{number}", tokens, max_tokens=count, priority=priority)
        self.asked[f"s{number}", turn] = (tokens, count)

    def tell(self, number: int, more: list[int], *, longer: bool = False) -> None:
        """A session at rest waits for a tool, whose output arrives; longer: more of what came before."""
        session = self.session(number)
        if session is None or session.turn is not None:
            return
        rig, before = self.rig, self.told.get(number, [])
        rig.core.handle(Park(session.id, session.last_turn, True), rig.now)
        tokens = [*(before if longer and before else session.tokens), *more]
        self.told[number] = tokens
        packed = pack_tokens(array("i", tokens))
        rig.core.handle(ToolSignal(session.id, session.last_turn, Signal.STREAMING, packed), rig.now)

    def fail(self, *, ran: bool, again: bool) -> None:
        """A step fails, before or after it has run, and so does what is run in its place, or not."""
        rig = self.rig
        plan = rig.core.begin_step(rig.now)
        if plan is None:
            return
        if ran:
            rig.executor.run(plan)
        rest = rig.core.fail_step(plan, "out of memory", rig.now)
        if rest is not None and again:
            assert rig.core.fail_step(rest, "out of memory", rig.now) is None
        elif rest is not None:
            rig.core.finish_step(rig.executor.run(rest), rig.now)

    def in_flight(self, happens: Callable[[], None]) -> None:
        rig = self.rig
        plan = rig.core.begin_step(rig.now)
        happens()
        rig.core.kv.check()
        rig.core.ahead.check()
        if plan is not None:
            rig.core.finish_step(rig.executor.run(plan), rig.now)

    def apply(self, operation: tuple) -> None:  # type: ignore[type-arg]
        rig = self.rig
        match operation:
            case ("submit", number, tokens, count, priority):
                self.submit(number, tokens, count, priority)
            case ("extend", number, more):
                session = self.session(number)
                if session is not None and session.turn is None and session.tokens:
                    self.submit(number, [*session.tokens, *more], 6)
            case ("steps", count):
                for _ in range(count):
                    rig.step()
            case ("abort", number):
                session = self.session(number)
                if session is not None and session.turn is not None:
                    rig.core.handle(Abort(session.id, session.turn.id), rig.now)
            case ("abort in flight", number):
                plan = rig.core.begin_step(rig.now)
                session = self.session(number)
                if session is not None and session.turn is not None:
                    rig.core.handle(Abort(session.id, session.turn.id), rig.now)
                if plan is not None:
                    rig.core.finish_step(rig.executor.run(plan), rig.now)
            case ("fork in flight", number):
                plan = rig.core.begin_step(rig.now)
                self.forks += 1
                rig.core.handle(Fork(SessionId(f"s{number}"), SessionId(f"f{self.forks}"), 99), rig.now)
                rig.core.check()
                if plan is not None:
                    rig.core.finish_step(rig.executor.run(plan), rig.now)
            case ("fork", number, length):
                self.forks += 1
                rig.core.handle(Fork(SessionId(f"s{number}"), SessionId(f"f{self.forks}"), length), rig.now)
                child = rig.core.sessions.get(SessionId(f"f{self.forks}"))
                if child is not None and child.tokens:
                    tokens = list(child.tokens)
                    turn = rig.submit(child.id, tokens, max_tokens=5)
                    self.asked[child.id, turn] = (tokens, 5)
            case ("close", number):
                rig.core.handle(Close(SessionId(f"s{number}")), rig.now)
            case ("park", number, waiting):
                session = self.session(number)
                if session is not None:
                    rig.core.handle(Park(session.id, session.last_turn, waiting), rig.now)
            case ("pause", seconds):
                rig.now += seconds
            case ("hint", number, wait):
                spans = (Span(0, 1 + int(wait), 90), Span(int(wait), None, 5))
                rig.core.handle(Hint(SessionId(f"s{number}"), Hints(wait, retain=spans)), rig.now)
            case ("signal", number, signal):
                session = self.session(number)
                if session is not None:
                    rig.core.handle(ToolSignal(session.id, session.last_turn, signal), rig.now)
            case ("come back", number):
                for signal in Signal:
                    self.apply(("signal", number, signal))
                self.apply(("extend", number, [1]))
            case ("devalue", number, why):
                rig.core.handle(Devalue(SessionId(f"s{number}"), why), rig.now)
            case ("told", number, more, longer):
                self.tell(number, more, longer=longer)
            case ("told in flight", number, more):
                self.in_flight(lambda: self.tell(number, more))
            case ("devalue in flight", number):
                gone = Devalue(SessionId(f"s{number}"), Departure.ABANDONED)
                self.in_flight(lambda: rig.core.handle(gone, rig.now))
            case ("upload", number, pieces, steps):
                for index, piece in enumerate(pieces):
                    self.tell(number, piece, longer=index > 0)
                    for _ in range(steps):
                        rig.step()
                if number in self.told:
                    self.submit(number, [*self.told[number], 2], 4)
            case ("result", number, more):
                if number in self.told:
                    self.submit(number, [*self.told[number], *more], 4)
            case ("result in flight", number):
                if number in self.told:
                    self.in_flight(lambda: self.submit(number, [*self.told[number], 1], 4))
            case ("fails", number, more, ran, again):
                self.tell(number, more)
                self.submit((number + 1) % 6, [*SHARED[:5], *more], 4)
                self.fail(ran=ran, again=again)
            case ("reset",):
                rig.core.handle(ResetPrefixCache(1), rig.now)
        rig._collect()

    def check_said(self) -> None:
        """Every turn ended, and said what a cold run says."""
        rig = self.rig
        for (name, turn), (tokens, count) in self.asked.items():
            ended, said = rig.ended(name, turn), rig.output(name, turn)
            if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert len(said) == min(count, rig.core.limit - len(tokens))
            assert said == cold(tokens, len(said)), f"{name}/{turn} said something else than a cold run"
