"""What strangers may do to a connection, over real sockets. Times are so short that none is waited for."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn

from agentserve.config import HttpConfig
from agentserve.server.http.connections import Connections, WireBounds
from agentserve.server.http.wire_bounds import bounded_protocol
from agentserve.server.launch import wire_bounds
from agentserve.server.limits import Limits
from tests.api_rig import TOOLS, Rig, events, hermes, settled, user
from tests.fakes import ScriptedEngine, say

HOST = b"host: localhost\r\n"
SOON = 0.05
LONG = 60.0  # never in a test


@asynccontextmanager
async def server(rig: Rig | None = None, **bounds: Any) -> AsyncIterator[tuple[int, Connections]]:
    rig = rig or Rig(ScriptedEngine(say("hello")))
    found = WireBounds(**{"head_seconds": LONG, "linger_seconds": LONG, **bounds})
    connections = Connections(found)
    config = uvicorn.Config(
        rig.app,
        host="127.0.0.1",
        port=0,
        log_level="error",
        http=bounded_protocol(found, connections),
        ws="none",
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve())
    try:
        await settled(lambda: running.started)
        yield running.servers[0].sockets[0].getsockname()[1], connections
    finally:
        running.should_exit = True
        await task


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes before the server ends the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


async def said(port: int, *pieces: bytes, whole: bool = False) -> tuple[int, Any]:
    """What the server says to these bytes, and that it closes the connection then (or says it all)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if whole:
            return parsed(await reply(reader))
        return parsed(await until_closed(reader))
    finally:
        writer.close()


async def reply(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def parsed(raw: bytes) -> tuple[int, Any]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), raw[:200]
    assert b"x-request-id: req-" in head.lower()
    return int(head.split()[1]), json.loads(body) if body else None


def get(path: bytes = b"/ping", *headers: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"".join(headers) + b"\r\n"


def post(length: int, *headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    given = b"content-length: %d\r\n" % length
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + given + b"".join(headers) + b"\r\n"


async def test_what_is_within_bounds_passes() -> None:
    async with server(headers=10) as (port, connections):
        assert (await said(port, get(), whole=True))[0] == 200
        big = b"a: " + b"x" * 60_000 + b"\r\n"
        assert (await said(port, get(b"/ping?" + b"q" * 8000, big), whole=True))[0] == 200
        assert (await said(port, b"\r\n", get(b"/ping", *[b"a: b\r\n"] * 9), whole=True))[0] == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(50):  # one connection, many requests: nothing adds up
            writer.write(get(b"/ping", b"a: " + b"x" * 3000 + b"\r\n"))
            assert (await reply(reader)).startswith(b"HTTP/1.1 200")
        writer.close()
        assert connections.refused == 0


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ([get(b"/ping", *[b"a: b\r\n"] * 101)], 431, "too_many_headers"),
        ([get(b"/ping", b"a: " + b"x" * 70_000 + b"\r\n")], 431, "headers_too_large"),
        ([get(b"/ping", *[b"a: " + b"x" * 2000 + b"\r\n"] * 40)], 431, "headers_too_large"),
        ([b"GET /ping HTTP/1.1\r\na: ", *[b"x" * 16_000] * 5], 431, "headers_too_large"),
        ([b"GET /ping HTTP/1.1\r\n", *[b"y" * 16_000] * 5], 431, "headers_too_large"),
        ([get(b"/ping?" + b"q" * 9000)], 414, "url_too_long"),
        ([b"GET /", *[b"q" * 5000] * 3], 414, "url_too_long"),
        ([b"not http at all\r\n\r\n"], 400, "invalid_http"),
        ([b"GET /ping HTTP/1.1\r\nhost : x\r\n\r\n"], 400, "invalid_http"),
        ([b"\x16\x03\x01\x02\x00"], 400, "invalid_http"),
        (
            [b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"],
            400,
            "invalid_http",
        ),
    ],
)
async def test_heads_without_end_are_refused(pieces: list[bytes], status: int, code: str) -> None:
    async with server() as (port, connections):
        found, told = await said(port, *pieces)
        assert (found, told["error"]["code"]) == (status, code)
        await gone(connections)


async def test_what_strangers_send_fills_no_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server() as (port, connections):
        theirs = logging.getLogger("uvicorn.error")
        monkeypatch.setattr(theirs, "handlers", [caplog.handler])
        monkeypatch.setattr(theirs, "level", logging.WARNING)
        theirs.manager._clear_cache()  # type: ignore[attr-defined]
        theirs.error("heard")
        for text in (b"not http at all\r\n\r\n", get(b"/ping", b"upgrade: x\r\nconnection: upgrade\r\n")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text)
            assert await reader.read(100)
            writer.close()
        await gone(connections)
    said = [record.getMessage() for record in caplog.records if record.name == theirs.name]
    assert said == ["heard"]


async def gone(connections: Connections) -> None:
    await settled(lambda: not len(connections))


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        [b"1;", *[b"e" * 60_000] * 20],  # an extension of a chunk
        [b"1\r\n \r\n0\r\n" + b"t: r\r\n" * 200],  # trailers
        [b"1\r\n \r\n0\r\nt: ", *[b"r" * 60_000] * 20],  # one of them
    ],
)
async def test_what_is_neither_head_nor_body_is_bounded(rest: list[bytes]) -> None:
    async with server() as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError):
            for piece in (CHUNKED, *rest):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
        await until_closed(reader)
        writer.close()
        await gone(connections)


@pytest.mark.parametrize("head", [b"", b"\r\n", b"G", b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx"])
async def test_a_head_that_does_not_come_ends_the_connection(head: bytes) -> None:
    async with server(head_seconds=SOON) as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        raw = await until_closed(reader)
        writer.close()
        if head:
            assert parsed(raw)[1]["error"]["code"] == "request_timeout"
        await gone(connections)


async def test_bytes_that_drip_do_not_keep_a_connection() -> None:
    async with server(head_seconds=SOON, linger_seconds=SOON) as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.create_task(until_closed(reader))
        writer.write(b"GET /ping HTTP/1.1\r\n")
        while not closed.done():  # it was told, and goes on
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.005)
        assert parsed(closed.result())[0] == 408
        writer.close()
        await gone(connections)


async def test_the_next_head_on_a_connection_has_its_time_too_and_an_answer_is_not_cut() -> None:
    script = say("hello", hold_at=2)
    rig = Rig(ScriptedEngine(script))
    async with server(rig, head_seconds=SOON) as (port, connections):
        body = json.dumps(
            {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "a"}]}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(len(body)) + body + b"GET /pi")  # the next one stays behind
        await reader.readuntil(b"data: ")
        await asyncio.sleep(4 * SOON)
        script.release.set()
        raw = await until_closed(reader)
        assert b"[DONE]" in raw
        writer.close()
        await gone(connections)


async def test_a_request_behind_another_has_all_its_time() -> None:
    async with server(head_seconds=SOON, linger_seconds=SOON) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"tokens": [97]}).encode()
        writer.write(get() + post(len(body), path=b"/detokenize"))
        assert (await reply(reader)).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(4 * SOON)
        writer.write(body)
        assert parsed(await reply(reader))[1] == {"prompt": "a"}
        writer.close()


async def test_a_body_that_does_not_come_is_a_408_and_its_connection_ends() -> None:
    rig = Rig(ScriptedEngine(), limits=Limits(body_seconds=SOON))
    async with server(rig) as (port, connections):
        for key in (b"", b"idempotency-key: k\r\n"):
            status, told = await said(port, post(100, key), b'{"model":')
            assert (status, told["error"]["code"]) == (408, "request_timeout")
        assert not rig.engine.submits
        await gone(connections)


async def test_a_tool_s_output_may_come_slowly() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))), limits=Limits(body_seconds=SOON))
    answer = await rig.chat([user("a")], tools=TOOLS)
    call = answer["choices"][0]["message"]["tool_calls"][0]["id"]
    async with server(rig) as (port, _):
        path = f"/agentserve/sessions/{answer['session_id']}/tool_results/{call}/stream".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(10, b"connection: close\r\n", path=path) + b"12345")
        await asyncio.sleep(4 * SOON)
        writer.write(b"67890")
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_fifty_megabytes_are_refused_unread_and_a_sender_who_goes_on_is_cut_off() -> None:
    async with server(linger_seconds=SOON) as (port, connections):
        status, told = await said(port, post(50 << 20), whole=True)
        assert (status, told["error"]["code"]) == (413, "request_too_large")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED)
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with suppress(ConnectionError):
            async with asyncio.timeout(LONG):
                while not writer.is_closing():  # it would go on for ever
                    writer.write(piece)
                    await writer.drain()
        raw = await until_closed(reader)
        assert raw == b"" or parsed(raw)[0] == 413
        writer.close()
        await gone(connections)


async def test_json_that_is_ten_thousand_deep() -> None:
    deep = b'{"model":"tiny","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    async with server() as (port, _):
        status, told = await said(port, post(len(deep)) + deep, whole=True)
        assert (status, told["error"]["code"]) == (400, "json_too_deep")


async def test_connections_in_all_and_of_one_address() -> None:
    async with server(connections=3, per_address=2) as (port, connections):
        first = await asyncio.open_connection("127.0.0.1", port)
        second = await asyncio.open_connection("127.0.0.1", port)
        await settled(lambda: not len(connections) < 2)
        status, told = await said(port, b"")
        assert (status, told["error"]["code"]) == (503, "too_many_connections")
        third = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        await settled(lambda: not len(connections) < 3)
        other = socket.socket()
        other.bind(("127.0.0.3", 0))
        other.setblocking(False)
        await asyncio.get_running_loop().sock_connect(other, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=other)
        assert parsed(await until_closed(reader))[0] == 503
        writer.close()
        first[1].write(get())  # who is in is served
        assert (await reply(first[0])).startswith(b"HTTP/1.1 200")
        first[1].close()
        await settled(lambda: not len(connections) > 2)
        assert (await said(port, get(), whole=True))[0] == 200
        for _, held in (second, third):
            held.close()
        await gone(connections)
        assert connections.refused == 2


async def test_hundreds_of_slow_clients_leave_room_for_the_others() -> None:
    async with server(connections=400, per_address=300) as (port, connections):
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(350)]
        await settled(lambda: (len(connections), connections.refused) == (300, 50))
        for _, writer in slow:
            writer.write(b"GET /ping HTTP/1.1\r\n")
        honest = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0))
        honest[1].write(get())
        assert (await reply(honest[0])).startswith(b"HTTP/1.1 200")
        honest[1].close()
        for _, writer in slow:
            writer.close()
        await gone(connections)
        assert connections.refused == 50


async def test_streams_pass_as_they_were() -> None:
    rig = Rig(ScriptedEngine(say("hello")))
    async with server(rig) as (port, _):
        body = json.dumps(
            {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "a"}]}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(len(body), b"connection: close\r\n") + body)
        raw = await until_closed(reader)
        writer.close()
        text = b"".join(
            line for line in raw.partition(b"\r\n\r\n")[2].split(b"\r\n") if line.startswith((b"data", b"\n"))
        )
        assert events(text)[-1] == "[DONE]"


def test_bounds_are_those_of_the_configuration_and_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentserve.server.launch.resource.getrlimit", lambda kind: (1024, 1024))
    usual = wire_bounds(HttpConfig())
    # 256 files are for all else, and two for each of 160 calls and listings of MCP servers
    assert (usual.connections, usual.per_address, usual.headers) == (448, 224, 100)
    assert (usual.head_bytes, usual.url_bytes, usual.head_seconds) == (65536, 8192, 10.0)
    own = wire_bounds(
        HttpConfig(max_connections=10, max_connections_per_address=9, max_headers=5, max_url=99)
    )
    assert (own.connections, own.per_address, own.headers, own.url_bytes) == (10, 9, 5, 99)
