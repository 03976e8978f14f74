"""An executor that computes nothing and remembers everything.

In place of KV it keeps, for every slot of every page, a fingerprint of the whole token prefix that
ended there. So it can *prove* that each chunk reads exactly the KV that its tokens would have
produced: a page shared too long, copied too late or handed out twice is found at once, by value.
The next token is a function of the prefix alone, as a real model's is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from agentserve.core.cost import StepCost
from agentserve.core.plan import Chunk, ChunkResult, Plan, Sampled, SampleSpec, StepResult
from agentserve.types import SessionId, TurnId

Fingerprints = npt.NDArray[np.uint64]

_EMPTY = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """Fingerprint of a prefix extended by one token (splitmix64's finaliser)."""
    value = (state ^ (token + 0x632BE59BD9B4E019)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def fingerprint(tokens: Sequence[int], state: int = _EMPTY) -> int:
    for token in tokens:
        state = mix(state, token)
    return state


def next_token(state: int, seed: int, vocab_size: int) -> int:
    """What the imaginary model says after a prefix."""
    return mix(state, seed) % vocab_size


class WrongKV(AssertionError):
    """A chunk would have read KV that its tokens did not produce."""


class SimExecutor:
    """Runs plans in no time and reports how long they would have taken."""

    def __init__(
        self,
        pages: tuple[int, ...],
        page_size: int,
        cost: StepCost,
        vocab_size: int = 1000,
        script: Callable[[Chunk], int | None] | None = None,
    ) -> None:
        """script: may choose the token of a chunk (a trace's); None lets the imaginary model choose."""
        self.page_size = page_size
        self.cost = cost
        self.vocab_size = vocab_size
        self.script = script
        self._slots: tuple[Fingerprints, ...] = tuple(
            np.zeros((count, page_size), dtype=np.uint64) for count in pages
        )
        self._prefixes: dict[tuple[SessionId, TurnId], array[int]] = {}

    @property
    def memory(self) -> tuple[Fingerprints, ...]:
        """Per KV group, (pages, page_size) fingerprints: what a mover reads and writes."""
        return self._slots

    def run(self, plan: Plan) -> StepResult:
        for copy in plan.copies:
            slots = self._slots[copy.group]
            slots[copy.target, : copy.slots] = slots[copy.source, : copy.slots]
        results = tuple(self._run_chunk(chunk) for chunk in plan.chunks)
        return StepResult(plan.step, results, self.cost.plan(plan))

    def _run_chunk(self, chunk: Chunk) -> ChunkResult:
        state = _EMPTY
        for slots, table in zip(self._slots, chunk.tables, strict=True):
            state = self._read(chunk, slots, table)
            for position, token in enumerate(chunk.tokens, chunk.start):
                state = mix(state, token)
                slots[table[position // self.page_size], position % self.page_size] = state
        sampled = None
        if chunk.sample is not None:
            scripted = self.script(chunk) if self.script else None
            own = next_token(state, chunk.sample.sampling.seed, self.vocab_size)
            sampled = Sampled(own if scripted is None else scripted)
        return ChunkResult(chunk.session, chunk.turn, chunk.epoch, len(chunk.tokens), sampled)

    def _read(self, chunk: Chunk, slots: Fingerprints, table: array[int]) -> int:
        """Attend to positions 0 .. start-1: the slot before `start` must hold the prefix's fingerprint.

        A session's own tokens are known only while it samples; then every slot is compared.
        """
        if chunk.start == 0:
            return _EMPTY
        blocks = -(-chunk.start // self.page_size)
        found = slots[np.frombuffer(table, dtype=np.int32)[:blocks]].reshape(-1)[: chunk.start]
        if chunk.sample is not None:
            expected = self._expected(chunk, chunk.sample)
            wrong = np.flatnonzero(found != expected)
            if wrong.size:
                raise WrongKV(f"{chunk.session}: wrong KV at position {wrong[0]} of {chunk.start}")
        return int(found[-1])

    def _expected(self, chunk: Chunk, sample: SampleSpec) -> Fingerprints:
        """Fingerprints of positions 0 .. start-1, kept per turn because a turn only appends."""
        key = (chunk.session, chunk.turn)
        known = self._prefixes.get(key)
        if known is None:
            if len(self._prefixes) >= 4096:
                self._prefixes.clear()
            known = self._prefixes[key] = array("Q")
        state = known[-1] if known else _EMPTY
        for position in range(len(known), chunk.start):
            state = mix(state, sample.history[position])
            known.append(state)
        return np.array(known[: chunk.start], dtype=np.uint64)

    def define_grammar(self, grammar_id: str, compiled: str) -> None:
        """The imaginary model is free of grammars."""

    def drop_grammar(self, grammar_id: str) -> None:
        """See define_grammar."""
