"""The experiment's own traces, drawn from a seed: short chats, long prompts, agents, and their mix.

Lengths are those of the source text (1K/128, 64K/128, an 80K prefix and 1K per turn, waits of 0.1 to 10 s);
what it leaves open is settled here: K is 1,024; an agent has 20 turns and writes 128 of each turn's 1K
itself; waits are log-uniform; of an agent's prefix 4K are shared by all (its system prompt and tools) and
76K its own; tenants bring equally much, whatever their weights.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import msgspec

from agentserve.sim.experiment.script import Session, Trace, TraceError, Turn, checked, scaled
from agentserve.sim.traces.agents import Run

K = 1024
CHAT, LONG, AGENTS, MIX = "chat", "long", "agents", "mix"
NAMES = (CHAT, LONG, AGENTS, MIX)
SESSIONS = {CHAT: 1500, LONG: 120, AGENTS: 40, MIX: 1500}  # of a trace, where nobody says otherwise
TENANTS = {"blue": 1.0, "green": 1.0, "red": 2.0}


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens at full size, and seconds."""

    chat_prompt: int = 1 * K
    chat_output: int = 128
    long_prompt: int = 64 * K
    long_output: int = 128
    shared_prefix: int = 4 * K  # of all agents
    own_prefix: int = 76 * K
    agent_turns: int = 20
    agent_append: int = 896  # of the 1K that a turn adds; the rest it writes
    agent_output: int = 128
    shortest_wait: float = 0.1
    longest_wait: float = 10.0


FULL_SIZE = Lengths()
# Sessions of each kind in a thousand of the mix: about as many tokens of prompts from each kind.
MIX_SHARES = {CHAT: 962, LONG: 21, AGENTS: 17}


def draw(
    name: str,
    sessions: int,
    *,
    seed: int = 1,
    scale: float = 1.0,
    tenants: Mapping[str, float] = TENANTS,
    lengths: Lengths = FULL_SIZE,
) -> Trace:
    """`sessions` sessions of a kind. The first n of a longer trace are the trace of n. Raises TraceError."""
    if name not in NAMES:
        raise TraceError(f'no trace "{name[:64]}"; there are: {", ".join(NAMES)}')
    if not 0 < scale <= 1:
        raise TraceError(f"scale: expected above 0 and at most 1, got {scale:g}")
    if not tenants or sessions < 1:
        raise TraceError("a trace needs a tenant and a session")
    rng = random.Random(f"experiment {name} {seed}")
    names, found, clock = sorted(tenants), [], 0.0
    for number in range(sessions):
        kind = _kind(name, rng)
        tenant = rng.choice(names)
        turns = _Draw(rng, seed, scale, lengths).turns(kind)
        found.append(Session(f"{kind}-{number}", tenant, clock, turns, kind))
        clock += rng.expovariate(1.0)
    return checked(Trace(name, tuple(found), dict(tenants), scale))


def _kind(name: str, rng: random.Random) -> str:
    if name != MIX:
        return name
    return rng.choices(list(MIX_SHARES), weights=list(MIX_SHARES.values()))[0]


class _Draw:
    """One session's turns, in a fixed order of draws."""

    def __init__(self, rng: random.Random, seed: int, scale: float, lengths: Lengths) -> None:
        self._rng = rng
        self._seed = seed
        self._scale = scale
        self._lengths = lengths

    def turns(self, kind: str) -> tuple[Turn, ...]:
        lengths = self._lengths
        if kind == CHAT:
            return (self._request(lengths.chat_prompt, lengths.chat_output),)
        if kind == LONG:
            return (self._request(lengths.long_prompt, lengths.long_output),)
        shared = Run(self._seed * 1_000_003, scaled(lengths.shared_prefix, self._scale))
        first = Turn(
            (shared, self._run(lengths.own_prefix)), self._length(lengths.agent_output), self._wait()
        )
        more = tuple(
            Turn((self._run(lengths.agent_append),), self._length(lengths.agent_output), self._wait())
            for _ in range(lengths.agent_turns - 1)
        )
        return (first, *more)

    def _request(self, prompt: int, output: int) -> Turn:
        return Turn((self._run(prompt),), self._length(output))

    def _run(self, count: int) -> Run:
        return Run(self._rng.getrandbits(48), self._length(count))

    def _length(self, count: int) -> int:
        return scaled(count, self._scale)

    def _wait(self) -> float:
        """Log-uniform."""
        low, high = math.log(self._lengths.shortest_wait), math.log(self._lengths.longest_wait)
        return math.exp(self._rng.uniform(low, high))
