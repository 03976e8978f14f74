"""A client that leaves, at every state of its turn: the turn is rolled back and nothing stays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.api_rig import CHAT, TOOLS, Rig, events, hermes, served, settled, user
from tests.fakes import ScriptedEngine, say

CALL = hermes("weather", '{"city": "Oslo"}')


async def send(base: str, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "hold_at"),
    [
        ("queued or in prefill", "abcdef", 0),
        ("after the first token", "abcdef", 1),
        ("in the middle of a tool call", CALL, len(CALL) - 8),
        ("before the end token", "abcdef", 6),
    ],
)
async def test_leaving_rolls_the_turn_back(stream: bool, name: str, text: str, hold_at: int) -> None:
    rig = Rig(ScriptedEngine(say("first answer")))
    first = await rig.chat([user("a")], session_id="mine")
    before = await rig.session("mine")
    history = [user("a"), {"role": "assistant", "content": "first answer"}, user("b")]
    script = say(text, hold_at=hold_at)
    rig.engine.reply = script
    body = {"model": "tiny", "messages": history, "session_id": "mine", "stream": stream, "tools": TOOLS}
    async with served(rig.app) as base:
        reader, writer = await send(base, CHAT, body)
        await settled(lambda: len(rig.engine.submits) == 2)
        if stream:
            await reader.readuntil(b"assistant")
        writer.close()
        await settled(lambda: not rig.engine.live)
        await settled(lambda: rig.context.directory.get("default", "mine").running is None)
        assert rig.engine.aborted == [(rig.engine.submits[1].session, 2)]
        after = await rig.session("mine")
        for key in ("state", "turns", "tokens", "messages", "pending_tool_calls", "usage"):
            assert after[key] == before[key], (name, key)
        rig.engine.reply = say("second answer")
        again = await rig.chat(history, session_id="mine", tools=TOOLS)
        assert again["session_id"] == first["session_id"] == "mine"
    assert rig.engine.submits[-1].tokens == rig.engine.submits[1].tokens
    assert rig.engine.submits[-1].turn == 3
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_a_first_turn_leaves_no_session(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=1)))
    async with served(rig.app) as base:
        _, writer = await send(
            base, CHAT, {"model": "tiny", "messages": [user("a")], "stream": stream, "n": 3}
        )
        await settled(lambda: len(rig.engine.submits) == 3)
        assert len(rig.context.directory) == 3
        writer.close()
        await settled(lambda: len(rig.context.directory) == 0)
    assert not rig.engine.live
    assert {submit.session for submit in rig.engine.submits} <= set(rig.engine.closed)
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_drain_tells_the_client(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=1)))
    content = json.dumps({"model": "tiny", "messages": [user("a")], "stream": stream}).encode()
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
    sent: list[Any] = []

    async def deliver(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    answer = asyncio.create_task(rig.app(scope, inbox.get, deliver))
    await settled(
        lambda: rig.engine.live and (not stream or b'"a"' in b"".join(m.get("body", b"") for m in sent))
    )
    answer.cancel()  # as the HTTP server does
    await answer  # no exception is left for it to log
    body = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] == (200 if stream else 503)
    assert sent[-1].get("more_body", False) is False
    error = events(body)[-1] if stream else json.loads(body)
    assert error["error"]["code"] == "server_shutting_down"
    assert not rig.engine.live
    rig.check_rest()


async def test_leaving_before_the_leader_has_a_token_frees_the_waiting_choices() -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=0)))
    async with served(rig.app) as base:
        _, writer = await send(base, CHAT, {"model": "tiny", "messages": [user("a")], "n": 3})
        await settled(lambda: len(rig.engine.submits) == 1)
        writer.close()
        await settled(lambda: len(rig.context.directory) == 0)
    assert len(rig.engine.submits) == 1
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_a_text_completion_closes_its_one_shot_session(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=1)))
    async with served(rig.app) as base:
        _, writer = await send(base, "/v1/completions", {"prompt": "a", "stream": stream})
        await settled(lambda: rig.engine.live)
        writer.close()
        await settled(lambda: not rig.engine.live)
        await settled(lambda: rig.engine.closed)
    assert rig.engine.closed == [rig.engine.submits[0].session]


async def test_leaving_after_the_turn_was_committed_keeps_it() -> None:
    rig = Rig(ScriptedEngine(say("done")))
    async with served(rig.app) as base:
        reader, writer = await send(
            base, CHAT, {"model": "tiny", "messages": [user("a")], "session_id": "s", "stream": True}
        )
        await reader.readuntil(b'finish_reason":"stop')
        writer.close()
        await settled(lambda: not rig.engine.live)
    assert (await rig.session("s"))["turns"] == 1
    rig.check_rest()


async def test_half_a_request_body_starts_nothing() -> None:
    rig = Rig()
    async with served(rig.app) as base:
        host, port = base.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await rig.client.get("/health")).status_code == 200
    assert not rig.engine.submits
    rig.check_rest()
