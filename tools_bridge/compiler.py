"""Making and compiling grammars: in child processes, within bounds of time and memory, off the event loop."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from tools_bridge.compile_messages import Vocabulary
from tools_bridge.compile_process import CompileProcess, NotCompiled, TooAmbiguous, TooSlow
from tools_bridge.compile_shares import CompilerUnavailable, OverShare, Shares
from tools_bridge.reply_request import GrammarRequest
from tools_bridge.schemas import GrammarError

__all__ = ["CompilerUnavailable", "GrammarCompiler", "OverShare"]

MOST_REFUSED = 1024  # whose refusals are remembered
MAX_REFUSAL_CHARS = 4096
MOST_KEPT = 4096
LATE_SECONDS = 60.0  # that one which took too long is not tried again
_LATE = (TooSlow, TooAmbiguous)
MAX_JOBS = 6  # running or waiting for a process; fewer than the threads that call, so that one can refuse


class _Job:
    """One compilation under way; whoever asks for the same grammar waits for it too."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.text = ""
        self.error: GrammarError | CompilerUnavailable | None = None


class _Children:
    """The processes that run. Closing kills them, also those that work."""

    def __init__(self) -> None:
        self.idle: list[CompileProcess] = []
        self.busy: list[CompileProcess] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True
        for process in list(self.busy):
            process.kill()
        while self.idle:
            self.idle.pop().close()


class GrammarCompiler:
    """Compiles for one vocabulary; thread-safe. `compile` blocks: call it off the event loop.

    Compilations run in at most `processes` child processes, which start when first needed and stay
    for the next schema. One that takes longer than `timeout` seconds, or more than `memory_bytes` on
    top of what a child has at rest, costs its child and is refused; the others do not notice. While
    all children are busy a new grammar waits `timeout` seconds, and is then a CompilerUnavailable, as
    is one that comes while there are `MAX_JOBS` already. Of owned requests no owner has more than a share
    (`compile_shares`). `cache_chars` bounds what is kept. What was refused
    is remembered, too. A schema that is not strict and cannot be compiled is held to its type alone, and the
    log says so. `close` ends all children at once, and what they were at is a CompilerUnavailable.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        timeout: float = 10.0,
        processes: int = 2,
        memory_bytes: int = 2 * 1024**3,
        cache_chars: int = 64 * 1024 * 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vocabulary = msgspec.msgpack.encode(
            Vocabulary(list(token_bytes), vocab_size, list(stop_token_ids), memory_bytes)
        )
        self._timeout = timeout
        self._shares = Shares(processes, MAX_JOBS, clock)
        self._children = _Children()
        self._clock = clock
        self._refused: OrderedDict[str, tuple[str, float]] = OrderedDict()  # why, and until when
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._cache_chars = cache_chars
        self._cached_chars = 0
        self.close = weakref.finalize(self, self._children.close)

    def cached(self, wanted: GrammarRequest) -> str | None:
        """What `compile` would return, or raise, at once; never blocks."""
        key = wanted.id
        with self._lock:
            return self._look_up(key)

    def compile(self, wanted: GrammarRequest) -> str:
        """The compiled grammar as text for `DefineGrammar`, or "" where a request's form is met by any text.
        A GrammarError says why there is none.

        CompilerUnavailable: the same grammar may be had later.
        """
        key = wanted.id
        with self._lock:
            text = self._look_up(key)
            if text is not None:
                return text
            job = self._jobs.get(key)
            mine = job is None
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    raise CompilerUnavailable("too many schemas are being compiled; try again later")
                self._shares.enter(wanted.owner)
                job = self._jobs[key] = _Job()
        if mine:
            self._run(key, wanted, job)
        else:
            job.done.wait()  # whoever runs it is bounded
        if job.error is not None:
            if isinstance(job.error, CompilerUnavailable):
                raise job.error.again()
            raise GrammarError(str(job.error))  # a new one: several threads may raise it
        return job.text

    def _run(self, key: str, wanted: GrammarRequest, job: _Job) -> None:
        job.error = CompilerUnavailable("compiling was broken off")  # unless it gets to its end
        try:
            with self._shares.process(wanted.owner, self._timeout):
                job.text = self._compile(wanted)
            job.error = None
        except (GrammarError, CompilerUnavailable) as error:
            job.error = error
        except OSError as error:
            job.error = CompilerUnavailable(f"the schema compiler does not start: {error}")
        finally:
            # One that was let go to its type has its grammar: nobody is to simplify it.
            self._shares.leave(wanted.owner, late=isinstance(job.error, _LATE))
            with self._lock:
                del self._jobs[key]
                if job.error is None:
                    self._keep(key, job.text)
                elif isinstance(job.error, GrammarError):
                    self._refuse(key, job.error)
            job.done.set()

    def _compile(self, wanted: GrammarRequest) -> str:
        """With schemas that are not strict let go where they cannot be compiled: first the one that is known
        to be at fault, then all. That takes as long again at most."""
        let_go: dict[str, str] = {}
        seconds = self._timeout
        while True:
            try:
                return self._compile_once(wanted, seconds, let_go)
            except NotCompiled as error:
                left = wanted.loose() - let_go.keys()
                if not left:
                    raise
                one = not let_go and error.place in left
                let_go |= dict.fromkeys([error.place] if one else sorted(left), _why(error))
                seconds = self._timeout / 2

    def _compile_once(self, wanted: GrammarRequest, seconds: float, let_go: dict[str, str]) -> str:
        process = self._take()
        try:
            return process.compile(wanted, seconds, let_go)
        except GrammarError:
            if self._children.closed:
                raise CompilerUnavailable("the schema compiler is closed") from None
            raise
        finally:
            self._give_back(process)

    def _take(self) -> CompileProcess:
        with self._lock:
            process = self._children.idle.pop() if self._children.idle else None
        if process is None:
            process = CompileProcess(self._vocabulary)
        with self._lock:
            self._children.busy.append(process)
            closed = self._children.closed
        if closed:  # while it started
            self._give_back(process)
            raise CompilerUnavailable("the schema compiler is closed")
        return process

    def _give_back(self, process: CompileProcess) -> None:
        with self._lock:
            self._children.busy.remove(process)
            keeps = process.usable and not self._children.closed
            if keeps:
                self._children.idle.append(process)
        if not keeps and process.usable:
            process.close()

    def _look_up(self, key: str) -> str | None:
        text = self._cache.get(key)
        if text is not None:
            self._cache.move_to_end(key)
            return text
        why, until = self._refused.get(key, ("", 0.0))
        if why and self._clock() < until:
            self._refused.move_to_end(key)
            raise GrammarError(why)
        return None

    def _refuse(self, key: str, error: GrammarError) -> None:
        until = self._clock() + LATE_SECONDS if isinstance(error, TooSlow) else math.inf
        if len(str(error)) <= MAX_REFUSAL_CHARS:
            self._refused[key] = (str(error), until)
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)

    def _keep(self, key: str, text: str) -> None:
        self._cache[key] = text
        self._cached_chars += len(text)
        while self._cached_chars > self._cache_chars or len(self._cache) > MOST_KEPT:
            _, old = self._cache.popitem(last=False)
            self._cached_chars -= len(old)


def _why(error: NotCompiled) -> str:
    return str(error).removeprefix(f"{error.place}: ")
