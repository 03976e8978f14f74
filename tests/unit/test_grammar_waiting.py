"""Who waits for a grammar that is being compiled, and for how long."""

import threading

import pytest

from tests.grammar_rig import compiler_of_bytes
from tools_bridge.compiler import MAX_JOBS, CompilerUnavailable
from tools_bridge.grammar import ResponseFormat, ToolChoice
from tools_bridge.registry import DEFAULT_FORM
from tools_bridge.reply_request import GrammarRequest, grammar_request
from tools_bridge.types import ToolSpec


def test_waiting_is_bounded_and_what_is_cached_is_not_kept_waiting(monkeypatch):
    compiler = compiler_of_bytes(timeout=0.05, processes=1, cache_chars=100)
    sources = [GrammarRequest(str(n).encode()) for n in range(9)]
    started, gate, runs, results = threading.Event(), threading.Event(), [], []

    def slow(source):
        runs.append(source.data.decode())
        started.set()
        assert gate.wait(60)
        return "x" * 60

    monkeypatch.setattr(compiler, "_compile", slow)
    compiler._keep(sources[8].id, "y")

    def waiter():
        results.append(compiler.compile(sources[0]))

    threads = [threading.Thread(target=waiter) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    with pytest.raises(CompilerUnavailable, match="too many"):
        compiler.compile(sources[1])  # the only process is busy
    assert compiler.compile(sources[8]) == compiler.cached(sources[8]) == "y"
    compiler._jobs.update((str(n), None) for n in range(MAX_JOBS - 1))
    compiler._timeout = 60
    with pytest.raises(CompilerUnavailable, match="too many"):
        compiler.compile(sources[1])  # at once: enough are waiting
    compiler._timeout = 0.05
    for n in range(MAX_JOBS - 1):
        del compiler._jobs[str(n)]
    gate.set()
    for thread in threads:
        thread.join()
    assert results == ["x" * 60] * 8
    assert runs == ["0"]
    compiler.compile(sources[2])
    compiler.compile(sources[0])  # 100 characters hold one result only
    assert runs.count("0") == 2


def test_many_threads_compile_one_grammar_once(monkeypatch):
    compiler = compiler_of_bytes()
    runs, real = [], compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda source: (runs.append(1), real(source))[1])
    choice, free = ToolChoice("required"), ResponseFormat()
    source = grammar_request(
        DEFAULT_FORM, [ToolSpec("f")], choice, parallel=True, response=free, thinking="no"
    )  # fmt: skip
    results = []
    threads = [threading.Thread(target=lambda: results.append(compiler.compile(source))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
    assert len(results) == 8
    assert len(set(results)) == 1
