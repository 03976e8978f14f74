"""How long a grammar's matcher takes for the longest tokens of the vocabulary, and for the masks behind them.

A token may be a hundred characters, and a matcher takes them in one call. The ones that cost most are runs:
one character (or a few) again and again, which is where readings of an ambiguous grammar multiply.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tools_bridge.cpu_guard import Guard, NoGuard
from tools_bridge.probe import Clock, Unit, wander
from tools_bridge.repetitions import AMBIGUOUS
from tools_bridge.schemas import GrammarError

if TYPE_CHECKING:
    import xgrammar

LEAST_RUN = 4
MOST_LONG = 64  # of the longest tokens, besides the longest run of each character
MOST_TRIES = 600
TIMES = 4  # that a token is taken in a row
WALKS = 2
CALL_SECONDS = 0.5  # of CPU, at which the process is ended where it can be
SLOW_CHARS = 250  # times what a character of a plain grammar takes, for each of the token's
SLOW_MASK = 50_000  # times that


def long_tokens(token_bytes: Sequence[bytes]) -> dict[int, bytes]:
    """By id: the longest run of each byte, and the longest tokens."""
    runs: dict[int, int] = {}
    for token, data in enumerate(token_bytes):
        if len(data) >= LEAST_RUN and data == data[:1] * len(data):
            best = runs.get(data[0])
            if best is None or len(token_bytes[best]) < len(data):
                runs[data[0]] = token
    longest = sorted(range(len(token_bytes)), key=lambda token: -len(token_bytes[token]))[:MOST_LONG]
    return {token: token_bytes[token] for token in (*runs.values(), *longest) if len(token_bytes[token]) > 1}


def check_tokens(
    grammar: xgrammar.CompiledGrammar,
    vocab_size: int,
    tokens: dict[int, bytes],
    guard: Guard | None = None,
    clock: Clock = time.thread_time,
) -> None:
    """A grammar in which one of `tokens`, or the mask behind it, takes too long is a GrammarError; or the end
    of the process, by its guard."""
    import xgrammar

    tries = _Tries(vocab_size, tokens, guard or NoGuard(), clock)
    for seed in range(WALKS):
        matcher = xgrammar.GrammarMatcher(grammar)
        for _ in wander(matcher, random.Random(seed)):
            if not tries.at(matcher):
                return


class _Tries:
    def __init__(self, vocab_size: int, tokens: dict[int, bytes], guard: Guard, clock: Clock) -> None:
        self._tokens = tokens
        self._ids = np.array(sorted(tokens), dtype=np.int64)
        self._words = np.zeros((1, (vocab_size + 31) // 32), dtype=np.int32)
        self._guard = guard
        self._clock = clock
        self._unit = Unit(clock)
        self._seen: set[bytes] = set()
        self._left = MOST_TRIES

    def at(self, matcher: xgrammar.GrammarMatcher) -> bool:
        """All that may come here, once for places that let the same come; whether any are left to try."""
        self._mask(matcher)
        bits = np.unpackbits(self._words.view(np.uint8)[0], bitorder="little")[self._ids]
        if (key := bits.tobytes()) not in self._seen:
            self._seen.add(key)
            for token in self._ids[np.flatnonzero(bits)].tolist():
                self._take(matcher, token)
                if self._left <= 0:
                    return False
        return True

    def _take(self, matcher: xgrammar.GrammarMatcher, token: int) -> None:
        taken = 0
        size = len(self._tokens[token])
        for _ in range(TIMES):
            self._left -= 1
            ok, seconds = self._timed(lambda: matcher.accept_token(token))
            if not ok:
                break
            taken += 1
            if self._unit.exceeded(seconds, SLOW_CHARS * size):
                raise GrammarError(AMBIGUOUS)
            if matcher.is_terminated():
                break
        if taken and not matcher.is_terminated():
            self._mask(matcher)
        if taken:
            matcher.rollback(taken)

    def _mask(self, matcher: xgrammar.GrammarMatcher) -> None:
        _, seconds = self._timed(lambda: matcher.fill_next_token_bitmask(self._words, 0))
        if self._unit.exceeded(seconds, SLOW_MASK):
            raise GrammarError(AMBIGUOUS)

    def _timed(self, call: Callable[[], bool]) -> tuple[bool, float]:
        began = self._clock()
        self._guard.begin(CALL_SECONDS)
        try:
            return call(), self._clock() - began
        finally:
            self._guard.end()
