"""Agents in real time: the live driver on a clock of the test's own, the HTTP driver on a mock server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import httpx
import msgspec
import pytest

from agentserve.bench.agents.live import LiveRun, Standstill
from agentserve.bench.agents.remote import Peer, RemoteRun
from agentserve.bench.agents.summary import Turn, summarise, table
from agentserve.bench.agents.words import WORDS, text_of
from agentserve.clock import VirtualClock
from agentserve.core.config import CoreConfig
from agentserve.core.cost import StepCost
from agentserve.core.engine import EngineCore
from agentserve.core.plan import Plan, StepResult
from agentserve.sim.executor import SimExecutor
from agentserve.sim.traces.agents import Ending, Run
from agentserve.sim.traces.draw import TraceSpec, bursts, draw_agent
from agentserve.sim.traces.hints import RawHint
from agentserve.sim.traces.players import Players
from agentserve.types import KVGroup
from tiering.policy.base import Hints
from tiering.types import Move, Transfer

SPEC = TraceSpec(prefix=20, task=40, result=8, output=4, turns=3.0, context_limit=400, sub_agents=0.2)
COST = StepCost(fixed=0.01, per_token=0.001)


def ignore(raw: RawHint, now: float) -> Hints:
    return Hints()


class Timed:
    """The simulator's executor, whose steps move the test's clock."""

    def __init__(self, inner: SimExecutor, clock: VirtualClock) -> None:
        self._inner = inner
        self._clock = clock

    def run(self, plan: Plan) -> StepResult:
        result = self._inner.run(plan)
        self._clock.advance_to(self._clock.now() + result.seconds)
        return result

    def define_grammar(self, grammar_id: str, compiled: str) -> None: ...
    def drop_grammar(self, grammar_id: str) -> None: ...


class Core(EngineCore):
    """A core whose plans may be withheld."""

    stuck = False

    def begin_step(self, now: float) -> Plan | None:
        return None if self.stuck else super().begin_step(now)


def live(agents: int = 12, pages: int = 400) -> tuple[LiveRun, Core, Players, VirtualClock]:
    clock = VirtualClock(100.0)
    core = Core(CoreConfig(page_size=4, max_batched_tokens=64), (KVGroup("full", (0,), 1),), (pages,), COST)
    players = Players(SPEC, 4, 1000, ignore, agents)
    executor = Timed(SimExecutor((pages,), 4, COST), clock)

    def sleep(seconds: float) -> None:
        clock.advance_to(clock.now() + max(seconds, 1e-6))

    return LiveRun(core, executor, players, clock, sleep=sleep), core, players, clock


def test_every_agent_is_played_to_its_end_on_a_real_core() -> None:
    run, core, players, clock = live()
    turns, seconds = run.run()
    expected = 0
    for number in range(12):
        agent = draw_agent(SPEC, number)
        children = [call.child for turn in agent.turns for call in turn.calls if call.child]
        expected += len(agent.turns) + sum(len(child.turns) for child in children)
    assert len(turns) == expected
    assert not players.refused
    assert seconds == pytest.approx(clock.now() - 100.0)
    assert all(turn.ttft > 0 and turn.seconds >= turn.ttft for turn in turns)
    assert all(len(turn.gaps) == turn.generated - 1 for turn in turns)
    assert sum(turn.cached for turn in turns if turn.resumed) > 0
    core.check()


def test_waits_pass_in_real_time() -> None:
    """A run is as long as the waits of its longest agent at least."""
    run, _, players, _ = live(agents=1)
    _, seconds = run.run()
    agent = draw_agent(SPEC, 0)
    assert agent.ending is not Ending.ABANDONED
    assert seconds > sum(turn.wait for turn in agent.turns if turn.calls)
    assert players.alive == 0


def test_an_engine_that_stands_still_is_told_of() -> None:
    run, core, _, _ = live()
    core.stuck = True
    with pytest.raises(Standstill, match="no step for 120 s"):
        run.run()


# --- over HTTP -----------------------------------------------------------------------------------


class Server:
    """An OpenAI-compatible server that streams as many words as it is asked for."""

    def __init__(self, *, fail_at: int | None = None, cut: bool = False) -> None:
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str] = []
        self._fail_at = fail_at
        self._cut = cut

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        if self._fail_at == len(self.bodies):
            return httpx.Response(503, json={"error": {"message": "busy"}})
        return httpx.Response(200, stream=_Events(self._lines(body)))

    def _lines(self, body: dict[str, object]) -> list[str]:
        count = int(str(body["max_tokens"]))
        events: list[dict[str, object]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": f"w{index} "}}]} for index in range(count)]
        usage = {
            "prompt_tokens": 50,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 7},
        }
        events.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return lines if self._cut else [*lines, "data: [DONE]\n\n"]


class _Events(httpx.AsyncByteStream):
    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line.encode()


class Naps:
    """Sleeping that takes no time and is written down."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


async def remote(server: Server, agents: int = 6, **changes: object) -> tuple[RemoteRun, Naps]:
    naps, ticks = Naps(), iter(range(1_000_000))
    spec = msgspec.structs.replace(SPEC, **changes)
    peer = Peer("http://peer/v1/", "m", "secret", min_tokens=True)
    run = RemoteRun(peer, spec, 3, agents, now=lambda: float(next(ticks)), sleep=naps)
    await run.run(httpx.MockTransport(server))
    return run, naps


async def test_a_peer_gets_the_same_sessions_as_text() -> None:
    server = Server()
    run, naps = await remote(server, sub_agents=0.0, compacts=0.0)
    spec = msgspec.structs.replace(SPEC, sub_agents=0.0, compacts=0.0)
    drawn = [draw_agent(spec, number) for number in range(6)]
    assert len(server.bodies) == sum(len(agent.turns) for agent in drawn) == len(run.turns)
    assert not run.errors
    assert set(server.keys) == {"Bearer secret"}
    for agent in drawn:
        task = {"role": "user", "content": text_of(agent.task)}
        own = [body for body in server.bodies if body["messages"][1] == task]  # type: ignore[index]
        assert [body["max_tokens"] for body in own] == [turn.output for turn in agent.turns]
        assert all(body["min_tokens"] == body["max_tokens"] and body["ignore_eos"] for body in own)
        histories: list[list[dict[str, str]]] = [body["messages"] for body in own]  # type: ignore[misc]
        for number, (one, other) in enumerate(pairwise(histories)):
            assert other[: len(one)] == one
            assert other[len(one)]["content"] == "".join(f"w{i} " for i in range(agent.turns[number].output))
            assert all(text_of(call.result) in other[-1]["content"] for call in agent.turns[number].calls)
        waits = [turn.wait for turn in agent.turns[:-1]]
        assert all(wait in naps.slept for wait in waits)
    assert {turn.cached for turn in run.turns} == {7}


async def test_sub_agents_are_played_beside_their_parents() -> None:
    server = Server()
    run, _ = await remote(server, sub_agents=1.0)
    spec = msgspec.structs.replace(SPEC, sub_agents=1.0)
    expected = 0
    for number in range(6):
        agent = draw_agent(spec, number)
        expected += len(agent.turns)
        for turn in agent.turns:
            expected += sum(len(call.child.turns) for call in turn.calls if call.child)
    assert len(run.turns) == expected > 12


async def test_a_failed_turn_ends_its_session_alone() -> None:
    run, _ = await remote(Server(fail_at=2))
    assert len(run.errors) == 1
    assert "status 503" in run.errors[0]
    assert len(run.turns) > 4


async def test_a_reply_that_breaks_off_is_an_error() -> None:
    run, _ = await remote(Server(cut=True), agents=2)
    assert len(run.errors) == 2
    assert "broke off" in run.errors[0]
    assert not run.turns


# --- figures ---------------------------------------------------------------------------------------


def test_a_summary_counts_what_is_in_time() -> None:
    quick = Turn(resumed=True, ttft=0.5, seconds=1.0, prompt=100, cached=90, generated=3, gaps=(0.1, 0.1))
    late = msgspec.structs.replace(quick, ttft=2.5)
    jerky = msgspec.structs.replace(quick, gaps=(0.1, 0.9))
    first = msgspec.structs.replace(quick, resumed=False, ttft=1.5)
    found = summarise([quick, late, jerky, first], ["a: broke", "b: broke"], 8.0)
    assert (found.turns, found.resumes, found.resumes_in_ttft, found.in_time) == (4, 3, 2, 2)
    assert found.turns_per_second == 0.5
    assert found.tokens_per_second == 1.5
    assert found.first_ttft_p50 == 1.5
    assert found.resume_ttft_max == 2.5
    assert (found.errors, found.error) == (2, "a: broke")
    assert table(found).row_count == 10


def test_nothing_is_a_summary_too() -> None:
    assert summarise([], [], 0.0).turns_per_second == 0.0


def test_a_run_is_always_the_same_text_of_so_many_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 150
    assert text_of(Run(5, 30)) == text_of(Run(5, 30)) != text_of(Run(6, 30))
    assert len(text_of(Run(5, 30)).split()) == 30


def test_lanes_bound_a_remote_burst() -> None:
    assert max(burst.size for _, burst in zip(range(200), bursts(SPEC, 3), strict=False)) == 3


def test_orders_without_a_mover_are_refused() -> None:
    run, _, _, _ = live()
    with pytest.raises(ValueError, match="nobody to move"):
        run._order([Transfer(1, Move.SAVE, ())])
