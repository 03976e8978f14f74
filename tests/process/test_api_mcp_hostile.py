"""MCP servers such as no package would make, and what they may not do to this one."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentserve.text.conversation import unread
from tests.agents_rig import created
from tests.api_rig import settled
from tests.mcp_rig import needs_mcp
from tests.process.test_api_mcp import LOCAL, asked, calc, rig_of
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.mcp.types import McpFailed, Place

pytestmark = [pytest.mark.process, needs_mcp]

Reply = Callable[[dict[str, Any]], bytes]


@asynccontextmanager
async def odd_server(reply: Reply, hangs: bool = False) -> AsyncIterator[tuple[str, list[str]]]:
    """Answers each request with bytes; its URL, and the heads of the requests. `hangs`: and stays."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            heads.append(head)
            length = next(
                (
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                ),
                0,
            )
            asked = json.loads(await reader.readexactly(length) or b"{}")
            writer.write(reply(asked))
            await writer.drain()
            await reader.read(1 if hangs else 0)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/mcp", heads


def http(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n{more}\r\n".encode() + body


def rpc(asked: dict[str, Any], result: Any) -> bytes:
    return http(json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode())


def older(asked: dict[str, Any], tools: Any) -> bytes:
    """A server that knows only the version of June 2025."""
    match asked.get("method"):
        case "initialize":
            info = {"name": "old", "version": "1"}
            version = "2025-06-18"
            return rpc(asked, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        case "tools/list":
            return rpc(asked, tools)
        case "tools/call":
            return rpc(asked, {"content": [{"type": "text", "text": "hello"}]})
        case "notifications/initialized":
            return http(b"", "202 Accepted")
    return http(b"", "405 Method Not Allowed")


TOOLS = {"tools": [{"name": "hi", "inputSchema": {"type": "object"}}]}


async def test_an_older_server_is_spoken_to_in_its_version() -> None:
    async with odd_server(lambda asked: older(asked, TOOLS)) as (url, heads):
        _, call = await asked(rig_of(), calc(url), "hi")
        assert call["output"] == "hello"
        versions = {
            line for head in heads for line in head.lower().split("\r\n") if "protocol-version" in line
        }
        assert "mcp-protocol-version: 2025-06-18" in versions
        assert "mcp-protocol-version: 2026-07-28" in heads[0].lower()  # the newest is asked for first
        assert all("accept-encoding: identity" in head.lower() for head in heads)


LARGE = b"x" * (3 << 20)
PACKED = gzip.compress(b"[" + b" " * (1 << 20) + b"]")
ERROR = {"jsonrpc": "2.0", "error": {"code": -32000, "message": "key very-secret-key"}}
ELSEWHERE = "location: http://169.254.169.254/\r\n"
STREAM = "text/event-stream"
PAGE = {"tools": [], "nextCursor": "again"}
HOSTILE: dict[str, tuple[Reply, str]] = {
    "no JSON": (lambda _: http(b"<html>"), "not what the protocol says"),
    "HTML": (lambda _: http(b"<html>", kind="text/html"), "error|protocol"),
    "no HTTP": (lambda _: b"SSH-2.0-OpenSSH\r\n\r\n", "broke off|cannot be reached"),
    "nothing": (lambda _: b"", "broke off|cannot be reached"),
    "a redirect": (lambda _: http(b"", "307 Temporary Redirect", more="location: /other\r\n"), "redirect"),
    "a redirect elsewhere": (lambda _: http(b"", "302 Found", more=ELSEWHERE), "redirect"),
    "a refusal": (lambda _: http(b"no", "401 Unauthorized"), "401"),
    "a failure": (lambda _: http(b"no", "500 Internal Server Error"), "500"),
    "too much": (lambda asked: http(LARGE), "too large"),
    "too much of a head": (lambda _: b"HTTP/1.1 200 OK\r\nx: " + LARGE, "too large|cannot be reached"),
    "too much of an event": (lambda _: http(b"data: " + LARGE, kind="text/event-stream"), "too large"),
    "too many tools": (lambda asked: older(asked, {"tools": TOOLS["tools"] * 24_000}), "too large"),
    "a bomb": (lambda _: http(PACKED, more="content-encoding: gzip\r\n"), "compressed"),
    "tools that are none": (lambda asked: older(asked, {"tools": [{"name": 5}]}), "protocol"),
    "streams without end": (lambda _: http(b"id: 1\nretry: 0\ndata:\n\n", kind=STREAM), "broke off|error"),
    "no list": (lambda asked: older(asked, "tools"), "protocol"),
    "pages without end": (lambda asked: older(asked, PAGE), "pages"),
    "an error": (lambda asked: http(json.dumps({**ERROR, "id": asked.get("id")}).encode()), "[secret]"),
}  # fmt: skip


BLOCKS = {"content": [{"type": "text", "text": ""}] * 60_000}
LISTS: dict[str, Any] = {"content": [], "structuredContent": {"a": [[]] * 60_000}}
PLAIN = {"content": [{"type": "text", "text": '{[,\\"' * 60_000}]}


@pytest.mark.parametrize(("result", "fits"), [(BLOCKS, False), (LISTS, False), (PLAIN, True)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_result_of_too_many_parts(result: Any, fits: bool, stream: bool) -> None:
    """It is not parsed: that would hold up everybody. Characters are no parts."""

    def reply(asked: dict[str, Any]) -> bytes:
        if asked.get("method") != "tools/call":
            return older(asked, TOOLS)
        if not stream:
            return rpc(asked, result)
        said = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()
        return http(b': "\ndata: ' + said + b"\n\n", kind=STREAM)

    async with odd_server(reply) as (url, _):
        place, client = Place(url), RemoteMcp(LOCAL, unread)
        if fits:
            assert (await client.call(place, "hi", {}, 30.0)).text == result["content"][0]["text"]
        else:
            with pytest.raises(McpFailed, match="too large"):
                await client.call(place, "hi", {}, 30.0)


@pytest.mark.parametrize("charset", ["bz2", "zlib", "utf-16", "utf-7", "punycode", '"rot13"'])
async def test_events_are_utf_8_whatever_their_server_calls_them(charset: str) -> None:
    """Python's codecs by these names unpack (700 bytes were a GiB, on the event loop), take quadratic time,
    or find other characters than the scan of the reply's parts did."""

    def reply(asked: dict[str, Any]) -> bytes:
        if asked.get("method") != "tools/call":
            return older(asked, TOOLS)
        result = {"content": [{"type": "text", "text": "h\u00e9llo+ACI-"}]}
        said = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}, ensure_ascii=False)
        return http(f"data: {said}\n\n".encode(), kind=f"{STREAM}; charset={charset}")

    async with odd_server(reply) as (url, _):
        answer = await RemoteMcp(LOCAL, unread).call(Place(url), "hi", {}, 30.0)
        assert answer.text == "h\u00e9llo+ACI-"


@pytest.mark.parametrize("listing", [True, False])
async def test_a_reply_that_is_wrong_throughout_is_not_checked_throughout(
    listing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is wrong would be told, which took seconds in which nobody was served."""
    client_module = importlib.import_module("tools_bridge.mcp.client")
    faults: list[int] = []

    def reply(asked: dict[str, Any]) -> bytes:
        match asked.get("method"), listing:
            case ("tools/list", True):
                return rpc(asked, {"tools": [1] * 40_000})
            case ("tools/call", False):
                return rpc(asked, {"content": [1] * 40_000})
        return older(asked, TOOLS)

    seen = client_module._failed

    def failed(error: Exception, *more: Any) -> McpFailed:
        faults.extend(one.error_count() for one in client_module._flat(error) if hasattr(one, "error_count"))
        return seen(error, *more)

    monkeypatch.setattr(client_module, "_failed", failed)
    async with odd_server(reply) as (url, _):
        client, place = RemoteMcp(LOCAL, unread), Place(url)
        with pytest.raises(McpFailed, match="not what the protocol says"):
            await (client.list_tools(place, 30.0) if listing else client.call(place, "hi", {}, 30.0))
    assert sum(faults) < 100


async def test_what_a_server_tells_at_length_is_not_heard() -> None:
    """Of its own accord: its answer is."""

    def reply(asked: dict[str, Any]) -> bytes:
        if asked.get("method") != "tools/call":
            return older(asked, TOOLS)
        told = {"method": "notifications/message", "params": {"level": "info", "data": [1] * 9000}}
        answer = {"id": asked["id"], "result": {"content": [{"type": "text", "text": "hello"}]}}
        events = [{"jsonrpc": "2.0", **one} for one in (told, told, answer)]
        return http(b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events), kind=STREAM)

    async with odd_server(reply) as (url, _):
        assert (await RemoteMcp(LOCAL, unread).call(Place(url), "hi", {}, 30.0)).text == "hello"


async def test_who_is_cancelled_has_left_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is slow to say goodbye: whoever holds a place for the call holds its connections."""
    asked_for: list[str] = []
    monkeypatch.setattr("tools_bridge.mcp.client.GRACE_SECONDS", 0.1)

    def reply(asked: dict[str, Any]) -> bytes:
        asked_for.append(asked.get("method", ""))
        match asked.get("method"):
            case "initialize":
                hello = older(asked, TOOLS)
                return hello.replace(b"connection:", b"mcp-session-id: s\r\nconnection:")
            case "notifications/initialized":
                return older(asked, TOOLS)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"  # and no more, also of the goodbye

    async with odd_server(reply, hangs=True) as (url, _):
        client = RemoteMcp(LOCAL, unread)
        call = asyncio.create_task(client.call(Place(url), "hi", {}, 30.0))
        await settled(lambda: "tools/call" in asked_for, patience=20_000)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert client._client is not None
        assert not client._client.leaving


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_listing_that_is_none(name: str, caplog: pytest.LogCaptureFixture) -> None:
    reply, words = HOSTILE[name]
    async with odd_server(reply) as (url, heads):
        rig = rig_of()
        headers = {"x-key": "very-secret-key"}
        given = calc(url, transport={"type": "http", "server_url": url, "headers": headers})
        agent = await created(rig, "Hello.", agent={"tools": [given]}, input="Hi")
        await agent.until("idle")
        listing = (await agent.items())[0]
        assert listing["tools"] == []
        assert len(heads) <= 101
        assert any(word in listing["error"] for word in words.split("|")), listing["error"]
        assert (await agent.items())[-1]["content"][0]["text"] == "Hello."
        assert "very-secret-key" not in json.dumps([listing, agent.events()]) + caplog.text
        assert all("/other" not in head for head in heads)


async def test_a_schema_that_is_odd_takes_nothing_from_others() -> None:
    odd = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}, "patternProperties": {"(": {}}}
    tools = {
        "tools": [{"name": "odd", "inputSchema": odd}, {"name": "hi", "inputSchema": {"type": "object"}}]
    }
    async with odd_server(lambda asked: older(asked, tools)) as (url, _):
        _, call = await asked(rig_of(), calc(url), "hi")
        assert call["output"] == "hello"
