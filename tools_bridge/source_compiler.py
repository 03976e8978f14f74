"""Grammars of one vocabulary, made by xgrammar in this process: without a bound of time or memory, so not in
one that serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tools_bridge.compile_messages import MAX_COMPILED_CHARS, MAX_SOURCE_CHARS
from tools_bridge.cpu_guard import Guard, NoGuard
from tools_bridge.grammar import GrammarSource
from tools_bridge.json_schema.ebnf import rules_of
from tools_bridge.probe import MOST_STEPS, PART_STEPS, check_speed, parts_of
from tools_bridge.repetitions import Ambiguous, unambiguous
from tools_bridge.schemas import GrammarError
from tools_bridge.token_probe import check_tokens, long_tokens
from tools_bridge.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    import xgrammar

PROBE_SECONDS = 5.0  # of CPU, for one walk through a grammar; usually it takes a tenth of one
TOO_MUCH_MEMORY = "the schema needs too much memory to compile; simplify it"


class Uncompilable(GrammarError):
    """Of a grammar whose source is as it should be."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(placed(place, why))
        self.place = place


def placed(place: str, why: str) -> str:
    return f"{place}: {why}" if place else why


class SourceCompiler:
    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_token_ids: Sequence[int],
        guard: Guard | None = None,
    ) -> None:
        """guard: ends this process where a grammar holds it; for one that may end."""
        import xgrammar  # here, not above: it imports torch

        self._guard = guard or NoGuard()
        self._long = long_tokens(token_bytes)
        self._vocabulary = GrammarVocabulary(token_bytes, vocab_size, stop_token_ids)
        self._compiler = xgrammar.GrammarCompiler(self._vocabulary.info, max_threads=1, cache_enabled=False)
        bytes_ = GrammarVocabulary([bytes([n]) for n in range(256)], 257, [256])  # costs next to nothing
        self._of_bytes = xgrammar.GrammarCompiler(bytes_.info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource, tell: Callable[[str], None] = lambda place: None) -> str:
        """The compiled grammar as text. `tell`: the place of what is compiled from here on, first of each
        part by itself, then of the largest, for all of them together. Uncompilable, MemoryError,
        RecursionError."""
        if (count := len(source.text)) > MAX_SOURCE_CHARS:
            why = f"the tools and schemas are {count} characters long, more than {MAX_SOURCE_CHARS}"
            raise Uncompilable("", why)
        sizes: dict[str, int] = {}
        known: set[str] = set()
        for place, text in source.parts:
            tell(place)
            try:
                sizes[place] = self._alone(place, text, known)
            except Ambiguous as error:
                raise Uncompilable(place, str(error)) from None
        place = max(sizes, key=lambda place: sizes[place], default="")
        tell(place)
        grammar = _made(place, self._compiler, source.text)
        self._check_beginning(place, grammar)
        try:
            self._check_speed(grammar)
            check_tokens(grammar, self._vocabulary.vocab_size, self._long, self._guard)
        except GrammarError as error:
            raise Uncompilable(self._slowest(source) or place, str(error)) from None
        text = self._vocabulary.seal(grammar)
        if len(text) > MAX_COMPILED_CHARS:
            raise Uncompilable(
                place, "the schema is too complex: its compiled form is too large; simplify it"
            )
        return text

    def _check_speed(self, grammar: xgrammar.CompiledGrammar, steps: int = MOST_STEPS) -> None:
        self._guard.begin(PROBE_SECONDS)
        try:
            check_speed(grammar, steps=steps)
        finally:
            self._guard.end()

    def _alone(self, place: str, text: str, known: set[str]) -> int:
        """Tries a part over bytes, and the patterns and grammars in it, which walks along it may not come to;
        its size. What may not be by itself may be where it stands."""
        for inner in parts_of(text):
            if inner in known:
                continue
            known.add(inner)
            grammar = self._perhaps(inner)
            try:
                if grammar is not None:
                    self._check_speed(grammar, PART_STEPS)
            except GrammarError as error:
                raise Uncompilable(place, str(error)) from None
        whole = self._perhaps(text)
        return 0 if whole is None else int(whole.memory_size_bytes)

    def _slowest(self, source: GrammarSource) -> str:
        """The place of the first part that is refused by itself."""
        for place, text in source.parts:
            grammar = self._perhaps(text)
            try:
                if grammar is not None:
                    self._check_speed(grammar)
            except GrammarError:
                return place
        return ""

    def _perhaps(self, source: str) -> xgrammar.CompiledGrammar | None:
        try:
            return _made("", self._of_bytes, source)
        except Uncompilable:
            return None

    def _check_beginning(self, place: str, grammar: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        mask = np.zeros((1, (self._vocabulary.vocab_size + 31) // 32), dtype=np.int32)
        matcher = xgrammar.GrammarMatcher(grammar)
        # False: every token is allowed, and the mask was left alone.
        if matcher.fill_next_token_bitmask(mask, 0) and not mask.any():
            raise Uncompilable(place, "the schema cannot be met: no text can even begin to match it")


def compiled(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    """From a `GrammarSource`'s text. RuntimeError; Ambiguous."""
    import xgrammar

    source = unambiguous(source)
    if '"json_schema"' not in source:
        return compiler.compile_structural_tag(source)
    rules = rules_of(source, lambda tag: str(xgrammar.Grammar.from_structural_tag(tag)))
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(rules))


def _made(place: str, compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    try:
        return compiled(compiler, source)
    except Ambiguous as error:
        if not place:
            raise
        raise Uncompilable(place, str(error)) from None
    except (GrammarError, RecursionError, MemoryError):
        raise
    except Exception as error:  # xgrammar raises bare RuntimeErrors
        if no_memory(error):
            raise MemoryError from None
        raise Uncompilable(place, f"the schema cannot be compiled: {_reason(error)}") from None


def no_memory(error: Exception) -> bool:
    """As xgrammar says it."""
    return "bad_alloc" in str(error)


def _reason(error: Exception) -> str:
    """xgrammar's message without its log prefix (`[time] file:line: `), in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    return text[:300]
