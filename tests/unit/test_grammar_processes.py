"""Compiling in child processes: a schema that costs too much costs its child, and nobody else notices."""

import os
import re
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
from tools_bridge.compile_process import CompileProcess, NotCompiled, TooSlow
from tools_bridge.compiler import CompilerUnavailable, GrammarCompiler
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice
from tools_bridge.registry import DEFAULT_FORM
from tools_bridge.reply_request import GrammarRequest, grammar_request
from tools_bridge.types import ToolSpec

MIB = 1024 * 1024
GREEDY = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}


def asked(response, tools=(), choice=None):
    choice = choice or ToolChoice("none")
    return grammar_request(
        DEFAULT_FORM, list(tools), choice, parallel=True, response=response, thinking="no"
    )  # fmt: skip


def request(schema, tools=(), choice=None, *, strict=True):
    response = ResponseFormat("json_schema", schema, strict) if schema else ResponseFormat()
    return asked(response, tools, choice)


def vocabulary(memory_bytes=256 * MIB, stops=(EOS,)):
    return msgspec.msgpack.encode(Vocabulary(BYTES, VOCAB, list(stops), memory_bytes))


PLAIN = request({"type": "integer"})


def test_memory_is_bounded_and_the_next_schema_compiles():
    compiler = compiler_of_bytes(timeout=60, processes=1, memory_bytes=256 * MIB)
    with pytest.raises(GrammarError, match=r"too much memory|too large or nested"):
        compiler.compile(request(GREEDY))
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
        compiler.compile(request({"type": "boolean"}))
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    compiler._timeout = 60
    with pytest.raises(GrammarError, match="took longer"):  # not again at once
        compiler.cached(request({"type": "boolean"}))
    now[0] = 60.0
    assert compiler.compile(request({"type": "boolean"}))
    assert compiler._children.idle[0].pid != child.pid
    compiler.close()


def test_a_crash_is_the_end_of_one_schema_only():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    assert compiler.compile(PLAIN)
    # Past the checks of patterns: xgrammar recurses into groups until its stack is used up.
    pattern = "(" * 60_000 + "a" + ")" * 60_000
    form = {"type": "grammar", "grammar": f'root ::= Regex("{pattern}")'}
    with pytest.raises(GrammarError, match=r"^structural_tag: .* nested too deeply"):
        compiler.compile(asked(ResponseFormat("structural_tag", {"format": form})))
    assert compiler.compile(request({"type": "null"}))
    compiler.close()


def test_children_stay_and_end_with_the_compiler():
    compiler = compiler_of_bytes(timeout=60)
    compiler.compile(PLAIN)
    [child] = compiler._children.idle
    compiler.compile(request({"type": "null"}))
    assert compiler._children.idle == [child]
    del compiler
    assert not child.usable
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_request_is_rewritten_in_the_child_once():
    compiler = compiler_of_bytes(timeout=60, processes=1)
    wanted = request({"type": "integer"})
    assert compiler.cached(wanted) is None
    made = compiler.compile(wanted)
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
        waits = pool.submit(compiler.compile, request({"type": "boolean"}))
        while not compiler._children.busy:
            time.sleep(0.001)
        compiler.close()
        with pytest.raises(CompilerUnavailable, match="closed"):
            waits.result(60)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    with pytest.raises(CompilerUnavailable, match="closed"):
        compiler.compile(request({"type": "null"}))


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


SLOW = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}}


def held_to(monkeypatch, fails, *, late=()):
    """A compiler whose child is slow or fails at these places; what each attempt let go."""
    compiler = compiler_of_bytes(timeout=60, processes=1)
    tried = []

    def once(wanted, seconds, let_go):
        tried.append((seconds, set(let_go)))
        for place in (*fails, *late):
            if place not in let_go:
                raise (TooSlow if place in late else NotCompiled)(place, "it is too much")
        return "made"

    monkeypatch.setattr(compiler, "_compile_once", once)
    return compiler, tried


TOOLS = [ToolSpec("f", SLOW), ToolSpec("g", SLOW), ToolSpec("h", SLOW)]
F, G, H = (f"tools.{name}.parameters" for name in "fgh")


def test_what_cannot_be_compiled_is_let_go_where_it_is_not_strict(monkeypatch):
    wanted = request(None, TOOLS, ToolChoice("required"))
    compiler, tried = held_to(monkeypatch, [G])
    assert compiler.compile(wanted) == "made"
    assert tried == [(60, set()), (30, {G})]
    compiler, tried = held_to(monkeypatch, [], late=[G, H])
    assert compiler.compile(wanted) == "made"
    assert tried == [(60, set()), (30, {G}), (30, {F, G, H})]
    owned = GrammarRequest(wanted.data, "b")
    compiler, tried = held_to(monkeypatch, [], late=[G])
    assert compiler.compile(owned) == "made"
    again = request(None, TOOLS[:2], ToolChoice("required"))
    assert compiler.compile(GrammarRequest(again.data, "b")) == "made"  # no pause
    compiler, tried = held_to(monkeypatch, [""])
    with pytest.raises(GrammarError, match=r"^it is too much"):
        compiler.compile(wanted)
    assert tried == [(60, set()), (30, {F, G, H})]


def test_what_is_strict_is_not_let_go(monkeypatch):
    place = "response_format.json_schema.schema"
    compiler, tried = held_to(monkeypatch, [place])
    with pytest.raises(GrammarError, match=f"^{place}: it is too much"):
        compiler.compile(request(SLOW))
    assert len(tried) == 1
    assert compiler.compile(request(SLOW, strict=False)) == "made"


def test_what_needs_too_much_memory_is_let_go_by_its_place(caplog):
    compiler = compiler_of_bytes(timeout=60, processes=1, memory_bytes=256 * MIB)
    tools = [ToolSpec("plain", {"type": "object", "properties": {}}), ToolSpec("greedy", GREEDY)]
    with caplog.at_level("INFO"):
        assert compiler.compile(request(None, tools, ToolChoice("required")))
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(
        r"strict: tools\.greedy\.parameters: all but its type: the schema .*(memory|large)", line
    )
    compiler.close()
