"""Agent traces: their statistics, that a seed is a history, and that they are played as written."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import islice, pairwise

import msgspec
import pytest

from agentserve.messages import (
    Close,
    Command,
    Devalue,
    Fork,
    Park,
    Submit,
    Token,
    ToolSignal,
    TurnEnded,
    TurnUsage,
    unpack_tokens,
)
from agentserve.sim.traces.agents import Agent, AgentTurn, Ending, Run
from agentserve.sim.traces.draw import SUB_AGENT, TraceSpec, bursts, draw_agent, mean_context, pressure
from agentserve.sim.traces.hints import AT_ONCE, NEVER, HintMix, RawHint, Teller
from agentserve.sim.traces.players import Players, known_waits
from agentserve.sim.traces.record import percentile
from agentserve.sim.traces.waits import CODING_TOOLS, PUBLISHED, pick, quantile
from agentserve.types import FinishReason
from tiering.policy.base import Departure, Hints, Signal

SMALL = TraceSpec(prefix=20, task=40, result=8, output=4, turns=4.0, context_limit=400)


def ignore(raw: RawHint, now: float) -> Hints:
    return Hints()


def agents(spec: TraceSpec, count: int) -> list[Agent]:
    return [draw_agent(spec, number) for number in range(count)]


# --- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "seconds"), PUBLISHED.items())
def test_waits_have_the_published_quantiles(share: float, seconds: float) -> None:
    """Exactly computed from the mixture: within 4 % at each of the four published points."""
    assert quantile(CODING_TOOLS, share) == pytest.approx(seconds, rel=0.04)


def test_drawn_waits_are_those_of_the_mixture() -> None:
    rng = random.Random(5)
    drawn = sorted(pick(CODING_TOOLS, rng).draw(rng) for _ in range(40_000))
    for share in (0.1, 0.5, 0.9, 0.99):
        assert percentile(drawn, share) == pytest.approx(quantile(CODING_TOOLS, share), rel=0.06)


def test_every_tool_is_a_mixture_and_they_differ() -> None:
    for tool in CODING_TOOLS:
        assert sum(mode.share for mode in tool.modes) == pytest.approx(1.0)
    assert sum(tool.weight for tool in CODING_TOOLS) == pytest.approx(1.0)
    medians = {tool.name: quantile((tool,), 0.5) for tool in CODING_TOOLS}
    assert medians["read_file"] < 1.0 < 3.0 < medians["run_tests"]


def test_few_calls_hold_most_of_the_time() -> None:
    rng = random.Random(6)
    drawn = sorted((pick(CODING_TOOLS, rng).draw(rng) for _ in range(20_000)), reverse=True)
    assert sum(drawn[:1000]) > 0.3 * sum(drawn)  # the slowest twentieth


def test_shares_of_endings_sub_agents_and_compactions_are_those_asked_for() -> None:
    spec = TraceSpec(sub_agents=0.2, abandoned=0.25, silent=0.5, compacts=0.4)
    drawn = agents(spec, 1500)
    endings = [agent.ending for agent in drawn]
    assert endings.count(Ending.ABANDONED) / 1500 == pytest.approx(0.25, abs=0.04)
    assert endings.count(Ending.SILENT) / 1500 == pytest.approx(0.375, abs=0.04)  # of those that stay
    long = [agent for agent in drawn if len(agent.turns) > 3 and agent.ending is Ending.CLOSED]
    compacted = sum(any(turn.summary for turn in agent.turns) for agent in long)
    assert compacted / len(long) == pytest.approx(0.4, abs=0.08)
    waits = [turn for agent in long for turn in agent.turns if turn.calls]
    called = sum(any(call.child for call in turn.calls) for turn in waits)
    assert called / len(waits) == pytest.approx(0.2, abs=0.03)
    assert mean_context(spec) == pytest.approx(
        sum(sum(agent.contexts()) for agent in drawn[:200]) / sum(len(agent.turns) for agent in drawn[:200])
    )


def test_bursts_have_the_mean_size_and_gap_and_leave_nobody_out() -> None:
    drawn = list(islice(bursts(TraceSpec(burst=3.0, gap=2.0), 1000), 4000))
    assert sum(burst.size for burst in drawn) / 4000 == pytest.approx(3.0, rel=0.05)
    assert sum(burst.gap for burst in drawn) / 4000 == pytest.approx(2.0, rel=0.06)
    assert all(one.first + one.size == other.first for one, other in pairwise(drawn))
    assert drawn[0].gap == 0.0
    parts = list(islice(bursts(TraceSpec(burst=3.0), 2), 4000))
    assert max(burst.size for burst in parts) == 2
    assert all(one.first + one.size == other.first for one, other in pairwise(parts))


def test_only_the_abandoned_wait_for_ever_and_only_at_their_end() -> None:
    for agent in agents(TraceSpec(abandoned=0.5), 200):
        waits = [turn.wait for turn in agent.turns if turn.calls]
        assert all(math.isfinite(wait) for wait in waits[:-1])
        ends = agent.turns[-1]
        assert bool(ends.calls) == (agent.ending is Ending.ABANDONED)
        assert not ends.calls or math.isinf(ends.wait)


def test_no_agent_outgrows_its_limit_by_more_than_an_answer() -> None:
    spec = TraceSpec(context_limit=3000, turns=30.0, sub_agents=0.3)
    assert max(max(agent.contexts()) for agent in agents(spec, 300)) <= 3000 + 4 * spec.output


# --- seeds ---------------------------------------------------------------------------------------


def test_one_seed_one_trace_and_another_seed_another() -> None:
    one, again, other = (agents(TraceSpec(seed=seed, events=True), 20) for seed in (3, 3, 4))
    assert one == again != other
    assert draw_agent(TraceSpec(seed=3, events=True), 7) == one[7]  # whoever comes before


def test_hints_and_events_change_what_is_said_and_nothing_else() -> None:
    """Policies with and without hints must be compared on the same agents."""

    def bare(agent: Agent) -> Agent:
        turns = []
        for turn in agent.turns:
            calls = tuple(
                msgspec.structs.replace(call, child=bare(call.child)) if call.child else call
                for call in turn.calls
            )
            turns.append(msgspec.structs.replace(turn, calls=calls, hint=None, early=None))
        return msgspec.structs.replace(agent, turns=tuple(turns))

    plain = [bare(agent) for agent in agents(TraceSpec(sub_agents=0.2), 50)]
    for mix in HintMix:
        told = agents(TraceSpec(sub_agents=0.2, hints=mix, events=True), 50)
        assert [bare(agent) for agent in told] == plain


def test_agents_of_a_kind_share_their_prefix() -> None:
    prefixes = [agent.prefix for agent in agents(TraceSpec(kinds=3), 100)]
    assert len(set(prefixes)) == 3
    assert prefixes[0].tokens(1000) == Run(prefixes[0].seed, prefixes[0].count).tokens(1000)


# --- hints ---------------------------------------------------------------------------------------


def told(mix: HintMix, waits: list[float]) -> list[float | None]:
    spec = TraceSpec(hints=mix)
    found: list[float | None] = []
    for seed, wait in enumerate(waits):
        rng = random.Random(f"{spec.seed} {seed}")
        hint = Teller(mix, rng).hint(wait, 7.0, rng)
        found.append(None if hint is None else hint.expected_wait)
    return found


def test_each_mix_lies_in_its_own_way() -> None:
    waits = [1.0] * 2000
    assert set(told(HintMix.NONE, waits)) == {None}
    assert set(told(HintMix.HONEST, waits)) == {1.0}
    assert set(told(HintMix.WRONG, waits)) == {7.0}
    noise = [math.log(value) for value in told(HintMix.NOISY, waits) if value]
    assert sum(noise) / 2000 == pytest.approx(0.0, abs=0.08)
    assert math.sqrt(sum(value * value for value in noise) / 2000) == pytest.approx(1.0, rel=0.08)
    lies = told(HintMix.HOSTILE, waits)
    kinds = {"nan" if value is not None and math.isnan(value) else value for value in lies}
    assert kinds == {"nan", AT_ONCE, NEVER}


def test_a_mixed_crowd_has_all_of_them() -> None:
    kinds = {Teller(HintMix.MIXED, random.Random(seed)).mix for seed in range(200)}
    assert kinds == set(HintMix) - {HintMix.MIXED}


# --- players -------------------------------------------------------------------------------------


class Server:
    """Answers every submitted turn one second later, with as many tokens as were asked for."""

    def __init__(self, players: Players) -> None:
        self.players = players
        self.now = 0.0
        self.log: list[tuple[float, Command]] = []
        self._running: list[tuple[float, Submit]] = []

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        for _ in range(100_000):
            for command in self.players.due(self.now):
                self.log.append((self.now, command))
                if isinstance(command, Submit):
                    self._running.append((self.now + 1.0, command))
            due = self.players.next_due()
            times = [when for when, _ in self._running] + ([] if due is None else [due])
            if not times or until():
                return
            self.now = max(self.now, min(times))
            self._answer()
        raise AssertionError("it does not end")

    def _answer(self) -> None:
        ready = [item for item in self._running if item[0] <= self.now]
        for item in ready:
            self._running.remove(item)
            submit = item[1]
            prompt, count = len(submit.tokens) // 4, submit.sampling.max_tokens
            for index in range(count):
                self.players.heard(Token(submit.session, submit.turn, index, index), self.now)
            usage = TurnUsage(prompt, 0, count, prompt + count - 1, 0, item[0] - 1, 0.0, item[0], item[0])
            self.players.heard(TurnEnded(submit.session, submit.turn, FinishReason.LENGTH, usage), self.now)

    def of(self, kind: type[Command], session: str) -> list[tuple[float, Command]]:
        return [
            (when, command)
            for when, command in self.log
            if isinstance(command, kind) and getattr(command, "session", "") == session
        ]


def play(spec: TraceSpec, count: int, lanes: int = 4) -> Server:
    server = Server(Players(spec, lanes, 1000, ignore, agents=count))
    server.run()
    return server


def test_every_turn_of_every_agent_is_played_with_its_waits_between() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=0.0, compacts=0.0)
    server = play(spec, 30)
    for agent in agents(spec, 30):
        submits = server.of(Submit, agent.name)
        assert len(submits) == len(agent.turns)
        for (before, _), (after, _), turn in zip(submits, submits[1:], agent.turns, strict=False):
            assert after - before == pytest.approx(1.0 + turn.wait)
        sizes = [len(command.tokens) // 4 for _, command in submits if isinstance(command, Submit)]
        ends = [size + turn.output for size, turn in zip(sizes, agent.turns, strict=True)]
        assert tuple(ends) == agent.contexts()
    assert server.players.alive == 0
    assert not server.players.refused


def test_a_resume_extends_what_was_said_and_counts_only_new_tokens_as_fresh() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=0.0, compacts=0.0)
    server = play(spec, 5)
    for agent in agents(spec, 5):
        submits = [command for _, command in server.of(Submit, agent.name) if isinstance(command, Submit)]
        for one, other in pairwise(submits):
            assert other.tokens.startswith(one.tokens)
    for turn in server.players.played:
        # The server of this test has no cache: all that was known before was computed again.
        known = turn.prompt - turn.fresh
        assert turn.recomputed == known
        assert turn.resumed == (turn.turn > 1)
        assert (known == 0) == (turn.turn == 1)


def test_endings_are_played_as_they_are() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=0.0, abandoned=0.4, silent=0.5)
    server = play(spec, 40)
    for agent in agents(spec, 40):
        parks = [command for _, command in server.of(Park, agent.name) if isinstance(command, Park)]
        assert bool(server.of(Close, agent.name)) == (agent.ending is Ending.CLOSED)
        if agent.ending is not Ending.CLOSED:
            assert parks[-1].waiting_tool == (agent.ending is Ending.ABANDONED)
        if agent.ending is Ending.ABANDONED:
            assert parks[-1].tools == tuple(call.tool for call in agent.turns[-1].calls)


def test_a_sub_agent_forks_its_parent_and_joins_as_the_result_of_a_call() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=1.0, context_limit=2000)
    server = play(spec, 6)
    agent = next(
        each for each in agents(spec, 6) if any(call.child for turn in each.turns for call in turn.calls)
    )
    number, turn = next(
        (number, turn) for number, turn in enumerate(agent.turns) if any(call.child for call in turn.calls)
    )
    child = turn.calls[0].child
    assert child is not None
    assert turn.calls[0].tool == SUB_AGENT
    forks = [command for _, command in server.of(Fork, agent.name) if isinstance(command, Fork)]
    assert forks[0].child == child.name
    parent_submits, child_submits = server.of(Submit, agent.name), server.of(Submit, child.name)
    assert len(child_submits) == len(child.turns)
    first = child_submits[0][1]
    assert isinstance(first, Submit)
    assert forks[0].length * 4 + child.task.count * 4 == len(first.tokens)
    joined = max(child_submits[-1][0] + 1.0, *(parent_submits[number][0] + 1.0 + call.wait
                                               for call in turn.calls[1:]), 0.0)  # fmt: skip
    assert parent_submits[number + 1][0] == pytest.approx(joined)


def test_a_compaction_shortens_the_history_and_says_so_only_with_events() -> None:
    spec = msgspec.structs.replace(SMALL, compacts=1.0, sub_agents=0.0, turns=6.0)
    for events in (False, True):
        given = msgspec.structs.replace(spec, events=events)
        server = play(given, 10)
        compacted = 0
        for agent in agents(given, 10):
            for number, turn in enumerate(agent.turns):
                if turn.summary is None:
                    continue
                compacted += 1
                submit = server.of(Submit, agent.name)[number][1]
                assert isinstance(submit, Submit)
                tokens = unpack_tokens(submit.tokens)
                prefix = agent.prefix.tokens(1000)
                assert tokens == prefix + turn.summary.tokens(1000)
                said = [command for _, command in server.of(Devalue, agent.name)]
                assert [one.why for one in said if isinstance(one, Devalue)] == (
                    [Departure.COMPACTED] if events else []
                )
        assert compacted


def test_a_signal_comes_before_its_result() -> None:
    spec = msgspec.structs.replace(SMALL, events=True, sub_agents=0.0)
    server = play(spec, 10)
    signals = 0
    for agent in agents(spec, 10):
        submits = server.of(Submit, agent.name)
        for when, command in server.of(ToolSignal, agent.name):
            assert isinstance(command, ToolSignal)
            assert command.signal is Signal.CONNECTED
            turn: AgentTurn = agent.turns[command.turn - 1]
            assert turn.early is not None
            assert submits[command.turn][0] - when == pytest.approx(turn.early)
            signals += 1
    assert signals > 10


def test_no_more_agents_than_lanes_and_bursts_start_together() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=0.0, burst=3.0, gap=0.001)
    server = Server(Players(spec, 5, 1000, ignore, agents=60))
    most = 0

    def watch() -> bool:
        nonlocal most
        most = max(most, server.players.alive)
        return False

    server.run(watch)
    assert most == 5
    begins = {agent.name: server.of(Submit, agent.name)[0][0] for agent in agents(spec, 55)
              if server.of(Submit, agent.name)}  # fmt: skip
    for burst in islice(bursts(spec, 5), 15):
        started = {begins[f"a{number}"] for number in range(burst.first, burst.first + burst.size)}
        assert len(started) == 1


def test_stopped_players_begin_nothing_new() -> None:
    server = Server(Players(SMALL, 4, 1000, ignore))
    server.run(lambda: server.now > 10)
    server.players.stop()
    seen = len(server.log)
    server.run()
    assert not any(isinstance(command, Submit) for _, command in server.log[seen:])


def test_who_knows_the_future_knows_every_wait() -> None:
    spec = msgspec.structs.replace(SMALL, sub_agents=0.5, abandoned=0.3)
    wait = known_waits(spec)
    for agent in agents(spec, 20):
        for number, turn in enumerate(agent.turns, 1):
            assert wait(agent.name, number) == turn.wait
            for call in turn.calls:
                if call.child is not None:
                    assert wait(call.child.name, 1) == call.child.turns[0].wait
    assert wait("a3", 99) == math.inf


def test_the_pressure_load_is_sixteen_equal_agents() -> None:
    drawn = agents(pressure(), 16)
    assert {len(agent.turns) for agent in drawn} == {4}
    assert {agent.contexts()[0] for agent in drawn} == {2932}
    assert all(turn.wait <= 10.0 for agent in drawn for turn in agent.turns[:-1])
    assert not any(len(turn.calls) > 1 for agent in drawn for turn in agent.turns)
