"""Agents drawn from a seed. Agent number i of a spec is always the same, whoever asks and whenever.

Sources of the shape (figures of lengths are the spec's, since they have to fit the machine):
turns per agent have the spread of Continuum's SWE-bench runs (10.9 on average, long tail; arXiv
2511.02230); inputs are many times the outputs and contexts grow by tool results (131 : 1 and 80K tokens
at turn 30 of Codex on SWE-bench Pro, in the vLLM project's report on Mooncake; 43 turns and 444 output
tokens in its AgentX trace, vLLM issue 57103, where 44 % of the sessions have sub-agents). Shares of
abandoned and silent endings, of parallel calls and of compactions are assumptions: no source gives them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec

from agentserve.sim.traces.agents import Agent, AgentTurn, Call, Ending, Run
from agentserve.sim.traces.hints import HintMix, Teller
from agentserve.sim.traces.waits import CODING_TOOLS, Mode, Tool, pick

LONGEST = 4.0  # no draw is longer than so many means
SUB_AGENT = "sub_agent"  # what the call of one is named
CHILD_TURNS = 3


class TraceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which agents come. Lengths are means in tokens, times seconds, shares in [0, 1]."""

    seed: int = 1
    kinds: int = 3  # of agents; those of one kind share a system prompt
    prefix: int = 300
    task: int = 1500
    result: int = 150  # of one call
    output: int = 32
    turns: float = 8.0
    context_limit: int = 16_000  # no agent grows beyond it; it ends before, unless it compacts
    parallel: float = 0.1  # share of turns with two or three calls
    sub_agents: float = 0.05  # share of turns that call one
    abandoned: float = 0.1  # share of agents
    silent: float = 0.3  # share of agents that end without a word
    compacts: float = 0.1  # share of agents that compact, half way
    spread: float = 0.6  # sigma of the logarithm of lengths and of numbers of turns
    longest_wait: float = math.inf  # waits are cut off there
    burst: float = 3.0  # agents that start together, on average (geometric)
    gap: float = 2.0  # between bursts, on average (exponential), if lanes are free earlier
    hints: HintMix = HintMix.NONE
    events: bool = False  # clients signal results before they bring them, and compactions
    tools: tuple[Tool, ...] = CODING_TOOLS


class Burst(msgspec.Struct, frozen=True):
    """Agents that start in one moment, at least `gap` seconds after the burst before."""

    first: int  # number of its first agent
    size: int
    gap: float


def bursts(spec: TraceSpec, most: int) -> Iterator[Burst]:
    """Bursts without end; one of more than `most` agents comes in parts, without a gap between."""
    rng = random.Random(f"bursts {spec.seed}")
    first = 0
    while True:
        size = 1
        while rng.random() > 1.0 / spec.burst:
            size += 1
        gap = rng.expovariate(1.0 / spec.gap) if first else 0.0
        for begin in range(first, first + size, most):
            yield Burst(begin, min(most, first + size - begin), gap if begin == first else 0.0)
        first += size


def draw_agent(spec: TraceSpec, number: int) -> Agent:
    """Agent `number` (from 0) of a spec."""
    return _Draw(spec, f"agent {spec.seed} {number}").agent(f"a{number}")


def mean_context(spec: TraceSpec, agents: int = 200) -> float:
    """Tokens of an agent's context, averaged over the turns of the first `agents` agents."""
    sizes = [size for number in range(agents) for size in draw_agent(spec, number).contexts()]
    return sum(sizes) / len(sizes)


class _Draw:
    """One agent's draws, in a fixed order."""

    def __init__(self, spec: TraceSpec, seed: str) -> None:
        self.spec = spec
        self.rng = random.Random(seed)
        self.told = random.Random(f"{seed} told")  # what is said of an agent does not change the agent
        self.teller = Teller(spec.hints, self.told)

    def agent(self, name: str) -> Agent:
        spec, rng = self.spec, self.rng
        prefix = Run(spec.seed * 1_000_003 + rng.randrange(spec.kinds), spec.prefix)
        task = self.run(min(self.length(spec.task), spec.context_limit // 2))
        ending = Ending.CLOSED
        if rng.random() < spec.abandoned:
            ending = Ending.ABANDONED
        elif rng.random() < spec.silent:
            ending = Ending.SILENT
        count = max(2, min(round(self.spread() * spec.turns), round(LONGEST * spec.turns)))
        compacts = max(2, count // 2) if count > 3 and rng.random() < spec.compacts else None
        turns = self.turns(name, count, prefix.count + task.count, ending, compacts)
        return Agent(name, prefix, task, turns, ending)

    def turns(
        self, name: str, count: int, tokens: int, ending: Ending, compacts: int | None
    ) -> tuple[AgentTurn, ...]:
        """At most `count` turns from a context of `tokens` on."""
        spec = self.spec
        turns: list[AgentTurn] = []
        for number in range(count):
            summary = None
            if number == compacts:
                summary = self.run(max(1, tokens // 8))
                tokens = spec.prefix + summary.count
            output = self.length(spec.output)
            last = number + 1 == count or tokens + output > spec.context_limit - LONGEST * spec.result
            gives_up = last and ending is Ending.ABANDONED
            calls = () if last and not gives_up else self.calls(f"{name}.{number}", tokens, gives_up)
            if last and not calls:
                turns.append(AgentTurn(output, summary=summary))
                break
            turns.append(self.waiting(output, calls, summary))
            if gives_up:
                break
            tokens += output + sum(call.result.count for call in calls)
        return tuple(turns)

    def waiting(self, output: int, calls: tuple[Call, ...], summary: Run | None) -> AgentTurn:
        wait = max(call.wait for call in calls)
        other = min(pick(self.spec.tools, self.told).draw(self.told), self.spec.longest_wait)
        hint = self.teller.hint(wait, other, self.told)
        early = None
        lead = self.told.uniform(0.05, 0.5)
        if self.spec.events and math.isfinite(wait) and all(call.child is None for call in calls):
            early = min(lead, wait / 2)
        return AgentTurn(output, calls, hint, early, summary)

    def calls(self, name: str, tokens: int, never: bool) -> tuple[Call, ...]:
        """What one turn calls; with `never` the results do not come."""
        spec, rng = self.spec, self.rng
        count = rng.choice((2, 3)) if rng.random() < spec.parallel else 1
        drawn = [pick(spec.tools, rng) for _ in range(count)]
        share = spec.result / count
        calls = tuple(Call(tool.name, self.wait(tool), self.run(self.length(share))) for tool in drawn)
        if never:
            return tuple(msgspec.structs.replace(call, wait=math.inf) for call in calls)
        room = spec.context_limit - tokens - 2 * LONGEST * (spec.result + spec.output)
        if rng.random() < spec.sub_agents and room > 0:
            calls = (self.sub_agent(f"{name}.s", calls[0].result, tokens), *calls[1:])
        return calls

    def sub_agent(self, name: str, result: Run, tokens: int) -> Call:
        """It works some turns on a copy of its parent's context; what it found is the call's result."""
        task = self.run(self.length(self.spec.result))
        turns: list[AgentTurn] = []
        for _ in range(self.rng.randint(1, CHILD_TURNS)):
            tool = pick(self.spec.tools, self.rng)
            call = Call(tool.name, self.wait(tool), self.run(self.length(self.spec.result / CHILD_TURNS)))
            turns.append(self.waiting(self.length(self.spec.output / 2), (call,), None))
        turns.append(AgentTurn(self.length(self.spec.output / 2)))
        child = Agent(name, Run(0, 0), task, tuple(turns), Ending.CLOSED)
        waits = sum(turn.wait for turn in turns[:-1])
        return Call(SUB_AGENT, waits, result, child)

    def wait(self, tool: Tool) -> float:
        return min(tool.draw(self.rng), self.spec.longest_wait)

    def run(self, count: int) -> Run:
        return Run(self.rng.getrandbits(48), count)

    def length(self, mean: float) -> int:
        return max(1, round(mean * self.spread()))

    def spread(self) -> float:
        """A factor of mean 1 (before it is cut off), log-normal."""
        sigma = self.spec.spread
        return min(self.rng.lognormvariate(-(sigma**2) / 2, sigma), LONGEST)


def pressure(seed: int = 11) -> TraceSpec:
    """Sixteen such agents of three thousand tokens come two seconds apart and wait about three seconds,
    four turns each: a plain load for engines whose pool holds half of them."""
    return TraceSpec(
        seed=seed, kinds=1, prefix=400, task=2500, result=180, output=32, turns=4.0, spread=0.0, parallel=0.0,
        sub_agents=0.0, abandoned=0.0, silent=0.0, compacts=0.0, burst=1.0, gap=2.0, longest_wait=10.0,
        tools=(Tool("tool", 1.0, (Mode(1.0, math.e, 0.8),)),),
    )  # fmt: skip
