"""Requests that are as large as may be, or larger, on every route that takes a body: 50 MB, 10,000 levels,
and whatever a body within the bounds can be full of."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from tests.prove.fuzz.mutate import Known, Route, places_of
from tests.prove.fuzz.seeds import SEEDS
from tests.prove.fuzz.wire import Heard, heard

MOST = (4 << 20) - 300  # within the server's bound
HUGE = 50_000_000
DEPTH = 10_000
_DEEP = "\0deep\0"


def bodies(route: Route) -> Iterator[tuple[str, bytes]]:
    """(what it is, the body): each within the bound on bytes, and full of one thing."""
    for index, seed in enumerate(SEEDS.get(route.path) or [route.body or {}]):
        if isinstance(seed, str):
            yield "a text", b"x" * MOST
            continue
        if index == 0:
            yield from _of_any_shape(seed)
        for number in range(len(list(places_of(seed)))):
            yield from _at(seed, number, index)


def _of_any_shape(seed: Any) -> Iterator[tuple[str, bytes]]:
    """Of fields that nobody knows."""
    fillings = {
        "strings": b'"a",' * 199_000 + b'"a"',
        "lists": b"[]," * 99_000 + b"[]",
        "long strings": b",".join([b'"' + b"a" * 1000 + b'"'] * 4000),
        "escapes": b'"' + b"\\u00e9" * (MOST // 7) + b'"',
        "quotes": b'"' + b'\\"' * (MOST // 3) + b'"',
        "numbers": b"1," * (MOST // 3) + b"1",
        "floats": b"1.2345678901234567e-300," * (MOST // 30) + b"1",
        "a number": b"9" * (MOST // 2),
    }
    for name, inside in fillings.items():
        text = json.dumps(seed | {"zzz": _DEEP}).encode()
        yield name, text.replace(json.dumps(_DEEP).encode(), b"[" + inside + b"]")
    yield "names", b'{"zzz":{' + b",".join(b'"%d":1' % i for i in range(190_000)) + b"}}"
    yield "depth", b'{"zzz":' * DEPTH + b"1" + b"}" * DEPTH
    yield "a depth without an end", b"[" * MOST


def _at(seed: Any, number: int, index: int) -> Iterator[tuple[str, bytes]]:
    """One place of it made large, and made deep."""
    value = copy.deepcopy(seed)
    holder, key = list(places_of(value))[number]
    old = holder[key]
    name = f"{index}.{key}"
    size = len(json.dumps(seed))
    if isinstance(old, str):
        for kind, text in (("words", "word "), ("letters", "a"), ("accents", "é")):
            holder[key] = old + text * ((MOST - size) // len(text.encode()) - 20)
            yield f"{name}: {kind}", json.dumps(value, ensure_ascii=False).encode()
    elif isinstance(old, list) and old:
        each = len(json.dumps(old)) - 1
        times = max(2, min((MOST - size) // each - 1, 90_000 // (1 + len(list(places_of(old))))))
        holder[key] = old * times
        yield f"{name}: repeated", json.dumps(value).encode()
    elif isinstance(old, dict):
        holder[key] = old | {f"k{i}": i for i in range(150_000)}
        yield f"{name}: names", json.dumps(value).encode()
    holder[key] = _DEEP
    deep = b'{"a":' * 98 + b"1" + b"}" * 98
    yield f"{name}: deep", json.dumps(value).encode().replace(json.dumps(_DEEP).encode(), deep)


def request(route: Route, known: Known, rng: Any, body: bytes) -> bytes:
    path = route.path
    while "{" in path:
        before, _, rest = path.partition("{")
        name, _, behind = rest.partition("}")
        path = before + known.pick(rng, before, name).replace(" ", "_").split("?")[0] + behind
    path = "".join(c if c.isascii() and c.isprintable() and c not in " #?%" else "_" for c in path)
    head = (
        f"{route.method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def huge(port: int, route: Route, *, chunked: bool, patience: float = 30.0) -> Heard:
    """50 MB, announced or in chunks; read what is said of it, however early."""
    path = route.path.replace("{", "").replace("}", "")
    length = "transfer-encoding: chunked" if chunked else f"content-length: {HUGE}"
    head = (
        f"{route.method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    piece = b"[" * 65536

    async def send() -> None:
        with suppress(ConnectionError):
            writer.write(head.encode() + b"\r\n")
            for _ in range(HUGE // len(piece) + 1):
                writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()

    sender = asyncio.create_task(send())
    raw = b""
    try:
        async with asyncio.timeout(patience):
            raw = await reader.readuntil(b"\r\n\r\n")
            found = heard(raw, left=False)
            raw += await reader.readexactly(int(found.headers.get("content-length", "0")))
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        writer.transport.abort()
    return heard(raw, left=not raw)


def with_bodies(found: Sequence[Route]) -> list[Route]:
    return [route for route in found if route.body is not None]
