"""Made-up agents: who arrives when, what they bring, and how long their tools take.

Everything is drawn from one seed before the simulation starts, so a workload is a value. The shape
of the waits (a spike near one second, a thin tail) follows what is published of coding agents:
P50 1.1 s, P90 2.0 s, P99 20 s (MORI, arXiv 2606.00866).
"""

from __future__ import annotations

import random
from array import array

import msgspec


class AgentTurn(msgspec.Struct, frozen=True):
    """What comes in before a generation, how much is generated, and the tool wait after it (s)."""

    append: tuple[int, ...]
    output: int
    wait: float


class Agent(msgspec.Struct, frozen=True):
    name: str
    arrives: float
    turns: tuple[AgentTurn, ...]


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How many agents, and how large. Lengths are means in tokens; times in seconds."""

    agents: int = 16
    turns: int = 4
    shared_prefix: int = 300
    task: int = 1000
    append: int = 100
    output: int = 32
    arrivals_per_second: float = 1.0
    wait_median: float = 1.1
    wait_sigma: float = 0.9  # of the logarithm
    vocab_size: int = 1000
    seed: int = 1


def make_workload(spec: WorkloadSpec) -> tuple[Agent, ...]:
    """The agents of a spec; the same spec gives the same agents."""
    rng = random.Random(spec.seed)

    def length(mean: int) -> int:
        return max(1, round(rng.uniform(0.5, 1.5) * mean))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(spec.vocab_size), k=count))

    shared = tokens(spec.shared_prefix)
    agents, clock = [], 0.0
    for index in range(spec.agents):
        turns = []
        for number in range(spec.turns):
            incoming = tokens(length(spec.append)) if number else shared + tokens(length(spec.task))
            wait = spec.wait_median * rng.lognormvariate(0.0, spec.wait_sigma)
            turns.append(AgentTurn(incoming, length(spec.output), wait))
        agents.append(Agent(f"agent-{index}", clock, tuple(turns)))
        clock += rng.expovariate(spec.arrivals_per_second)
    return tuple(agents)


def context_after(agent: Agent) -> int:
    """Tokens of an agent's context when it has finished, at most."""
    return sum(len(turn.append) + turn.output for turn in agent.turns)


def as_tokens(values: tuple[int, ...]) -> array[int]:
    return array("i", values)
