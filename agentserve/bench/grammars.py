"""What grammars cost: compiling them, and the mask of one token, over vocabularies of two sizes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from agentserve.bench.report import Row
from agentserve.executor.grammars import Grammars
from agentserve.executor.matcher_process import fork_host
from agentserve.executor.matchers import GuardedGrammars
from agentserve.models.source import resolve
from agentserve.server.workers.vocabulary import shown_bytes
from agentserve.text import load
from tools_bridge.compiler import GrammarCompiler
from tools_bridge.grammar import ResponseFormat, ToolChoice
from tools_bridge.registry import DEFAULT_FORM
from tools_bridge.reply_request import GrammarRequest, grammar_request
from tools_bridge.types import ToolSpec

LARGE = 151_643  # tokens of Qwen 2.5 and 3; ours of that size are pairs of a real vocabulary's
MOST = 400  # tokens of a text

_FLAT: dict[str, object] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer", "minimum": 1, "maximum": 100_000},
        "mode": {"enum": ["read", "write", "append"]},
        "force": {"type": "boolean"},
    },
    "required": ["path", "line", "mode", "force"],
    "additionalProperties": False,
}
_NESTED: dict[str, object] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "steps": {"type": "array", "items": _FLAT, "minItems": 2, "maxItems": 5},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["title", "steps", "note"],
}
_TREE: dict[str, object] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["name", "below"],
        }
    },
}
_PATTERNS: dict[str, object] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "at": {"type": "string", "format": "date-time"},
        "slug": {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
    },
    "required": ["id", "at", "slug"],
}


def requests() -> Mapping[str, GrammarRequest]:
    """A grammar of each kind, by name."""

    def answer(response: ResponseFormat) -> GrammarRequest:
        return _request([], ToolChoice("none"), response)

    def schema(of: dict[str, object]) -> GrammarRequest:
        return answer(ResponseFormat("json_schema", of, strict=True))

    tools = [ToolSpec("edit", _FLAT, strict=True), ToolSpec("plan", _NESTED, strict=True), ToolSpec("now")]
    return {
        "any JSON object": answer(ResponseFormat("json_object")),
        "flat object": schema(_FLAT),
        "nested object": schema(_NESTED),
        "recursive tree": schema(_TREE),
        "patterns and formats": schema(_PATTERNS),
        "enum of 1,000": schema({"enum": [f"value {n}" for n in range(1000)]}),
        "forced call of three tools": _request(tools, ToolChoice("required"), ResponseFormat()),
    }


def _request(tools: list[ToolSpec], choice: ToolChoice, response: ResponseFormat) -> GrammarRequest:
    return grammar_request(DEFAULT_FORM, tools, choice, parallel=True, response=response, thinking="no")


def measure(model: str, texts: int, tell: Callable[[str], None]) -> Sequence[Row]:
    """`texts`: drawn of each kind. The mask's cost is that of asking for it and taking the token in, of
    the process that follows grammars for a worker."""
    hosts = [fork_host(), fork_host()]  # as a worker does: before there are threads
    text = load(resolve(model).path, None)
    real = shown_bytes(text.tokenizer)
    ends = list(text.end_ids)
    rows: list[Row] = []
    for host, name, data in zip(hosts, (model, "pairs of it"), (real, enlarged(real, LARGE)), strict=True):
        group = f"{name}: {len(data):,} tokens"
        compiler = GrammarCompiler(data, len(data), ends)
        start = ResponseFormat("choice", choices=("a",))
        compiler.compile(_request([], ToolChoice("none"), start))  # the process starts with the first
        store = GuardedGrammars(host, data, len(data), ends)
        for kind, source in requests().items():
            tell(f"{group}: {kind}")
            rows += _rows(
                group,
                kind=kind,
                source=source,
                compiler=compiler,
                store=store,
                data=data,
                ends=ends,
                texts=texts,
            )
        compiler.close()
        store.close()
    return rows


def enlarged(data: Sequence[bytes], size: int) -> list[bytes]:
    """The vocabulary, and pairs of its tokens up to `size`, in an order of their own."""
    rng = np.random.default_rng(0)
    found = list(data)
    known = set(found)
    while len(found) < size:
        first, second = rng.integers(0, len(data), 2)
        pair = data[first] + data[second]
        if pair and pair not in known and len(pair) < 24:
            known.add(pair)
            found.append(pair)
    return found


def _rows(
    group: str,
    *,
    kind: str,
    source: GrammarRequest,
    compiler: GrammarCompiler,
    store: Grammars,
    data: Sequence[bytes],
    ends: Sequence[int],
    texts: int,
) -> list[Row]:
    began = time.perf_counter()
    compiled = compiler.compile(source)
    cold = time.perf_counter() - began
    began = time.perf_counter()
    compiler.compile(source)
    cached = time.perf_counter() - began
    began = time.perf_counter()
    store.define(kind, compiled)
    defined = time.perf_counter() - began
    liked = np.array([_closing(piece) for piece in data], dtype=np.float32)
    liked[list(ends)] = 6
    costs = [cost for seed in range(texts) for cost in drawn(store, kind, liked, seed, ends)]
    return [
        Row(f"{kind}: mask per token, median", median(costs) * 1e6, "us", group=group),
        Row(f"{kind}: mask per token, P99", float(np.quantile(costs, 0.99)) * 1e6, "us", group=group),
        Row(f"{kind}: compiled", cold * 1e3, "ms", group=group),
        Row(f"{kind}: compiled before", cached * 1e6, "us", group=group),
        Row(f"{kind}: defined on the worker", defined * 1e3, "ms", group=group),
    ]


def _closing(piece: bytes) -> float:
    return 4 * piece.count(b'"') + 5 * (piece.count(b"}") + piece.count(b"]")) - 0.3 * len(piece)


def drawn(store: Grammars, kind: str, liked: np.ndarray, seed: int, ends: Sequence[int]) -> list[float]:
    """Seconds that each token of a random text took of the grammar, random choices left out."""
    rng = np.random.default_rng(seed)
    fold = store.start(kind)
    costs: list[float] = []
    while not fold.over and len(costs) < MOST:
        began = time.perf_counter()
        allowed = fold.allowed()
        asked = time.perf_counter() - began
        worth = rng.standard_normal(len(allowed), dtype=np.float32) * 2 + liked[allowed] * (len(costs) / 60)
        token = int(allowed[np.argmax(worth)])
        began = time.perf_counter()
        taken = fold.push(token)
        costs.append(asked + time.perf_counter() - began)
        if not taken:
            raise AssertionError(f"{json.dumps(kind)}: a token that is allowed was refused")
        if token in ends:
            break
    return costs
