"""What a turn's generated tokens add up to: penalty counts, grammar state, stop strings.

Nobody owns this state. It is a fold over token ids, kept only because folding again costs time,
and folded again from the ids whenever the kept one does not fit: after preemption, resume, a
restart, or eviction from this cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from agentserve.core.plan import SampleSpec
from agentserve.executor.grammars import Fold, Grammars
from agentserve.executor.penalties import TokenCounts, has_penalties
from agentserve.executor.reasoning import ReasoningFold
from agentserve.executor.stops import StopFold
from agentserve.types import Sampling, SessionId, TurnId


def needs_folds(sampling: Sampling) -> bool:
    """Whether `sampling` looks back at tokens at all."""
    return (
        sampling.grammar is not None
        or sampling.reasoning is not None
        or bool(sampling.stop)
        or has_penalties(sampling)
    )


class TurnFolds:
    """The folds of one turn, over its prompt and the tokens generated so far."""

    def __init__(self, spec: SampleSpec, token_bytes: Sequence[bytes], grammars: Grammars) -> None:
        sampling = spec.sampling
        self.sampling = sampling
        self.prompt = spec.prompt
        self.generated = array("i")
        self._token_bytes = token_bytes
        self.grammar: Fold | None = None
        self.counts: TokenCounts | None = None
        self.reasoning = ReasoningFold(sampling.reasoning) if sampling.reasoning is not None else None
        self._stops = StopFold(sampling.stop) if sampling.stop else None
        if sampling.grammar is not None:
            self.grammar = grammars.start(sampling.grammar)
        if has_penalties(sampling):
            # Only the repetition penalty looks at the prompt, which may be long.
            seen = spec.history[: spec.prompt] if sampling.repetition_penalty != 1.0 else ()
            self.counts = TokenCounts(np.array(seen, dtype=np.int32))

    @property
    def size(self) -> int:
        """Bytes of the grammar that it holds."""
        return self.grammar.size if self.grammar is not None else 0

    def push(self, token: int) -> bool:
        """Fold in one generated token; whether the turn ends with it.

        A token that the grammar does not allow is a ValueError.
        """
        ended = False
        if self.grammar is not None:
            if not self.grammar.push(token):
                raise ValueError(f"token {token} does not continue grammar {self.sampling.grammar!r}")
            ended = self.grammar.over
        self.generated.append(token)
        if self.counts is not None:
            self.counts.push(token)
        if self.reasoning is not None:
            self.reasoning.push(token)
        if self._stops is not None:
            data = self._token_bytes[token] if token < len(self._token_bytes) else b""
            hit = self._stops.push(data)
            ended = ended or (hit and len(self.generated) >= self.sampling.min_tokens)
        return ended


class FoldCache:
    """The `TurnFolds` of the turns sampled last, at most `capacity` of them.

    They hold their grammars, also those of turns that are over. Where these are larger together than the
    store's bound, all but those that run (`expect`) are let go of.
    """

    def __init__(self, capacity: int, token_bytes: Sequence[bytes], grammars: Grammars) -> None:
        self._capacity = capacity
        self._token_bytes = token_bytes
        self._grammars = grammars
        self._turns: OrderedDict[tuple[SessionId, TurnId], TurnFolds] = OrderedDict()
        self._held = 0  # bytes of grammars
        self._running = 1

    def expect(self, turns: int) -> None:
        """So many are sampled in one step now; twice as many may take turns."""
        self._running = max(2 * turns, 1)

    def at(self, session: SessionId, turn: TurnId, spec: SampleSpec) -> TurnFolds:
        """Folds over exactly `spec.history[spec.prompt : spec.length]`, kept or folded again."""
        key = (session, turn)
        generated = array("i", spec.history[spec.prompt : spec.length])
        folds = self._turns.pop(key, None)
        if folds is not None:
            self._held -= folds.size
        if folds is None or not self._extends(folds, spec, generated):
            folds = TurnFolds(spec, self._token_bytes, self._grammars)
        for token in generated[len(folds.generated) :]:
            folds.push(token)
        self._turns[key] = folds
        self._held += folds.size
        while len(self._turns) > self._capacity or (
            self._held > self._grammars.max_bytes and len(self._turns) > self._running
        ):
            _, oldest = self._turns.popitem(last=False)
            self._held -= oldest.size
        return folds

    @staticmethod
    def _extends(folds: TurnFolds, spec: SampleSpec, generated: array[int]) -> bool:
        # Comparing every token is a few microseconds and makes the cache unable to be wrong.
        return (
            folds.prompt == spec.prompt
            and len(folds.generated) > 0  # an unused one tells nothing about its prompt
            and (folds.sampling is spec.sampling or folds.sampling == spec.sampling)
            and folds.generated == generated[: len(folds.generated)]
        )

    def __len__(self) -> int:
        return len(self._turns)
