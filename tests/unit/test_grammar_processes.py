"""Compiling in child processes: a schema that costs too much costs its child, and nobody else notices."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from tests.grammar_rig import BYTES, EOS, VOCAB, compiler_of_bytes
from tools_bridge import compile_process
from tools_bridge.compile_messages import Vocabulary, send_encoded
from tools_bridge.compile_process import CompileProcess
from tools_bridge.compiler import CompilerUnavailable, GrammarCompiler
from tools_bridge.grammar import GrammarError, GrammarSource, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.registry import DEFAULT_FORM
from tools_bridge.reply_request import grammar_request
from tools_bridge.types import ToolSpec

MIB = 1024 * 1024
GREEDY = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}


def source(schema):
    made = reply_grammar(response=ResponseFormat("json_schema", schema))
    assert made is not None
    return made


def vocabulary(memory_bytes=256 * MIB, stops=(EOS,)):
    return msgspec.msgpack.encode(Vocabulary(BYTES, VOCAB, list(stops), memory_bytes))


PLAIN = source({"type": "integer"})


def test_memory_is_bounded_and_the_next_schema_compiles():
    compiler = compiler_of_bytes(timeout=60, processes=1, memory_bytes=256 * MIB)
    with pytest.raises(GrammarError, match=r"too much memory|too large or nested"):
        compiler.compile(source(GREEDY))
    assert compiler.compile(PLAIN)
    compiler.close()


def test_a_late_child_is_killed_and_replaced():
    now = [0.0]
    compiler = compiler_of_bytes(timeout=60, processes=1, clock=lambda: now[0])
    assert compiler.compile(PLAIN)
    [child] = compiler._children.idle
    os.kill(child.pid, signal.SIGSTOP)  # as slow as can be
    compiler._timeout = 0.1
    with pytest.raises(GrammarError, match=r"took longer than 0\.1 s"):
        compiler.compile(source({"type": "boolean"}))
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    compiler._timeout = 60
    with pytest.raises(GrammarError, match="took longer"):  # not again at once
        compiler.cached(source({"type": "boolean"}))
    now[0] = 60.0
    assert compiler.compile(source({"type": "boolean"}))
    assert compiler._children.idle[0].pid != child.pid
    compiler.close()


def test_a_crash_is_the_end_of_one_schema_only():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    assert compiler.compile(PLAIN)
    # Past the checks of patterns: xgrammar recurses into groups until its stack is used up.
    pattern = "(" * 100_000 + "a" + ")" * 100_000
    form = {"type": "grammar", "grammar": f'root ::= Regex("{pattern}")'}
    deep = json.dumps({"type": "structural_tag", "format": form})
    with pytest.raises(GrammarError, match="nested too deeply"):
        compiler.compile(GrammarSource(deep))
    schema = PLAIN.text.replace('{"type":"integer"}', f'{{"type":"string","pattern":"{pattern}"}}')
    with pytest.raises(GrammarError, match="nested too deeply"):
        compiler.compile(GrammarSource(schema))
    assert compiler.compile(source({"type": "null"}))
    compiler.close()


def test_children_stay_and_end_with_the_compiler():
    compiler = compiler_of_bytes(timeout=60)
    compiler.compile(PLAIN)
    [child] = compiler._children.idle
    compiler.compile(source({"type": "null"}))
    assert compiler._children.idle == [child]
    del compiler
    assert not child.usable
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def request(schema, tools=(), choice=None):
    response = ResponseFormat("json_schema", schema) if schema else ResponseFormat()
    choice = choice or ToolChoice("none")
    return grammar_request(
        DEFAULT_FORM, list(tools), choice, parallel=True, response=response, thinking="no"
    )  # fmt: skip


def test_a_request_is_rewritten_in_the_child_once():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    wanted = request({"type": "integer"})
    assert compiler.cached(wanted) is None
    made = compiler.compile(wanted)
    assert made == compiler.compile(PLAIN)
    compiler.close()
    assert compiler.compile(request({"type": "integer"})) == made  # without a child
    assert request({"type": "null"}).id != wanted.id


def test_a_request_that_any_text_meets_has_no_grammar():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    free = request(None, [ToolSpec("now")], ToolChoice("auto"))
    assert compiler.compile(free) == compiler.cached(free) == ""
    compiler.close()


def test_a_refused_request_is_refused_again_without_a_child():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    wanted = request({"type": "nonsense"})
    with pytest.raises(GrammarError) as first:
        compiler.compile(wanted)
    compiler.close()
    with pytest.raises(GrammarError) as again:
        compiler.cached(wanted)
    assert str(first.value) == str(again.value)
    assert str(first.value).startswith("response_format.json_schema.schema")


def test_closing_ends_what_is_being_compiled():
    compiler = compiler_of_bytes(timeout=600, processes=1)
    assert compiler.compile(PLAIN)
    [child] = compiler._children.idle
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(compiler.compile, source({"type": "boolean"}))
        while not compiler._children.busy:
            time.sleep(0.001)
        compiler.close()
        with pytest.raises(CompilerUnavailable, match="closed"):
            waits.result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    with pytest.raises(CompilerUnavailable, match="closed"):
        compiler.compile(source({"type": "null"}))


def test_a_child_that_does_not_start_is_no_fault_of_the_schema(monkeypatch):
    with pytest.raises(CompilerUnavailable, match="at least one stop"):
        CompileProcess(vocabulary(stops=()))
    compiler = GrammarCompiler(BYTES, VOCAB, [EOS])
    monkeypatch.setattr(compile_process, "COMMAND", ("/bin/false",))
    with pytest.raises(CompilerUnavailable, match="does not start"):
        compiler.compile(PLAIN)
    monkeypatch.setattr(compile_process, "COMMAND", ("/no/such/program",))
    with pytest.raises(CompilerUnavailable, match="does not start"):
        compiler.compile(PLAIN)


def test_a_child_whose_server_is_gone_leaves_without_a_word():
    child = subprocess.Popen(
        [sys.executable, "-m", "tools_bridge.compile_child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    send_encoded(child.stdin, vocabulary())
    with child.stdin, child.stderr:
        assert child.stderr.read() == b""
    assert child.wait() == 1
