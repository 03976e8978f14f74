"""Compiling grammar sources: in child processes, within bounds of time and memory, off the event loop."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from tools_bridge.compile_messages import Vocabulary
from tools_bridge.compile_process import CompileProcess, CompilerUnavailable
from tools_bridge.grammar import GrammarSource
from tools_bridge.schemas import GrammarError

__all__ = ["CompilerUnavailable", "GrammarCompiler"]

MAX_SOURCE_CHARS = 512 * 1024
MAX_JOBS = 6  # running or waiting for a process; fewer than the threads that call, so that one can refuse


class _Job:
    """One compilation under way; whoever asks for the same grammar waits for it too."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.text = ""
        self.error: GrammarError | CompilerUnavailable | None = None


class GrammarCompiler:
    """Compiles for one vocabulary; thread-safe. `compile` blocks: call it off the event loop.

    Compilations run in at most `processes` child processes, which start when first needed and stay
    for the next schema. One that takes longer than `timeout` seconds, or more than `memory_bytes` on
    top of what a child has at rest, costs its child and is refused; the others do not notice. While
    all children are busy a new grammar waits `timeout` seconds, and is then a CompilerUnavailable, as
    is one that comes while there are `MAX_JOBS` already. `cache_chars` bounds what is kept.
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
    ) -> None:
        self._vocabulary = msgspec.msgpack.encode(
            Vocabulary(list(token_bytes), vocab_size, list(stop_token_ids), memory_bytes)
        )
        self._timeout = timeout
        self._slots = threading.BoundedSemaphore(processes)
        self._idle: list[CompileProcess] = []
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._cache_chars = cache_chars
        self._cached_chars = 0
        self.close = weakref.finalize(self, _close_all, self._idle)

    def cached(self, source: GrammarSource) -> str | None:
        """What `compile` would return at once; never blocks."""
        key = source.id
        with self._lock:
            return self._look_up(key)

    def compile(self, source: GrammarSource) -> str:
        """The compiled grammar as text for `DefineGrammar`; a GrammarError says why there is none.

        CompilerUnavailable: the same grammar may be had later.
        """
        if len(source.text) > MAX_SOURCE_CHARS:
            raise GrammarError(
                f"the tools and schemas are {len(source.text)} characters long, more than {MAX_SOURCE_CHARS}"
            )
        key = source.id
        with self._lock:
            text = self._look_up(key)
            if text is not None:
                return text
            job = self._jobs.get(key)
            mine = job is None
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    raise _busy()
                job = self._jobs[key] = _Job()
        if mine:
            self._run(key, source, job)
        else:
            job.done.wait()  # whoever runs it is bounded
        if job.error is not None:
            raise type(job.error)(str(job.error))  # a new one: several threads may raise it
        return job.text

    def _run(self, key: str, source: GrammarSource, job: _Job) -> None:
        job.error = CompilerUnavailable("compiling was broken off")  # unless it gets to its end
        try:
            job.text = self._in_a_slot(source)
            job.error = None
        except (GrammarError, CompilerUnavailable) as error:
            job.error = error
        except OSError as error:
            job.error = CompilerUnavailable(f"the schema compiler does not start: {error}")
        finally:
            with self._lock:
                del self._jobs[key]
                if job.error is None:
                    self._keep(key, job.text)
            job.done.set()

    def _in_a_slot(self, source: GrammarSource) -> str:
        if not self._slots.acquire(timeout=self._timeout):
            raise _busy()
        try:
            return self._compile(source)
        finally:
            self._slots.release()

    def _compile(self, source: GrammarSource) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = CompileProcess(self._vocabulary)
        try:
            return process.compile(source.text, self._timeout)
        finally:
            if process.usable:
                with self._lock:
                    self._idle.append(process)

    def _look_up(self, key: str) -> str | None:
        text = self._cache.get(key)
        if text is not None:
            self._cache.move_to_end(key)
        return text

    def _keep(self, key: str, text: str) -> None:
        self._cache[key] = text
        self._cached_chars += len(text)
        while self._cached_chars > self._cache_chars:
            _, old = self._cache.popitem(last=False)
            self._cached_chars -= len(old)


def _busy() -> CompilerUnavailable:
    return CompilerUnavailable("too many schemas are being compiled; try again later")


def _close_all(processes: list[CompileProcess]) -> None:
    while processes:
        processes.pop().close()
