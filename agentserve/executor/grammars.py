"""Grammars in the worker: the store of compiled ones, and the fold that yields token masks."""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xgrammar

from tools_bridge.cpu_guard import Guard, NoGuard
from tools_bridge.vocabulary import GrammarVocabulary

Mask = npt.NDArray[np.bool_]
Clock = Callable[[], float]

MAX_BYTES = 128 * 2**20  # of compiled grammars in memory, as xgrammar counts them
SLOW_SECONDS = 0.5  # of CPU that a turn may be behind: everybody else's step waits for it
EACH_SECONDS = 0.005  # of CPU that each look-up gives back; the usual one takes a hundredth of it
MORE_SECONDS = 0.05  # at which the process is ended where it can be, if the turn has not told of it itself

TOO_SLOW = "the grammar is too ambiguous: a token took too long to be looked up in it"
TOO_LARGE = "the grammar is too ambiguous: what is kept of its readings of a text took too much memory"


class GrammarTooSlow(ValueError):
    """A grammar took its turn's time, or its process: the fault of whoever wrote it."""


class Fold(Protocol):
    """How far one turn's generated tokens have come in its grammar."""

    size: int  # bytes that the grammar takes

    def allowed(self) -> npt.NDArray[np.int64]:
        """Ids, ascending, of the tokens that may come next; empty once the grammar is over."""
        ...

    def push(self, token: int) -> bool:
        """Take in one generated token; False if the grammar does not allow it (nothing changes)."""
        ...

    @property
    def over(self) -> bool:
        """Whether the text is complete and no token but a stop token could follow."""
        ...


class Grammars(Protocol):
    """The compiled grammars a worker knows, by id."""

    max_bytes: int

    def define(self, grammar_id: str, compiled: str) -> None:
        """Make a compiled grammar known; one that cannot be used here is a ValueError."""
        ...

    def drop(self, grammar_id: str) -> None:
        """Forget a grammar; an unknown id is ignored. Turns that run with it keep their own hold."""
        ...

    def start(self, grammar_id: str) -> Fold:
        """A fold at the grammar's beginning; an unknown id is a ValueError."""
        ...


def ids_of(bits: bytes, vocab_size: int) -> npt.NDArray[np.int64]:
    """Of the tokens whose bit is set."""
    words = np.frombuffer(bits, dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(words, bitorder="little")[:vocab_size])


class GrammarFold:
    """A `Fold` in this process.

    Steps grow where a grammar reads one text in many ways. Such grammars are refused before they get here,
    as far as that can be seen; one that comes to lack `SLOW_SECONDS` here is `GrammarTooSlow`, and so is all
    that comes after.
    """

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocab_size: int,
        clock: Clock = time.thread_time,
        size: int = 0,
        guard: Guard | None = None,
    ) -> None:
        self.size = size  # bytes that the grammar takes
        self._clock = clock
        self._guard = guard or NoGuard()
        self._left = SLOW_SECONDS
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocab_size = vocab_size
        self._stops = frozenset(self._matcher.stop_token_ids)
        self._words = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        self._allowed: npt.NDArray[np.int64] | None = None
        self._bits: bytes | None = None
        self._over = False

    def allowed(self) -> npt.NDArray[np.int64]:
        """Ids, ascending, of the tokens that may come next; empty once the grammar is over."""
        if self._allowed is None:
            self._allowed = ids_of(self.bits(), self._vocab_size)
        return self._allowed

    def bits(self) -> bytes:
        """The same, a bit for each token; empty once the grammar is over."""
        if self._bits is None:
            self._bits = b""
            if not self._matcher.is_terminated():
                with self._timed():
                    self._matcher.fill_next_token_bitmask(self._words, 0)
                self._bits = self._words.tobytes()
        return self._bits

    def push(self, token: int) -> bool:
        """Take in one generated token; False if the grammar does not allow it (nothing changes)."""
        if self._over:
            return False
        with self._timed():
            taken = self._matcher.accept_token(token)
        if not taken:
            return False
        self._allowed = self._bits = None
        if self._matcher.is_terminated():
            self._over = True
        elif self._matcher.is_completed():
            # Complete, and nothing but a stop token could follow: over without asking for it.
            self._over = all(int(token) in self._stops for token in self.allowed()[: len(self._stops) + 1])
        return True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self._left > 0:
            began = self._clock()
            self._guard.begin(self._left + MORE_SECONDS)
            try:
                yield
            finally:
                self._guard.end()
            self._left = min(SLOW_SECONDS, self._left + EACH_SECONDS - (self._clock() - began))
        if self._left <= 0:
            self._left = -1.0
            raise GrammarTooSlow(TOO_SLOW)

    @property
    def over(self) -> bool:
        """Whether the text is complete and no token but a stop token could follow."""
        return self._over

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a complete text."""
        return self._stops


class GrammarStore:
    """The compiled grammars a worker knows, by id.

    What was defined is kept as text, compressed; of what is made of it, many times larger, those used last,
    of `max_bytes` together. Another is read again when a turn wants it.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        max_bytes: int = MAX_BYTES,
        *,
        clock: Clock = time.thread_time,
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard
        self._source = (token_bytes, vocab_size, stop_token_ids)
        self._vocabulary: GrammarVocabulary | None = None
        self._texts: dict[str, bytes] = {}
        self._grammars: OrderedDict[str, tuple[xgrammar.CompiledGrammar, int]] = (
            OrderedDict()
        )  # and its bytes
        self._bytes = 0
        self.max_bytes = max_bytes
        self._clock = clock

    def define(self, grammar_id: str, compiled: str) -> None:
        """Make a compiled grammar known; one that cannot be used here is a ValueError."""
        self.drop(grammar_id)
        self._read(grammar_id, compiled)
        self._texts[grammar_id] = zlib.compress(compiled.encode(), 1)

    def drop(self, grammar_id: str) -> None:
        """Forget a grammar; an unknown id is ignored. Turns that run with it keep their own hold."""
        self._texts.pop(grammar_id, None)
        _, size = self._grammars.pop(grammar_id, (None, 0))
        self._bytes -= size

    def start(self, grammar_id: str) -> GrammarFold:
        """A fold at the grammar's beginning; an unknown id is a ValueError."""
        if grammar_id not in self._texts:
            raise ValueError(f"grammar {grammar_id!r} is not defined on this worker")
        if grammar_id not in self._grammars:
            self._read(grammar_id, zlib.decompress(self._texts[grammar_id]).decode())
        self._grammars.move_to_end(grammar_id)
        grammar, size = self._grammars[grammar_id]
        return GrammarFold(grammar, self._source[1], self._clock, size, self._guard)

    def _read(self, grammar_id: str, compiled: str) -> None:
        grammar = self.prepare().unseal(compiled)
        size = int(grammar.memory_size_bytes)
        self._grammars[grammar_id] = (grammar, size)
        self._bytes += size
        while self._bytes > self.max_bytes and len(self._grammars) > 1:
            _, (_, old) = self._grammars.popitem(last=False)
            self._bytes -= old

    def prepare(self) -> GrammarVocabulary:
        """Read the vocabulary; most servers never see a grammar."""
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(*self._source)
        return self._vocabulary

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._grammars)
