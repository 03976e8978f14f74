"""What runs for a key that is revoked ends with it; what is its tenant's goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.admins_rig import KEYS, TURN, Admins
from tests.api_rig import CHAT, Rig, served, settled
from tests.fakes import ScriptedEngine, say
from tests.tenants_rig import with_key


async def until_open(rig: Rig, number: int) -> None:
    await settled(lambda: len(rig.context.open_requests) == number)


async def test_a_stream_ends_with_its_key_and_its_turn_is_taken_back(tmp_path: Path) -> None:
    script = say("hello", hold_at=2)
    rig = Admins(tmp_path, ScriptedEngine(script))
    mine, other = await rig.made("acme"), await rig.made("acme")
    turn = TURN | {"stream": True}
    streams = [
        asyncio.create_task(rig.client.post(CHAT, json=turn, headers=with_key(one["key"])))
        for one in (mine, other)
    ]
    await settled(lambda: len(rig.engine.submits) == 2)
    await rig.ask("DELETE", f"{KEYS}/{mine['id']}")
    cut = await streams[0]
    last = [line for line in cut.text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last[6:])["error"]["code"] == "key_revoked"
    script.release.set()
    assert (await streams[1]).text.rstrip().endswith("[DONE]")
    sessions = rig.context.directory.sessions("acme")
    assert [session.committed for session in sessions] == [1]  # the other's
    assert not rig.engine.live
    assert len(rig.context.open_requests) == 0


async def test_a_whole_answer_is_a_401_in_the_dialect_that_was_spoken(tmp_path: Path) -> None:
    rig = Admins(tmp_path, ScriptedEngine(say("hello", hold_at=1)))
    made = await rig.made("acme")
    asked = [
        asyncio.create_task(rig.client.post(path, json=TURN, headers=with_key(made["key"])))
        for path in (CHAT, "/v1/messages")
    ]
    await settled(lambda: len(rig.engine.submits) == 2)
    rig.file.revoke(lambda record: record.tenant == "acme", 1000.0)  # by the command line
    rig.context.look_at_keys()
    openai, anthropic = await asyncio.gather(*asked)
    assert (openai.status_code, openai.json()["error"]["code"]) == (401, "key_revoked")
    assert (anthropic.status_code, anthropic.json()["type"]) == (401, "error")
    assert anthropic.json()["error"]["type"] == "authentication_error"
    assert not rig.engine.live


async def test_readers_of_events_are_cut_off_and_what_is_the_tenant_s_goes_on(tmp_path: Path) -> None:
    script = say("hello", hold_at=1)
    rig = Admins(tmp_path, ScriptedEngine(script))
    one, two = await rig.made("acme"), await rig.made("acme")
    head = with_key(one["key"])
    behind = {"model": "tiny", "input": "hi", "background": True}
    response = (await rig.client.post("/v1/responses", json=behind, headers=head)).json()
    agent = {"agent": {"model": "tiny"}, "environment": {"type": "none"}, "input": "hi"}
    working = (await rig.client.post("/v1/agents/sessions", json=agent, headers=head)).json()
    await settled(lambda: len(rig.engine.submits) == 2)
    paths = (
        f"/v1/agents/sessions/{working['id']}/events",
        f"/v1/responses/{response['id']}?stream=true",
        f"/agentserve/sessions/{working['id']}/events",
    )
    readers = [asyncio.create_task(rig.client.get(path, headers=head)) for path in paths]
    await until_open(rig, 3)
    rig.file.rotate(one["id"], 1000.0, 5.0)
    rig.context.look_at_keys()
    await asyncio.sleep(0)
    assert len(rig.context.open_requests) == 3  # until its grace is over
    rig.time = 1005.0
    rig.context.look_at_keys()
    for reader in readers:
        assert "key_revoked" in (await reader).text
    script.release.set()
    mine = with_key(two["key"])
    await settled(lambda: rig.context.responses.live(response["id"]).over)
    told = (await rig.client.get(f"/v1/responses/{response['id']}", headers=mine)).json()
    assert told["status"] == "completed"
    await settled(lambda: rig.context.agents.shelf.get("acme", working["id"]).status == "idle")


async def test_a_body_that_is_still_coming_is_not_read_on(tmp_path: Path) -> None:
    rig = Admins(tmp_path)
    made = await rig.made("acme")
    coming = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": '
        coming.set()
        await asyncio.Event().wait()

    asked = asyncio.create_task(rig.client.post(CHAT, content=body(), headers=with_key(made["key"])))
    await coming.wait()
    await rig.ask("DELETE", f"{KEYS}/{made['id']}")
    reply = await asked
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "key_revoked")
    assert len(rig.context.open_requests) == 0


async def test_over_a_socket_the_last_event_says_why_and_the_connection_is_whole(tmp_path: Path) -> None:
    rig = Admins(tmp_path, ScriptedEngine(say("hello", hold_at=2)))
    mine, other = await rig.made("acme"), await rig.made("acme")
    async with served(rig.app) as url, httpx.AsyncClient(base_url=url) as client:
        asked = client.stream("POST", CHAT, json=TURN | {"stream": True}, headers=with_key(mine["key"]))
        async with asked as stream:
            lines = stream.aiter_lines()
            first = await anext(lines)
            assert "key_revoked" not in first
            await rig.ask("DELETE", f"{KEYS}/{mine['id']}")
            last = [line async for line in lines if line][-1]  # the stream has an end, and is no broken one
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "key_revoked"
        assert (await client.get("/v1/models", headers=with_key(mine["key"]))).status_code == 401
        assert (await client.get("/v1/models", headers=with_key(other["key"]))).status_code == 200
        assert len(rig.context.open_requests) == 0
    assert not rig.engine.live


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_what_ended_with_its_key_is_no_answer_to_a_retry_with_another(
    tmp_path: Path, path: str, stream: bool
) -> None:
    script = say("hello", hold_at=2)
    rig = Admins(tmp_path, ScriptedEngine(script))
    mine, other = await rig.made("acme"), await rig.made("acme")
    turn = {"model": "tiny", "input": "hi"} if path == "/v1/responses" else TURN
    tries = [with_key(one["key"]) | {"idempotency-key": "k"} for one in (mine, other)]
    first = asyncio.create_task(rig.client.post(path, json=turn | {"stream": stream}, headers=tries[0]))
    await settled(lambda: len(rig.engine.submits) == 1)
    await rig.ask("DELETE", f"{KEYS}/{mine['id']}")
    cut = await first
    script.release.set()
    again = await rig.client.post(path, json=turn | {"stream": stream}, headers=tries[1])
    assert again.status_code == 200
    assert "idempotent-replayed" not in again.headers
    assert len(again.text) > len(cut.text)
    assert len(rig.engine.submits) == 2
