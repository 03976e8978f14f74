"""Grammars in the worker whose matchers run in another process (`matcher_process`), so that no call of theirs
can hold a step: what takes too long ends its turn, and the others' are folded again in a new process.
"""

from __future__ import annotations

import logging
import signal
import weakref
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count

import numpy as np
import numpy.typing as npt

from agentserve.executor.grammars import MAX_BYTES, TOO_LARGE, TOO_SLOW, GrammarTooSlow, ids_of
from agentserve.executor.matcher_link import STILL_SECONDS, MatcherLink, Overdue
from agentserve.executor.matcher_process import (
    NO_MEMORY,
    Ask,
    Begin,
    Define,
    Drop,
    Host,
    Leave,
    Push,
    Told,
    Vocabulary,
)

MEMORY_BYTES = 2 * 1024**3  # for a matcher, on top of what the host has
CALM = 5000  # questions; who lacks memory again before so many lacks it as long as all are here
LARGE_SHARE = 16  # of the memory: a fold that takes less of it is no cause
CALM = 5000  # questions; who lacks memory again before so many lacks it as long as all are here
LARGE_SHARE = 16  # of the memory: a fold that takes less of it is no cause
MOST_HANGING = 1024  # grammars of which it is known that they do
log = logging.getLogger(__name__)

_OUT_OF_TIME = -signal.SIGPROF  # an end that a grammar is the cause of, whoever else runs there


class _Died(Exception):
    """The matcher process ended, or was given up, while it was asked something. `late`: `Overdue`."""

    def __init__(self, status: int, late: bool) -> None:
        super().__init__(f"the process of grammars ended ({status})")
        self.status = status
        self.late = late

    def fault(self, again: bool) -> str:
        """Of what was asked, if it was; for want of memory only if that was so twice."""
        if self.late or self.status == _OUT_OF_TIME:
            return TOO_SLOW
        return TOO_LARGE if again and self.status == NO_MEMORY else ""


class GuardedGrammars:
    """`Grammars`; one thread. `host`: from `fork_host`.

    A process that ended while a fold was asked of it ended of that fold, if it was for time: it is
    `GrammarTooSlow`, and never asked again, nor is its grammar begun by another turn. Of any other
    end, and where the process just stood still, the fold is tried once more, in a process that has no other
    fold yet: where that one lacks memory, too, it is the fold's. Where they lack it together, again and
    again, the largest gives up its own. All may raise `HostGone`.
    """

    def __init__(
        self,
        host: Host,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        max_bytes: int = MAX_BYTES,
        *,
        memory_bytes: int = MEMORY_BYTES,
        still_seconds: float = STILL_SECONDS,
    ) -> None:
        self.max_bytes = max_bytes
        self.deaths = 0
        self.vocab_size = vocab_size
        vocabulary = Vocabulary(list(token_bytes), vocab_size, list(stop_token_ids), max_bytes, memory_bytes)
        self._link = MatcherLink(host, vocabulary, still_seconds)
        self._known: set[str] = set()  # by the child
        self._texts: dict[str, bytes] = {}
        self._hanging: OrderedDict[str, str] = OrderedDict()  # and what is told of them
        self._memory_bytes = memory_bytes
        self._memory_of: weakref.WeakKeyDictionary[GuardedFold, int] = weakref.WeakKeyDictionary()
        self._asked = 0
        self._short_at = -CALM  # `_asked` when memory was lacked last
        self._numbers = count()
        self._ended: list[int] = []

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        return self._link.pid

    @property
    def generation(self) -> int:
        """Of the process that runs."""
        return self.deaths

    def define(self, grammar_id: str, compiled: str) -> None:
        self.drop(grammar_id)
        self._texts[grammar_id] = zlib.compress(compiled.encode(), 1)
        try:
            self._tried(grammar_id, lambda: self._tell(grammar_id))
        except BaseException:
            del self._texts[grammar_id]
            raise

    def drop(self, grammar_id: str) -> None:
        self._texts.pop(grammar_id, None)
        if grammar_id in self._known:
            self._known.discard(grammar_id)
            with suppress(OSError):  # whoever asks next finds out
                self._link.tell(Drop(grammar_id))

    def start(self, grammar_id: str) -> GuardedFold:
        if grammar_id not in self._texts:
            raise ValueError(f"grammar {grammar_id!r} is not defined on this worker")
        if grammar_id in self._hanging:
            raise GrammarTooSlow(self._hanging[grammar_id])
        number = next(self._numbers)
        try:
            fold = GuardedFold(self, grammar_id, self._texts[grammar_id], number)
        except ValueError:
            self._ended.append(number)
            raise
        weakref.finalize(fold, self._ended.append, fold.number)
        return fold

    def close(self) -> None:
        """Nothing can be asked any more, and both processes have ended."""
        self._link.close()

    def advance(self, fold: GuardedFold, token: int | None) -> Told:
        """Where the fold is behind `token`, or where it is now."""

        def once() -> Told:
            told = None
            fold.check()  # it may have had to give up its memory
            if fold.generation != self.generation or not self._link.runs:
                if fold.grammar not in self._known:
                    self._tell(fold.grammar, fold.text)
                told = self._ask(Begin(fold.number, fold.grammar, list(fold.tokens)))
                fold.generation = self.generation
                self._memory_of[fold] = told.memory
            if token is not None:
                told = self._ask(Push(fold.number, token))
            assert told is not None
            return told

        return self._tried(fold.grammar, once)

    def _tell(self, grammar_id: str, text: bytes | None = None) -> Told:
        text = self._texts[grammar_id] if text is None else text
        told = self._ask(Define(grammar_id, zlib.decompress(text).decode()))
        self._known.add(grammar_id)
        return told

    def _tried(self, grammar_id: str, once: Callable[[], Told]) -> Told:
        for last in (False, True):
            try:
                return once()
            except _Died as death:
                log.warning("%s and was replaced", death)
                if death.status == NO_MEMORY:
                    self._relieve()
                if fault := death.fault(again=last):
                    self._bar(grammar_id, fault)
                    raise GrammarTooSlow(fault) from None
                if last:
                    raise ValueError(str(death)) from None
        raise AssertionError

    def _bar(self, grammar_id: str, fault: str) -> None:
        self._hanging[grammar_id] = fault
        if len(self._hanging) > MOST_HANGING:
            self._hanging.popitem(last=False)

    def _relieve(self) -> None:
        """All are folded again after this end, and would end again for the same reason: each fits alone, and
        nobody would ever be at fault. The largest has to go, by what it took when it was begun last."""
        again = self._asked - self._short_at < CALM
        self._short_at = self._asked
        largest = max(self._memory_of.items(), key=lambda one: one[1], default=None)
        if again and largest is not None and largest[1] >= self._memory_bytes // LARGE_SHARE:
            fold, taken = largest
            del self._memory_of[fold]
            fold.fail(TOO_LARGE)
            if taken >= self._memory_bytes // 2:
                self._bar(fold.grammar, TOO_LARGE)

    def _ask(self, ask: Ask) -> Told:
        self._asked += 1
        if not self._link.runs:
            self._link.spawn()
        late = False
        told = None
        try:
            if self._ended:
                self._link.tell(Leave(self._ended.copy()))
                self._ended.clear()
            told = self._link.asked(ask)
        except Overdue:
            late = True
        except OSError:  # a TimeoutError, too
            pass
        if told is None:
            raise _Died(self._replace(), late)
        if told.slow:
            raise GrammarTooSlow(told.error)
        if told.error:
            raise ValueError(told.error)
        return told

    def _replace(self) -> int:
        """A new process; how the one before ended."""
        self.deaths += 1
        self._known.clear()
        self._ended.clear()
        return self._link.spawn()


class GuardedFold:
    """A `Fold` of which the worker has the tokens, and the last answer."""

    def __init__(self, grammars: GuardedGrammars, grammar: str, text: bytes, number: int) -> None:
        self.grammar = grammar
        self.text = text
        self.number = number
        self.tokens = array("i")
        self.generation = -1
        self._grammars = grammars
        self._failed = ""
        self._allowed: npt.NDArray[np.int64] | None = None
        self._told = self._advanced(None)
        self.size = self._told.size

    def allowed(self) -> npt.NDArray[np.int64]:
        self.check()
        if self._allowed is None:
            self._allowed = ids_of(self._told.bits, self._grammars.vocab_size)
        return self._allowed

    def push(self, token: int) -> bool:
        self.check()
        if self._told.over:
            return False
        told = self._advanced(token)
        if not told.taken:
            return False
        self._told, self._allowed = told, None
        self.tokens.append(token)
        return True

    @property
    def over(self) -> bool:
        return self._told.over

    def _advanced(self, token: int | None) -> Told:
        try:
            return self._grammars.advance(self, token)
        except GrammarTooSlow as error:
            self._failed = str(error)
            raise

    def fail(self, why: str) -> None:
        """Whoever asks of it from now on is told so."""
        self._failed = why

    def check(self) -> None:
        """GrammarTooSlow."""
        if self._failed:
            raise GrammarTooSlow(self._failed)
