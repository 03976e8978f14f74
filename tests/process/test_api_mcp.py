"""Agents' sessions with real MCP servers: one made with the `mcp` package, in its own process, and such as
no package would make. The model is scripted; everything between it and the servers is what users have."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentserve.text.conversation import unread
from tests.agents_rig import CANCEL, SESSIONS, Agent, body, created
from tests.api_rig import Rig, hermes, served, settled
from tests.fakes import say
from tests.mcp_rig import needs_mcp, real_server
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.mcp.types import Fault, McpFailed, Place
from tools_bridge.webhooks.address import AddressPolicy

pytestmark = [pytest.mark.process, needs_mcp]

LOCAL = AddressPolicy(hosts=("127.0.0.1",))
Reply = Callable[[dict[str, Any]], bytes]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server() as found:
        yield found


def rig_of() -> Rig:
    return Rig(mcp=RemoteMcp(LOCAL, unread))


def calc(url: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "calc",
        "transport": {"type": "http", "server_url": url},
        "require_approval": "never",
        **fields,
    }


async def asked(
    rig: Rig, tool: dict[str, Any], name: str, arguments: str = "{}"
) -> tuple[Agent, dict[str, Any]]:
    """A turn that calls one tool; the call's item."""
    rig.engine.reply = lambda submit: say("Done." if rig.engine.submits[1:] else hermes(name, arguments))
    agent = await created(rig, agent={"tools": [tool]}, input="Go.")
    await settled(lambda: agent.history.status == "idle", patience=20_000)
    (call,) = [item for item in await agent.items() if item["type"] == "mcp_call"]
    return agent, call


async def test_a_call_of_a_real_server(url: str) -> None:
    rig = rig_of()
    agent, call = await asked(rig, calc(url), "add", '{"a": 1, "b": 2}')
    assert (call["status"], call["output"], call["error"]) == ("completed", "3", None)
    listed = (await agent.items())[0]
    names = [tool["name"] for tool in listed["tools"]]
    assert names == ["add", "broken", "large", "leave", "picture", "slow", "table", "tell"]
    assert "Adds numbers." in agent.prompt()
    prompts = [agent.prompt(0), agent.prompt()]
    assert prompts[1].startswith(prompts[0])
    rig.check_rest()


@pytest.mark.parametrize(
    ("name", "output", "error"),
    [
        ("table", '"deux": "é"', None),
        ("picture", "not readable by this model", None),
        ("broken", None, "broken"),
        ("add", None, "validation"),
    ],
)
async def test_what_the_model_reads(url: str, name: str, output: str | None, error: str | None) -> None:
    agent, call = await asked(rig_of(), calc(url, allowed_tools=[name]), name)
    assert (output is None) == (call["output"] is None)
    assert output is None or output in call["output"]
    assert (error is None) == (call["error"] is None)
    assert error is None or error in call["error"]
    assert (call["output"] or call["error"]).splitlines()[0] in agent.prompt()


async def test_a_call_over_the_sdk_with_approval(url: str) -> None:
    openai = pytest.importorskip("openai")
    rig = rig_of()
    given = calc(url)
    del given["require_approval"]
    async with served(rig.app) as base, openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k") as client:
        rig.engine.reply = say(hermes("add", '{"a": 4, "b": 5}'))
        sessions = client.beta.agents.sessions
        made = await sessions.create(
            environment={"type": "none"}, agent={"model": "tiny", "tools": [given]}, input="4 + 5?"
        )
        history = Agent(rig, {"id": made.id}).history
        await settled(lambda: history.status == "requires_action")
        (action,) = (await sessions.retrieve(made.id)).required_actions
        assert (action.type, action.request.name) == ("mcp_approval_request", "add")
        rig.engine.reply = say("It is 9.")
        decision = {"type": "mcp_tool_call", "decision": "approve"}
        kind = "agent.session.input.mcp_approval_request_result"
        await sessions.events.create(
            made.id, events=[{"type": kind, "request_id": action.request_id, "response": decision}]
        )
        await settled(lambda: history.status == "idle")
        items = [item async for item in sessions.items.list(made.id, order="asc")]
        (call,) = [item for item in items if item.type == "mcp_call"]
        assert (call.output, call.server_label, call.status) == ("9", "calc", "completed")


async def test_a_call_that_takes_too_long_or_too_much(url: str) -> None:
    agent, call = await asked(rig_of(), calc(url, timeout=0.2), "slow", '{"name": "x"}')
    assert call["error"] == "The MCP server did not answer within 0.2 s."
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    _, call = await asked(rig_of(), calc(url), "large", '{"count": 100000000}')
    assert call["error"] == "The MCP server's reply is too large."


async def told(rig: Rig, place: Place, word: str) -> None:
    for _ in range(200):
        answer = await rig.context.mcp.call(place, "tell", {}, 10)
        if word in answer.text:
            return
    raise AssertionError(answer.text)


async def test_a_turn_that_is_cancelled_ends_its_call(url: str) -> None:
    rig, place = rig_of(), Place(url)
    agent = await created(rig, hermes("slow", '{"name": "cut"}'), agent={"tools": [calc(url)]}, input="Go.")
    await told(rig, place, "cut began")
    await agent.send(CANCEL)
    await told(rig, place, "cut ended")
    assert (await agent.items())[-1]["status"] == "incomplete"


async def test_a_server_that_dies_in_mid_call() -> None:
    with real_server() as mortal:
        agent, call = await asked(rig_of(), calc(mortal), "leave")
    assert call["status"] == "failed"
    assert "MCP server" in call["error"]
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    assert (await agent.items())[-1]["content"][0]["text"] == "Yes."


async def test_private_addresses_are_refused_where_nobody_allowed_them(url: str) -> None:
    reply = await Rig().post(SESSIONS, body({"tools": [calc(url)]}, input="Hi"))
    assert reply.json()["error"]["code"] == "mcp_address_refused"
    with pytest.raises(McpFailed) as failed:
        await RemoteMcp(AddressPolicy(), unread).list_tools(Place(url), 5)
    assert failed.value.fault is Fault.REFUSED


class Rebound:
    """A name that is at a public address when it is asked for, whatever it is at later."""

    async def resolve(self, host: str, port: int) -> list[str]:
        return ["127.0.0.1"]


async def test_a_name_at_a_private_address_is_not_dialled(url: str) -> None:
    remote = RemoteMcp(AddressPolicy(allow_http=True), unread, resolver=Rebound())
    with pytest.raises(McpFailed, match="private address"):
        await remote.list_tools(Place("http://mcp.example.com:8080/mcp"), 5)


# --- servers that no package would make ------------------------------------------------------------------


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
