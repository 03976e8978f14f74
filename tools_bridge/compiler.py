"""Compiling grammar sources, within bounds, off the event loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools_bridge.grammar import GrammarSource
from tools_bridge.schemas import GrammarError
from tools_bridge.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    import xgrammar

MAX_SOURCE_CHARS = 512 * 1024
MAX_COMPILED_CHARS = 32 * 1024 * 1024  # what a worker must read in one message


class _Job:
    """One compilation under way; whoever asks for the same grammar waits for it too."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.text = ""
        self.error = ""


class GrammarCompiler:
    """Compiles for one vocabulary; thread-safe. `compile` blocks: call it off the event loop.

    A compilation cannot be stopped from outside. One that takes longer than `timeout` seconds is
    given up on but goes on in its thread; at most `threads` run at once, and while they are all
    busy for longer than `timeout` further grammars are refused. `cache_chars` bounds what is kept.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        *,
        timeout: float = 10.0,
        threads: int = 2,
        cache_chars: int = 64 * 1024 * 1024,
    ) -> None:
        import xgrammar  # here, not above: it imports torch

        self._vocabulary = GrammarVocabulary(token_bytes, vocab_size, stop_token_ids)
        self._compiler: xgrammar.GrammarCompiler = xgrammar.GrammarCompiler(
            self._vocabulary.info, max_threads=1, cache_enabled=False
        )
        self._timeout = timeout
        self._slots = threading.BoundedSemaphore(threads)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._cache_chars = cache_chars
        self._cached_chars = 0

    def compile(self, source: GrammarSource) -> str:
        """The compiled grammar as text for `DefineGrammar`; a GrammarError says why there is none."""
        if len(source.text) > MAX_SOURCE_CHARS:
            raise GrammarError(
                f"the tools and schemas are {len(source.text)} characters long, more than {MAX_SOURCE_CHARS}"
            )
        key = source.id
        with self._lock:
            text = self._cache.get(key)
            if text is not None:
                self._cache.move_to_end(key)
                return text
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job()
                threading.Thread(
                    target=self._run, args=(key, source, job), name="grammar-compiler", daemon=True
                ).start()
        if not job.done.wait(self._timeout):
            raise GrammarError(f"the schema took longer than {self._timeout:g} s to compile; simplify it")
        if job.error:
            raise GrammarError(job.error)
        return job.text

    def _run(self, key: str, source: GrammarSource, job: _Job) -> None:
        try:
            if self._slots.acquire(timeout=self._timeout):
                try:
                    job.text = self._compile(source)
                finally:
                    self._slots.release()
            else:
                job.error = "too many schemas are being compiled; try again later"
        except GrammarError as error:
            job.error = str(error)
        except Exception as error:  # xgrammar raises bare RuntimeErrors, and MemoryError may come too
            job.error = f"the schema cannot be compiled: {_reason(error)}"
        finally:
            with self._lock:
                del self._jobs[key]
                if not job.error:
                    self._keep(key, job.text)
            job.done.set()

    def _compile(self, source: GrammarSource) -> str:
        grammar = self._compiler.compile_structural_tag(source.text)
        text = self._vocabulary.seal(grammar)
        if len(text) > MAX_COMPILED_CHARS:
            raise GrammarError("the schema is too complex: its compiled form is too large; simplify it")
        return text

    def _keep(self, key: str, text: str) -> None:
        self._cache[key] = text
        self._cached_chars += len(text)
        while self._cached_chars > self._cache_chars:
            _, old = self._cache.popitem(last=False)
            self._cached_chars -= len(old)


def _reason(error: Exception) -> str:
    """xgrammar's message without its log prefix (`[time] file:line: `), in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    return text[:300]
