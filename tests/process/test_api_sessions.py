"""The session routes over real sockets: readers that drop, come back or are slow, uploads that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from agentserve.messages import ToolSignal
from tests.api_rig import TOOLS, Rig, hermes, served, settled, user
from tests.fakes import ScriptedEngine, say
from tests.sse import Sent, sent, take_until
from tiering.policy.base import Signal

CALLS = hermes("weather", '{"city": "Oslo"}') + hermes("now", "{}")


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say(CALLS)), keep_alive_seconds=0.05)


@pytest.fixture
async def base(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as url:
        yield url


@pytest.fixture
async def client(base: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base, timeout=60) as made:
        yield made


async def asked(client: httpx.AsyncClient) -> tuple[str, list[str]]:
    """A session that waits for two results: its path, and the ids of the calls."""
    reply = await client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": [user("Weather?")], "tools": TOOLS}
    )
    calls = [call["id"] for call in reply.json()["choices"][0]["message"]["tool_calls"]]
    return f"/agentserve/sessions/{reply.json()['session_id']}", calls


def results(calls: list[str]) -> list[dict[str, Any]]:
    return [{"call_id": call, "content": "x"} for call in calls]


async def test_a_reader_that_drops_and_comes_back_misses_and_repeats_nothing(
    rig: Rig, client: httpx.AsyncClient
) -> None:
    path, calls = await asked(client)
    rig.engine.reply = held = say("It rains cats and dogs in Oslo.", hold_at=9)

    async def uninterrupted() -> list[Sent]:
        async with client.stream("GET", f"{path}/events") as reply:
            return await take_until(sent(reply.aiter_raw()), "closed")

    whole = asyncio.create_task(uninterrupted())
    turn = asyncio.create_task(client.post(f"{path}/tool_results", json=results(calls)))
    seen: list[Sent] = []
    async with client.stream("GET", f"{path}/events") as reply:
        async for event in sent(reply.aiter_raw()):
            seen.append(event)
            if event.kind == "delta" and event.data["turn"] == 2:
                break  # in the middle of the turn: the connection is closed
    held.release.set()
    assert (await turn).json()["choices"][0]["message"]["content"] == "It rains cats and dogs in Oslo."
    for drop_at in range(3):  # again and again, each time after a few events
        async with client.stream("GET", f"{path}/events", headers={"last-event-id": seen[-1].id}) as reply:
            stream = sent(reply.aiter_raw())
            for _ in range(2 + drop_at):
                seen.append(await anext(stream))
    async with client.stream("GET", f"{path}/events", params={"after": seen[-1].id}) as reply:
        last = asyncio.create_task(take_until(sent(reply.aiter_raw()), "closed"))
        assert (await client.delete(path)).status_code == 200
        seen += await last
    assert seen == await whole
    assert [event.number for event in seen] == list(range(1, len(seen) + 1))


async def test_a_silent_session_sends_comments(client: httpx.AsyncClient) -> None:
    path, _ = await asked(client)
    async with client.stream("GET", f"{path}/events", params={"after": "now"}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = b""
        async for chunk in reply.aiter_raw():
            text += chunk
            if text.count(b": keep-alive\n\n") >= 3:
                break
        assert text.replace(b": keep-alive\n\n", b"") == b"retry: 1000\n\n"


async def test_a_reader_that_reads_nothing_holds_up_nobody(
    rig: Rig, client: httpx.AsyncClient, base: str
) -> None:
    """Far more than sockets hold: the turn ends, the log is bounded, the reader learns of the gap."""
    path, calls = await asked(client)
    key = rig.engine.submits[0].session
    log = rig.context.chronicle.events.of(key)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]), limit=1024)
    writer.write(f"GET {path}/events HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await writer.drain()
    await settled(lambda: log.waited_for)
    for i in range(60_000):  # some 9 MB
        rig.context.chronicle.events.publish(key, "delta", {"turn": 1, "content": f"{i:>100}"})
        if i % 1000 == 0:
            await asyncio.sleep(0)
            assert log.size_bytes <= 256 << 10
    rig.engine.reply = say("It rains.")
    reply = await client.post(f"{path}/tool_results", json=results(calls))
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."
    await client.delete(path)
    text = b""
    async with asyncio.timeout(60):
        while b"\r\n0\r\n\r\n" not in text[-16:]:
            text += await reader.read(1 << 16)
    writer.close()
    assert text.count(b"event: gap\n") >= 1
    assert b"event: closed\n" in text


async def test_an_upload_that_breaks_off_leaves_nothing(
    rig: Rig, client: httpx.AsyncClient, base: str
) -> None:
    path, calls = await asked(client)
    _, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
    head = f"POST {path}/tool_results/{calls[0]}/stream HTTP/1.1\r\nhost: localhost\r\n"
    writer.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n5\r\nhalf \r\n")
    await writer.drain()
    await settled(lambda: len(rig.engine.news) == 2)
    assert [news.signal for news in rig.engine.news if isinstance(news, ToolSignal)] == [
        Signal.CONNECTED,
        Signal.STREAMING,
    ]
    writer.transport.abort()
    reply = await client.post(f"{path}/tool_results", json={"call_id": calls[0], "content": "whole"})
    assert reply.json()["results"] == [{"call_id": calls[0], "status": "taken"}]
    view = (await client.get(path)).json()
    assert [call["result_taken"] for call in view["pending_tool_calls"]] == [True, False]


async def test_an_upload_in_pieces_runs_the_turn(rig: Rig, client: httpx.AsyncClient) -> None:
    path, calls = await asked(client)
    await client.post(f"{path}/tool_results", json=results(calls[1:]))
    rig.engine.reply = say("It rains.")

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"ra", b"", b"in"):
            yield piece
            await asyncio.sleep(0)

    reply = await client.post(f"{path}/tool_results/{calls[0]}/stream", content=pieces())
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."


@pytest.mark.parametrize("stream", [False, True])
async def test_who_begins_a_turn_and_drops_finds_it_finished(
    rig: Rig, client: httpx.AsyncClient, base: str, stream: bool
) -> None:
    path, calls = await asked(client)
    rig.engine.reply = held = say("It rains.", hold_at=4)
    body = json.dumps({"results": results(calls), "stream": stream}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
    writer.write(f"POST {path}/tool_results HTTP/1.1\r\nhost: localhost\r\n".encode())
    writer.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()
    await settled(lambda: rig.engine.live)
    writer.transport.abort()
    again = await client.post(f"{path}/tool_results", json=results(calls))  # as a client does that retries
    assert [result["status"] for result in again.json()["results"]] == ["repeated", "repeated"]
    assert again.json()["running_turn"] == 2
    held.release.set()
    async with client.stream("GET", f"{path}/events") as reply:
        events = sent(reply.aiter_raw())
        story = await take_until(events, "turn_completed") + await take_until(events, "turn_completed")
    assert story[-1].data["content"] == "It rains."
    assert (await client.get(path)).json()["turns"] == 2
    assert len(rig.engine.submits) == 2
