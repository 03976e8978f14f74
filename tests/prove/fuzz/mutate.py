"""Requests that no client sends on purpose: valid ones, each changed in a few places. A seed decides all."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.prove.fuzz.junk import HEADERS, JUNK, METHODS, QUERIES
from tests.prove.fuzz.seeds import SEEDS

_PARAMETER = re.compile(r"\{(\w+)\}")
_EXAMPLES = {"string": "x", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class Route:
    method: str
    path: str  # with its parameters
    body: Any = None  # a valid one by the schema; None: it takes none
    streams: bool = False  # its reply is a stream without an end


@dataclass(frozen=True)
class Wire:
    """What is written to a connection, and what of."""

    route: Route
    data: bytes
    method: str

    def __repr__(self) -> str:
        return f"{self.method} {self.route.path}: {self.data[:3000]!r}"


@dataclass
class Known:
    """Names of things that the server has, as its replies told them."""

    of: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    most: int = 60

    def heard(self, path: str, reply: Any, session: str | None) -> None:
        if session is not None:
            self._add("name", session)
        for key, value in _pairs(reply):
            if isinstance(value, str) and 0 < len(value) < 200:
                if key == "id":
                    self._add(path, value)
                    self._add("id", value)
                elif key.endswith(("_id", "_url")):
                    self._add(key, value.rpartition("/")[2])
        if path == "/v1/agents/sessions" and isinstance(reply, dict) and "id" in reply:
            self._add("name", str(reply["id"]))

    def pick(self, rng: random.Random, path: str, name: str) -> str:
        """For a parameter of a path: `path` is what stands before it."""
        keys = [path.rstrip("/"), name, f"{name}_id", "callback_url" if name == "token" else "", "id"]
        for key in keys:
            if self.of[key] and rng.random() < 0.9:
                return rng.choice(self.of[key])
        return rng.choice(("s1", "x", "0", "..", "%", "a b", "\x00", "é", "x" * 3000, "-", "null", "?", "#"))

    def _add(self, key: str, value: str) -> None:
        held = self.of[key]
        held.append(value)
        if len(held) > self.most:
            del held[: len(held) - self.most]


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _pairs(item)
    elif isinstance(value, list):
        for item in value[:20]:
            yield from _pairs(item)


def routes(document: Mapping[str, Any]) -> list[Route]:
    """Every route of a server, by its own `/openapi.json`, and that one."""
    schemas = document["components"]["schemas"]
    found = [Route("GET", "/openapi.json")]
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            content = said.get("requestBody", {}).get("content", {}).get("application/json")
            body = None if content is None else _example(content["schema"], schemas)
            replies = said["responses"].get("200", {}).get("content", {})
            found.append(Route(method.upper(), path, body, list(replies) == ["text/event-stream"]))
    return found


def _example(schema: Any, schemas: Mapping[str, Any], depth: int = 0) -> Any:
    if "$ref" in schema:
        return _example(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth)
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("properties") and depth < 4:
        return {key: _example(value, schemas, depth + 1) for key, value in schema["properties"].items()}
    if options := schema.get("anyOf"):
        return _example(options[0], schemas, depth)
    kind = schema.get("type", "object")
    return copy.deepcopy(_EXAMPLES.get(kind if isinstance(kind, str) else kind[0]))


class Mutator:
    def __init__(self, seed: int, found: Sequence[Route], known: Known) -> None:
        self._rng = random.Random(seed)
        self._routes = list(found)
        self._known = known
        self._turn = 0

    def next(self) -> Wire:
        """Each route once; then they take turns, and those that take a body come four times as often."""
        line = self._routes + [
            route for route in self._routes for _ in range(4 if route.body is not None else 1)
        ]
        turn, once = self._turn, len(self._routes)
        route = line[turn if turn < once else once + (turn - once) % (len(line) - once)]
        self._turn += 1
        return self._wire(route)

    # --- a request --------------------------------------------------------------------------

    def _wire(self, route: Route) -> Wire:
        rng = self._rng
        method = rng.choice(METHODS) if rng.random() < 0.03 else route.method
        headers = {"host": "localhost", "connection": "close"}
        body = b""
        if route.body is not None or (method != "GET" and rng.random() < 0.1):
            body = self._body(route)
            if rng.random() < 0.9:
                headers["content-type"] = "application/json"
        if rng.random() < 0.35:
            for name in rng.sample(list(HEADERS), rng.randint(1, 3)):
                headers[name] = rng.choice(HEADERS[name])
        target = self._target(route)
        chunked = bool(body) and rng.random() < 0.15
        if chunked:
            headers["transfer-encoding"] = "chunked"
            body = self._chunks(body)
        elif body or method in ("POST", "PUT"):
            headers["content-length"] = str(len(body))
        if rng.random() < 0.02:  # a length that is not true, or none
            headers["content-length"] = rng.choice(("-1", "x", "1", "99999999999999999999", "0x10", "1, 2"))
        lines = [f"{method} {target} HTTP/1.1"] + [f"{name}: {value}" for name, value in headers.items()]
        data = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
        if rng.random() < 0.02:
            data = self._bytes(data)
        return Wire(route, data, method)

    def _target(self, route: Route) -> str:
        rng, path = self._rng, ""
        for part in re.split(r"(\{\w+\})", route.path):
            name = _PARAMETER.fullmatch(part)
            raw = rng.random() < 0.05
            path += self._picked(path, name.group(1), raw) if name else part
        if rng.random() < 0.02:
            path = rng.choice((path + "/", path.upper(), "/" + path, path + "/x", path.replace("/v1", "/v2")))
        if rng.random() < 0.25 or route.streams:
            query = "&".join(rng.choice(QUERIES) for _ in range(rng.randint(1, 2)))
            path += f"?{query}"
        return path

    def _picked(self, before: str, name: str, raw: bool) -> str:
        value = self._known.pick(self._rng, before, name)
        return value.replace(" ", "%20").replace("\x00", "%00") if raw else quote(value, safe="")

    def _body(self, route: Route) -> bytes:
        rng = self._rng
        valid = copy.deepcopy(rng.choice(SEEDS.get(route.path) or [route.body if route.body else {}]))
        if isinstance(valid, str):
            data = valid.encode() * rng.choice((1, 1, 100))
            return self._bytes(data) if rng.random() < 0.5 else data
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
            valid = self._changed(valid, route)
        text = json.dumps(valid, ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.05:
            text = self._text(text)
        data = text.encode("utf-8", "surrogatepass")
        return self._bytes(data) if rng.random() < 0.08 else data

    def _chunks(self, body: bytes) -> bytes:
        rng, out, at = self._rng, b"", 0
        while at < len(body):
            size = rng.randint(1, max(1, len(body) // 3))
            piece = body[at : at + size]
            at += size
            mark = rng.choice(("", "", "", ";x=y", ";" + "e" * 500))
            out += f"{len(piece):x}{mark}\r\n".encode() + piece + b"\r\n"
        return out + (rng.choice((b"0\r\n\r\n",) * 8 + (b"", b"-1\r\n", b"0\r\nx: y\r\n\r\n")))

    # --- changes ----------------------------------------------------------------------------

    def _changed(self, value: Any, route: Route) -> Any:
        """One place of it changed."""
        rng = self._rng
        places = list(places_of(value))
        if not places or rng.random() < 0.02:
            return self._junk()
        holder, key = rng.choice(places)
        kind = rng.randrange(9)
        if kind <= 2:
            holder[key] = self._junk()
        elif kind == 3:
            del holder[key]
        elif kind == 4:
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"x": holder[key]}
        elif kind == 5 and isinstance(holder[key], str):
            holder[key] = self._text(holder[key])
        elif kind == 6 and isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[: rng.randint(1, 3)]) * rng.choice((1, 1, 20)))
        elif kind == 7:
            other = rng.choice(SEEDS[rng.choice(list(SEEDS))])
            others = list(places_of(other))
            if others:
                source, name = rng.choice(others)
                holder[key] = copy.deepcopy(source[name])
        elif isinstance(holder, dict):
            fields = list(route.body) if isinstance(route.body, dict) and route.body else ["x"]
            holder[rng.choice(fields)] = self._junk()
        if isinstance(value, dict):  # a turn that runs for minutes shows nothing
            for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
                if isinstance(value.get(name), int) and 100 < value[name] < 2**31:
                    value[name] = 100
        return value

    def _junk(self) -> Any:
        rng = self._rng
        if rng.random() < 0.06:
            depth = rng.choice((20, 90, 105, 150))
            value: Any = 1
            for i in range(depth):
                value = [value] if i % 2 else {"a": value}
            return value
        if rng.random() < 0.25:
            ids = [name for names in self._known.of.values() for name in names]
            if ids:
                return rng.choice(ids)
        return copy.deepcopy(rng.choice(JUNK))

    def _text(self, text: str) -> str:
        rng = self._rng
        at = rng.randint(0, len(text))
        bits = ("\ud800", "\\", '"', "\x00", "<tool_call>", "}", "]", "\u2028", text[:50], "NaN", "é" * 20)
        return text[:at] + rng.choice(bits) + text[at + rng.choice((0, 0, 1, 5)) :]

    def _bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randint(0, len(data))
        kind = rng.randrange(4)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        if kind == 2:
            return data[:at] + rng.choice((b"\xff\xfe", b"\r\n", b"\x00", b"\xed\xa0\x80")) + data[at:]
        return data[:at] + data[at : at + 40] * 3 + data[at + 40 :]


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key or index) within it."""
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from places_of(value[key])
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value, index
            yield from places_of(value[index])
