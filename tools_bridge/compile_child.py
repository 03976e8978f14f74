"""The process that makes and compiles grammars. It may be killed, run out of memory or overflow its stack at
any time.

Neither rewriting a schema nor xgrammar has a bound of time or memory on what clients send, so nothing else
does them.
Started by `CompileProcess`; ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np

from tools_bridge.compile_messages import (
    MAX_COMPILED_CHARS,
    MAX_SOURCE_CHARS,
    Job,
    Made,
    Vocabulary,
    receive,
    send,
)
from tools_bridge.grammar import GrammarSource
from tools_bridge.json_schema.ebnf import rules_of
from tools_bridge.probe import PART_STEPS, check_speed, parts_of
from tools_bridge.repetitions import rules_of_regex
from tools_bridge.reply_request import source_of
from tools_bridge.schemas import GrammarError
from tools_bridge.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    import xgrammar

TOO_MUCH_MEMORY = "the schema needs too much memory to compile; simplify it"


def main() -> None:
    jobs, replies = _pipes()
    wanted = receive(jobs, Vocabulary)
    if wanted is None:
        return
    try:
        compiler = _Compiler(wanted)
    except ValueError as error:
        send(replies, Made(error=str(error)))
        return
    limit = _limit_memory(wanted.memory_bytes)
    send(replies, Made())
    _silence()
    while (job := receive(jobs, Job)) is not None:
        # The default action of SIGALRM ends the process, also in the middle of native code.
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        made = compiler.make(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Memory that malloc keeps counts against the limit; the next schema must not pay for it.
        last = made.error == TOO_MUCH_MEMORY or (limit is not None and _address_space() > limit)
        send(replies, msgspec.structs.replace(made, last=last))
        if last:
            return


class _Compiler:
    def __init__(self, wanted: Vocabulary) -> None:
        import xgrammar  # here, not above: it imports torch

        self._vocabulary = GrammarVocabulary(wanted.token_bytes, wanted.vocab_size, wanted.stop_token_ids)
        self._compiler = xgrammar.GrammarCompiler(self._vocabulary.info, max_threads=1, cache_enabled=False)
        bytes_ = GrammarVocabulary([bytes([n]) for n in range(256)], 257, [256])  # costs next to nothing
        self._of_bytes = xgrammar.GrammarCompiler(bytes_.info, max_threads=1, cache_enabled=False)

    def make(self, job: Job) -> Made:
        try:
            source = GrammarSource(job.source) if job.source else _rewritten(job.request)
            if source is None:
                return Made()
            grammar = compiled(self._compiler, source.text)
            self._check_beginning(grammar)
            self._check_speed(source.text, grammar)
            text = self._vocabulary.seal(grammar)
        except GrammarError as error:
            return Made(error=str(error))
        except RecursionError:
            return Made(error="the schema is nested too deeply")
        except MemoryError:
            return Made(error=TOO_MUCH_MEMORY)
        except Exception as error:  # xgrammar raises bare RuntimeErrors
            if "bad_alloc" in str(error):
                return Made(error=TOO_MUCH_MEMORY)
            return Made(error=f"the schema cannot be compiled: {_reason(error)}")
        if len(text) > MAX_COMPILED_CHARS:
            return Made(error="the schema is too complex: its compiled form is too large; simplify it")
        return Made(text, left_out=source.left_out)

    def _check_speed(self, source: str, grammar: xgrammar.CompiledGrammar) -> None:
        check_speed(grammar)
        for part in parts_of(source):
            try:
                alone = compiled(self._of_bytes, part)
            except RuntimeError:  # what it may not be by itself, it may be where it stands
                continue
            check_speed(alone, steps=PART_STEPS)

    def _check_beginning(self, grammar: xgrammar.CompiledGrammar) -> None:
        import xgrammar

        mask = np.zeros((1, (self._vocabulary.vocab_size + 31) // 32), dtype=np.int32)
        matcher = xgrammar.GrammarMatcher(grammar)
        # False: every token is allowed, and the mask was left alone.
        if matcher.fill_next_token_bitmask(mask, 0) and not mask.any():
            raise GrammarError("the schema cannot be met: no text can even begin to match it")


def compiled(compiler: xgrammar.GrammarCompiler, source: str) -> xgrammar.CompiledGrammar:
    """From a `GrammarSource`'s text. RuntimeError; GrammarError where it cannot be followed."""
    import xgrammar

    source = unambiguous(source)
    if '"json_schema"' not in source:
        return compiler.compile_structural_tag(source)
    rules = rules_of(source, lambda tag: str(xgrammar.Grammar.from_structural_tag(tag)))
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(rules))


def unambiguous(source: str) -> str:
    """A structural tag with rules in the place of regular expressions that have many ways to read a text."""
    if '"regex"' not in source:
        return source
    tag = json.loads(source)
    rest: list[object] = [tag]
    while rest:
        node = rest.pop()
        if isinstance(node, list):
            rest.extend(node)
        if not isinstance(node, dict):
            continue
        pattern = node.get("pattern")
        if node.get("type") == "regex" and isinstance(pattern, str):
            rules = rules_of_regex(pattern)
            if rules is not None:
                node.clear()
                node.update({"type": "grammar", "grammar": rules})
        rest.extend(value for key, value in node.items() if key != "json_schema")
    return json.dumps(tag, ensure_ascii=False)


def _rewritten(request: bytes) -> GrammarSource | None:
    """None where any text will do."""
    source = source_of(request)
    if source is None:
        return None
    if len(source.text) > MAX_SOURCE_CHARS:
        raise GrammarError(
            f"the tools and schemas are {len(source.text)} characters long, more than {MAX_SOURCE_CHARS}"
        )
    return source


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """(jobs, replies). What native code prints must not get among the replies."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, replies


def _silence() -> None:
    """From here on, messages on stderr are about what clients sent: they are not for the server's log."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def _limit_memory(more: int) -> int | None:
    """Allow `more` bytes from here on; the size at which to end. None where memory cannot be limited."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its dump is no use
    if not sys.platform.startswith("linux"):
        return None
    now = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    return now + more // 4


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0] if sys.platform.startswith("linux") else "0"
    return int(pages) * resource.getpagesize()


def _reason(error: Exception) -> str:
    """xgrammar's message without its log prefix (`[time] file:line: `), in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if text.startswith("[") and ": " in text:
        text = text.split(": ", 1)[1]
    return text[:300]


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the server was killed: nobody reads this, and no log wants it
        os._exit(1)
