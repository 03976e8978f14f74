"""What comes from a socket or a disk is decoded by a schema; nothing that can run code is ever read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agentserve", "kernels", "tiering", "tools_bridge")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
RUNS_CODE = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
    | {"copyreg", "yaml", "multiprocessing", "code", "codeop", "xmlrpc"}
)
"""multiprocessing pickles whatever goes through its queues and pipes."""
CALLS = frozenset({"eval", "exec", "compile", "__import__"})
NAMES = frozenset(
    {"ProcessPoolExecutor", "allow_pickle", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
)
LOADS = frozenset({"torch.load", "torch.save", "np.load", "numpy.load", "np.save", "torch.package"})


_WORDS = [*sorted(RUNS_CODE - {"code"}), r"import code\b", *sorted(NAMES), "msgpack"]
_WORDS += [rf"(?<![\w.]){name}\(" for name in sorted(CALLS)] + [rf"{name}\(" for name in sorted(LOADS)]
SUSPECT = re.compile("|".join(_WORDS))
"""What a source that is wrong has in it: others need not be parsed."""


SPARED = {
    # A simulation on one machine hands its own values to processes that it has started itself, and reads
    # theirs; nothing of it serves, and nothing that anybody sent comes near it.
    "agentserve/sim/shootout/contest.py": ["ProcessPoolExecutor"] * 2,
    # A benchmark that compiles kernels ahead of time, in the same way.
    "kernels/triton/aot.py": ["multiprocessing", *["ProcessPoolExecutor"] * 2],
}


def dotted(node: ast.AST) -> str:
    """A name, or attributes of one; empty for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def wrong(source: str) -> list[str]:
    return [found for node in ast.walk(ast.parse(source)) for found in faults(node)]


def faults(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names if name.name.partition(".")[0] in RUNS_CODE)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if node.module.partition(".")[0] in RUNS_CODE:
            yield node.module
        yield from (name.name for name in node.names if name.name in NAMES)
    elif isinstance(node, ast.Call):
        called = dotted(node.func)
        if called in CALLS | LOADS or undecoded(called, node):
            yield ast.unparse(node)
    named = getattr(node, "name", None), getattr(node, "attr", None), getattr(node, "arg", None)
    yield from (name for name in named if name in NAMES)


def undecoded(called: str, node: ast.Call) -> bool:
    """msgpack, which is what sockets and LMDB have, without a schema."""
    typed = any(keyword.arg == "type" for keyword in node.keywords)
    if called.endswith("msgpack.decode"):
        return not typed and len(node.args) < 2
    return called.endswith("msgpack.Decoder") and not typed and not node.args


def test_no_source_reads_what_can_run_code() -> None:
    assert len(SOURCES) > 300
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in SOURCES}
    found = {path: bad for path, text in texts.items() if SUSPECT.search(text) and (bad := wrong(text))}
    assert found == SPARED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from concurrent.futures import ProcessPoolExecutor as P; P.ProcessPoolExecutor",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "def f():\n    import dill",
        "class A:\n    def __reduce__(self): ...",
        "msgspec.msgpack.decode(data)",
        "msgspec.msgpack.Decoder()",
    ],
)
def test_each_would_be_found(source: str) -> None:
    assert SUSPECT.search(source)
    assert wrong(source)


def test_what_is_typed_passes() -> None:
    assert wrong("msgspec.msgpack.decode(data, type=T)\nmsgspec.msgpack.Decoder(T)\nre.compile('x')") == []
