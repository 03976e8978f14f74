"""Grammars in the worker: the store of compiled ones, and the fold that yields token masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from tools_bridge.vocabulary import GrammarVocabulary

Mask = npt.NDArray[np.bool_]


class GrammarFold:
    """How far one turn's generated tokens have come in its grammar."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocab_size = vocab_size
        self._stops = frozenset(self._matcher.stop_token_ids)
        self._words = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        self._allowed: npt.NDArray[np.int64] | None = None
        self._over = False

    def allowed(self) -> npt.NDArray[np.int64]:
        """Ids, ascending, of the tokens that may come next; empty once the grammar is over."""
        if self._allowed is None:
            if self._matcher.is_terminated():
                self._allowed = np.empty(0, dtype=np.int64)
            else:
                self._matcher.fill_next_token_bitmask(self._words, 0)
                bits = np.unpackbits(self._words.view(np.uint8)[0], bitorder="little")
                self._allowed = np.flatnonzero(bits[: self._vocab_size])
        return self._allowed

    def push(self, token: int) -> bool:
        """Take in one generated token; False if the grammar does not allow it (nothing changes)."""
        if self._over or not self._matcher.accept_token(token):
            return False
        self._allowed = None
        if self._matcher.is_terminated():
            self._over = True
        elif self._matcher.is_completed():
            # Complete, and nothing but a stop token could follow: over without asking for it.
            self._over = all(int(token) in self._stops for token in self.allowed()[: len(self._stops) + 1])
        return True

    @property
    def over(self) -> bool:
        """Whether the text is complete and no token but a stop token could follow."""
        return self._over

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a complete text."""
        return self._stops


class GrammarStore:
    """The compiled grammars a worker knows, by id."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._source = (token_bytes, vocab_size, stop_token_ids)
        self._vocabulary: GrammarVocabulary | None = None
        self._grammars: dict[str, xgrammar.CompiledGrammar] = {}

    def define(self, grammar_id: str, compiled: str) -> None:
        """Make a compiled grammar known; one that cannot be used here is a ValueError."""
        if self._vocabulary is None:  # most servers never see a grammar
            self._vocabulary = GrammarVocabulary(*self._source)
        self._grammars[grammar_id] = self._vocabulary.unseal(compiled)

    def drop(self, grammar_id: str) -> None:
        """Forget a grammar; an unknown id is ignored. Turns that run with it keep their own hold."""
        self._grammars.pop(grammar_id, None)

    def start(self, grammar_id: str) -> GrammarFold:
        """A fold at the grammar's beginning; an unknown id is a ValueError."""
        grammar = self._grammars.get(grammar_id)
        if grammar is None:
            raise ValueError(f"grammar {grammar_id!r} is not defined on this worker")
        return GrammarFold(grammar, self._source[1])
