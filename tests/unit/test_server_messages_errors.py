"""Messages that do not work out: bad bodies, failures, silence, and clients and servers that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from agentserve.types import FinishReason
from tests.anthropic_client import frames, put_together
from tests.api_rig import Rig, served, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.messages_rig import COUNT, MESSAGES, TOOL, minimal, refusal


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ("{", 400, "invalid_request_error", "JSON"),
        ({"model": "tiny", "messages": [user("a")]}, 400, "invalid_request_error", "max_tokens"),
        (minimal(max_tokens=-1), 400, "invalid_request_error", "max_tokens: must be at least 1"),
        (minimal(max_tokens=0, stream=True), 400, "invalid_request_error", "max_tokens"),
        (minimal(messages=[]), 400, "invalid_request_error", "at least one message"),
        (minimal(model="gpt"), 404, "not_found_error", "'gpt' does not exist"),
        (minimal(temperature=9), 400, "invalid_request_error", "temperature: "),
        (minimal(stop_sequences=[""]), 400, "invalid_request_error", "stop_sequences: "),
        (minimal(tool_choice={"type": "tool", "name": "f"}), 400, "invalid_request_error", "tool_choice: "),
        (minimal(tools=[TOOL | {"name": "a b"}]), 400, "invalid_request_error", "tools[0].name: "),
        (minimal(messages=[user("BREAK")]), 400, "invalid_request_error", "messages[0]: this template"),
        (minimal(messages=[user("x" * 5000)]), 400, "invalid_request_error", "prompt is too long"),
        (minimal(session_id="a b"), 400, "invalid_request_error", "session_id: "),
    ],
)
async def test_bad_requests(body: Any, status: int, kind: str, words: str) -> None:
    rig = Rig()
    told = await refusal(rig, body)
    assert told[:2] == (status, kind)
    assert words in told[2]
    assert not rig.engine.submits
    rig.check_rest()


async def test_a_result_for_no_call_names_its_block() -> None:
    content = [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "c", "content": "y"}]
    messages = [user("a"), {"role": "assistant", "content": "b"}, {"role": "user", "content": content}]
    _, _, message = await refusal(Rig(), minimal(messages=messages))
    assert message.startswith("messages[2].content[1].tool_use_id: ")


async def test_a_prompt_that_is_too_long_says_both_numbers() -> None:
    rig = Rig(ScriptedEngine(max_model_len=64))
    _, _, message = await refusal(rig, minimal(messages=[user("x" * 60)]))
    tokens = (await rig.post(COUNT, minimal(messages=[user("x" * 60)]))).json()["input_tokens"]
    assert message.startswith(f"prompt is too long: {tokens} tokens > 64 maximum. ")


async def test_errors_of_the_path_and_of_the_gate() -> None:
    rig = Rig(api_keys=("secret",))
    assert (await refusal(rig, minimal()))[:2] == (401, "authentication_error")
    key = {"x-api-key": "secret"}
    assert (await rig.post(MESSAGES, minimal(), key)).status_code == 200
    assert (await rig.post(MESSAGES, minimal(), {"authorization": "Bearer secret"})).status_code == 200
    assert (await refusal(rig, {}, "/v1/messages/batches", key))[:2] == (404, "not_found_error")
    got = await rig.client.get(MESSAGES, headers=key)
    assert (got.status_code, got.json()["error"]["type"]) == (405, "invalid_request_error")
    assert got.headers["allow"] == "POST"
    other = await rig.client.get("/v1/messagesx", headers=key)
    assert "type" not in other.json()
    foreign = await refusal(Rig(), minimal(), headers={"host": "evil.example"})
    assert foreign[:2] == (403, "permission_error")


async def test_engine_failures() -> None:
    rig = Rig(ScriptedEngine(say("half", reason=FinishReason.ERROR, error="out of memory")))
    assert await refusal(rig, minimal()) == (500, "api_error", "out of memory")
    reply = await rig.post(MESSAGES, minimal(stream=True))
    *_, last = frames(reply.content)
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "out of memory"},
        "request_id": reply.headers["request-id"],
    }
    rig.engine.alive = 0
    assert (await refusal(rig, minimal()))[:2] == (503, "overloaded_error")
    rig.check_rest()


async def test_a_fault_of_ours_is_told_in_the_shape_too() -> None:
    def broken(submit: Any) -> Script:
        raise RuntimeError("oh")

    rig = Rig(ScriptedEngine(broken))
    assert await refusal(rig, minimal()) == (500, "api_error", "Internal error.")
    rig.check_rest()


async def test_pings_keep_a_silent_stream_alive() -> None:
    script = say("Hello.", hold_at=1)
    rig = Rig(ScriptedEngine(script), keep_alive_seconds=0.01)
    body = b""
    async with (
        served(rig.app) as base,
        httpx.AsyncClient(base_url=base) as client,
        client.stream("POST", MESSAGES, json=minimal(stream=True)) as reply,
    ):
        async for chunk in reply.aiter_bytes():
            body += chunk
            if body.count(b"event: ping") > 4:
                script.release.set()
    assert put_together(frames(body))["content"][0]["text"] == "Hello."


async def test_a_client_that_leaves_ends_its_turn() -> None:
    rig = Rig(ScriptedEngine(say("Hello.", hold_at=2)))
    async with served(rig.app) as base:
        host, port = base.removeprefix("http://").split(":")
        for stream in (False, True):
            reader, writer = await asyncio.open_connection(host, int(port))
            content = json.dumps(minimal(stream=stream)).encode()
            head = f"POST {MESSAGES} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await settled(lambda: bool(rig.engine.live))
            if stream:
                await reader.readuntil(b"text_delta")
            writer.close()
            await settled(lambda: not rig.engine.live and not len(rig.context.directory))
    assert len(rig.engine.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_drain_tells_the_client(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("abc", hold_at=1)))
    inbox: asyncio.Queue[Any] = asyncio.Queue()
    content = json.dumps(minimal(stream=stream)).encode()
    inbox.put_nowait({"type": "http.request", "body": content, "more_body": False})
    sent: list[Any] = []

    async def deliver(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": MESSAGES, "headers": [], "query_string": b""}
    answer = asyncio.create_task(rig.app(scope, inbox.get, deliver))
    await settled(
        lambda: (
            rig.engine.live and (not stream or b"text_delta" in b"".join(m.get("body", b"") for m in sent))
        )
    )
    answer.cancel()  # as the HTTP server does
    await answer
    body = b"".join(message.get("body", b"") for message in sent)
    told = frames(body)[-1] if stream else json.loads(body)
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
    assert not rig.engine.live
    rig.check_rest()
