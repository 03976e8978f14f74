"""What comes from a socket or a disk is decoded by a schema; nothing that can run code is ever read."""

from __future__ import annotations

import ast
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


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def wrong(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [name for name in imports(tree) if name.partition(".")[0] in RUNS_CODE or name in LOADS]
    found += [name for name, _ in calls(tree) if name in CALLS | LOADS]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in NAMES:
            found.append(node.name)
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.append(node.attr)
        if isinstance(node, ast.keyword) and node.arg in NAMES:
            found.append(node.arg)
    return found + undecoded(tree)


def undecoded(tree: ast.AST) -> list[str]:
    """msgpack, which is what sockets and LMDB have, without a schema."""
    found = []
    for name, call in calls(tree):
        types = [keyword for keyword in call.keywords if keyword.arg == "type"]
        last = name.rpartition(".")[2]
        if name.endswith("msgpack.decode") and not types and len(call.args) < 2:
            found.append(ast.unparse(call))
        if last == "Decoder" and "msgpack" in name and not types and not call.args:
            found.append(ast.unparse(call))
    return found


def test_no_source_reads_what_can_run_code() -> None:
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): bad for path in SOURCES if (bad := wrong(path.read_text()))}
    assert found == {}


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
    assert wrong(source)


def test_what_is_typed_passes() -> None:
    assert wrong("msgspec.msgpack.decode(data, type=T)\nmsgspec.msgpack.Decoder(T)\nre.compile('x')") == []
