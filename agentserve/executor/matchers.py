"""Grammars in the worker whose matchers run in another process (`matcher_process`), so that no call of theirs
can hold a step: what takes too long ends its turn, and the others' are folded again in a new process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import weakref
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

import numpy as np
import numpy.typing as npt

from agentserve.executor.grammars import (
    MAX_BYTES,
    SLOW_SECONDS,
    TOO_LARGE,
    TOO_SLOW,
    GrammarTooSlow,
    ids_of,
)
from agentserve.executor.matcher_process import (
    NO_MEMORY,
    Ask,
    Begin,
    Define,
    Drop,
    Host,
    Leave,
    Line,
    Push,
    Spawn,
    Told,
    Vocabulary,
    cpu_seconds,
    is_readable,
)

LOOKS = 12  # at a process that does not answer, before it is given up though it is at work
STILL_SECONDS = 2.5  # between them; one that did not work meanwhile (stopped, swapped out) is given up
AT_WORK = 0.01  # of that time, on the CPU
MEMORY_BYTES = 2 * 1024**3  # for a matcher, on top of what the host has
MOST_HANGING = 1024  # grammars of which it is known that they do
log = logging.getLogger(__name__)

_OUT_OF_TIME = -signal.SIGPROF  # an end that a grammar is the cause of, whoever else runs there


class HostGone(SystemExit):
    """The host ended or does not answer, and no other can be forked: a worker ends of it, and is replaced
    with its host as after any other end. Not an `Exception`: no turn and no step is at fault."""


class _Died(Exception):
    """The matcher process ended, or was given up, while it was asked something.

    `used`: seconds of CPU that it took for that, if it was given up."""

    def __init__(self, status: int, used: float) -> None:
        super().__init__(f"the process of grammars ended ({status})")
        self.status = status
        self.used = used

    def fault(self, again: bool) -> str:
        """Of what was asked, if it was; for want of memory only if that was so twice."""
        if self.used >= SLOW_SECONDS or self.status == _OUT_OF_TIME:
            return TOO_SLOW
        return TOO_LARGE if again and self.status == NO_MEMORY else ""


class GuardedGrammars:
    """`Grammars`; one thread. `host`: from `fork_host`.

    A process that ended while a fold was asked of it ended of that fold, if it was for time: it is
    `GrammarTooSlow`, and never asked again, nor is its grammar begun by another turn. Of any other
    end, and where the process just stood still, the fold is tried once more, in a process that has no other
    fold yet: where that one lacks memory, too, it is the fold's. All may raise `HostGone`.
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
        self._still_seconds = still_seconds
        self.deaths = 0
        self.pid = 0  # of the process that runs
        self._link, self._host_pid = host
        self._host: Line[Spawn] | None = None
        self._vocabulary = Vocabulary(
            list(token_bytes), vocab_size, list(stop_token_ids), max_bytes, memory_bytes
        )
        self._child: Line[Told] | None = None
        self._known: set[str] = set()  # by the child
        self._texts: dict[str, bytes] = {}
        self._hanging: OrderedDict[str, str] = OrderedDict()  # and what is told of them
        self._numbers = count()
        self._ended: list[int] = []

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.vocab_size

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
        if grammar_id in self._known and self._child is not None:
            self._known.discard(grammar_id)
            with suppress(OSError):  # whoever asks next finds out
                self._child.send(Drop(grammar_id))

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
        for line in (self._child, self._host):
            if line is not None:
                line.close()
        self._link.close()
        with suppress(OSError):  # it was waited for already
            os.kill(self._host_pid, signal.SIGKILL)
            os.waitpid(self._host_pid, 0)

    def advance(self, fold: GuardedFold, token: int | None) -> Told:
        """Where the fold is behind `token`, or where it is now."""

        def once() -> Told:
            told = None
            if fold.generation != self.generation or self._child is None:
                if fold.grammar not in self._known:
                    self._tell(fold.grammar, fold.text)
                told = self._ask(Begin(fold.number, fold.grammar, list(fold.tokens)))
                fold.generation = self.generation
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
                if fault := death.fault(again=last):
                    self._hanging[grammar_id] = fault
                    if len(self._hanging) > MOST_HANGING:
                        self._hanging.popitem(last=False)
                    raise GrammarTooSlow(fault) from None
                if last:
                    raise ValueError(str(death)) from None
        raise AssertionError

    def _ask(self, ask: Ask) -> Told:
        child = self._child or self._spawn()
        began = cpu_seconds(self.pid)
        used = 0.0
        told = None
        try:
            if self._ended:
                child.send(Leave(self._ended.copy()))
                self._ended.clear()
            child.send(ask)
            self._await(child.readable, self.pid)
            told = child.receive()
        except TimeoutError:
            used = cpu_seconds(self.pid) - began
        except OSError:
            pass
        if told is None:
            raise _Died(self._replace(), used)
        if told.slow:
            raise GrammarTooSlow(told.error)
        if told.error:
            raise ValueError(told.error)
        return told

    def _replace(self) -> int:
        """A new process; how the one before ended."""
        if self._child is not None:
            self._child.close()
        self.deaths += 1
        self._known.clear()
        self._ended.clear()
        return self._spawned()

    def _await(self, readable: Callable[[float], bool], pid: int) -> None:
        """TimeoutError where it does not answer, at once if it does nothing."""
        before = cpu_seconds(pid)
        for _ in range(LOOKS):
            if readable(self._still_seconds):
                return
            now = cpu_seconds(pid)
            if now - before < AT_WORK * self._still_seconds:
                break
            before = now
        raise TimeoutError

    def _spawn(self) -> Line[Told]:
        self._spawned()
        assert self._child is not None
        return self._child

    def _spawned(self) -> int:
        try:
            said, files = self._asked_of_host()
        except OSError as error:  # a TimeoutError, too
            log.error("the host of grammars does not answer: %s", str(error) or type(error).__name__)
            files = []
        if not files:
            raise HostGone("the host of grammars is gone: this worker ends, to be replaced with it")
        child = socket.socket(fileno=files[0])
        child.settimeout(self._still_seconds)
        self._child = Line(child, Told)
        status, self.pid = map(int, said.split())
        return status

    def _asked_of_host(self) -> tuple[bytes, list[int]]:
        self._link.settimeout(self._still_seconds)
        if self._host is None:
            self._host = Line(self._link, Spawn)
            self._host.send(self._vocabulary)
        self._host.send(Spawn())
        self._await(partial(is_readable, self._link), self._host_pid)
        said, files, _, _ = socket.recv_fds(self._link, 64, 1)
        return said, files


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
        self._check()
        if self._allowed is None:
            self._allowed = ids_of(self._told.bits, self._grammars.vocab_size)
        return self._allowed

    def push(self, token: int) -> bool:
        self._check()
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

    def _check(self) -> None:
        if self._failed:
            raise GrammarTooSlow(self._failed)
