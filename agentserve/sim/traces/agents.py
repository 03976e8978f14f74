"""What an agent does, as a value: turns, tool calls with their waits, sub-agents, endings."""

from __future__ import annotations

import math
from array import array
from enum import Enum

import msgspec
import numpy as np

from agentserve.sim.traces.hints import RawHint


class Run(msgspec.Struct, frozen=True):
    """A run of tokens, told by its seed: the same seed is the same text, which is how prompts are shared."""

    seed: int
    count: int

    def tokens(self, vocab_size: int) -> array[int]:
        drawn = np.random.default_rng(self.seed).integers(0, vocab_size, self.count, dtype=np.int32)
        tokens = array("i")
        tokens.frombytes(drawn.tobytes())
        return tokens


class Ending(Enum):
    """What follows an agent's last turn."""

    CLOSED = "closed"  # the client closes the session
    SILENT = "silent"  # it has what it wanted and says nothing
    ABANDONED = "abandoned"  # it never brings the results of its last calls, and says nothing


class Call(msgspec.Struct, frozen=True):
    """One tool call: its result comes `wait` seconds after the turn (inf: never), or, of a sub-agent,
    when that one has finished."""

    tool: str
    wait: float
    result: Run
    child: Agent | None = None  # it begins with a fork of its parent's context


class AgentTurn(msgspec.Struct, frozen=True):
    """One generation and the calls that end it; the next turn begins when all results are there."""

    output: int  # tokens
    calls: tuple[Call, ...] = ()  # none: the agent's last turn
    hint: RawHint | None = None
    early: float | None = None  # seconds before its last result at which a signal says that it comes
    summary: Run | None = None  # the history before this turn is replaced by it: a compaction

    @property
    def wait(self) -> float:
        """Seconds until the last result, as far as it is known without running sub-agents."""
        return max((call.wait for call in self.calls), default=math.inf)


class Agent(msgspec.Struct, frozen=True):
    """One session. Its first prompt is `prefix` (shared with others of its kind) and `task`."""

    name: str
    prefix: Run
    task: Run
    turns: tuple[AgentTurn, ...]
    ending: Ending

    def contexts(self) -> tuple[int, ...]:
        """Tokens of the context at the end of each turn. A sub-agent's begin without its parent's."""
        tokens = self.prefix.count + self.task.count
        found = []
        for turn in self.turns:
            if turn.summary is not None:
                tokens = self.prefix.count + turn.summary.count
            tokens += turn.output
            found.append(tokens)
            tokens += sum(call.result.count for call in turn.calls)
        return tuple(found)
