"""Responses in the background: read while they are made, cancelled, deleted, bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.server.http.responses.desk import Bounds, Desk
from agentserve.server.http.responses.live import Live
from agentserve.types import FinishReason
from tests.api_rig import Rig, settled
from tests.fakes import Script, ScriptedEngine, say
from tests.responses_rig import RESPONSES, Client, checked, parsed, text_of


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


async def replay(client: Client, id_: str, query: str) -> list[Any]:
    reply = await client.rig.client.get(f"{RESPONSES}/{id_}?stream=true{query}")
    assert reply.status_code == 200, reply.text
    return parsed(reply.content)


async def test_background(rig: Rig, client: Client) -> None:
    script = say("Hello!", hold_at=3)
    made = await client.create("hi", says=script, background=True)
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    await settled(lambda: rig.engine.live)
    path = f"{RESPONSES}/{made['id']}"
    await settled(lambda: rig.context.responses.live(made["id"]).fold.response["output"])
    assert (await client.get(path))["status"] == "in_progress"
    error = await client.refused("x", 409, previous_response_id=made["id"])
    assert error["code"] == "response_in_progress"
    reading = asyncio.create_task(rig.client.get(f"{path}?stream=true&starting_after=1"))
    await asyncio.sleep(0.01)
    script.release.set()
    events = parsed((await reading).content)
    final = checked(events, first=2) if events[0]["sequence_number"] == 2 else None
    assert final is not None
    assert text_of(final) == "Hello!"
    assert await client.get(path) == final
    whole = await replay(client, made["id"], "")
    assert [event["type"] for event in whole[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert checked(whole) == final
    again = await replay(client, made["id"], "&starting_after=4")
    assert again == whole[5:]
    second = await client.create("more", says="ok", previous_response_id=made["id"])
    assert second["session_id"] == made["session_id"]
    cancelled = await rig.post(f"{path}/cancel", b"")
    assert cancelled.json() == final
    rig.check_rest()


async def test_a_background_stream_goes_on_without_its_reader(rig: Rig, client: Client) -> None:
    script = say("Hello!", hold_at=3)
    rig.engine.reply = script
    body = {"model": "tiny", "input": "x", "stream": True, "background": True}
    task = asyncio.create_task(rig.post(RESPONSES, body))
    await settled(lambda: rig.engine.live)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert rig.engine.live
    script.release.set()
    await settled(lambda: not rig.engine.live)
    [kept] = rig.context.responses.shelf
    await settled(lambda: rig.context.responses.shelf.get(kept.id).shown()["status"] == "completed")
    assert checked(await replay(client, kept.id, ""))["status"] == "completed"


async def test_cancelling(rig: Rig, client: Client) -> None:
    first = await client.create("one", says="first")
    made = await client.create(
        "x", says=say("Hello!", hold_at=3), background=True, previous_response_id=first["id"]
    )
    await settled(lambda: rig.engine.live)
    reading = asyncio.create_task(rig.client.get(f"{RESPONSES}/{made['id']}?stream=true"))
    await asyncio.sleep(0.01)
    cancelled = await rig.post(f"{RESPONSES}/{made['id']}/cancel", b"")
    assert (cancelled.json()["status"], cancelled.json()["output"]) == ("cancelled", [])
    events = parsed((await reading).content)
    assert checked(events)["status"] == "cancelled"
    await settled(lambda: not rig.engine.live)
    again = await rig.post(f"{RESPONSES}/{made['id']}/cancel", b"")
    assert again.json() == cancelled.json() == await client.get(f"{RESPONSES}/{made['id']}")
    session = await rig.session(first["session_id"])
    assert (session["turns"], session["running_turn"]) == (1, None)
    plain = await client.create("x", says="Hi")
    assert (await rig.post(f"{RESPONSES}/{plain['id']}/cancel", b"")).status_code == 400
    rig.check_rest()


async def test_deleting_a_running_response_stops_it(rig: Rig, client: Client) -> None:
    made = await client.create("x", says=say("Hello!", hold_at=3), background=True)
    await settled(lambda: rig.engine.live)
    assert (await rig.client.delete(f"{RESPONSES}/{made['id']}")).status_code == 200
    assert not rig.engine.live
    await client.get(f"{RESPONSES}/{made['id']}", 404)
    assert rig.context.responses.live(made["id"]) is None


async def test_a_background_response_that_fails(rig: Rig, client: Client) -> None:
    broken = Script(list(b"He"), reason=FinishReason.ERROR, error="the kernel failed")
    made = await client.create("x", says=broken, background=True)
    await settled(lambda: rig.context.responses.live(made["id"]).over)
    final = await client.get(f"{RESPONSES}/{made['id']}")
    assert (final["status"], final["error"]["message"]) == ("failed", "the kernel failed")
    refused = Script([], reason=FinishReason.REFUSED, error="it cannot fit")
    made = await client.create("x", says=refused, background=True)
    await settled(lambda: rig.context.responses.live(made["id"]).over)
    assert checked(await replay(client, made["id"], ""))["error"]["message"] == "it cannot fit"


async def test_background_responses_are_bounded() -> None:
    rig = Rig(ScriptedEngine(say("Hello!", hold_at=1)), responses=Desk(bounds=Bounds(running=2)))
    client = Client(rig)
    for _ in range(2):
        last = await client.create("x", background=True)
    error = await client.refused("x", 429, background=True)
    assert error["code"] == "rate_limit_exceeded"
    await rig.post(f"{RESPONSES}/{last['id']}/cancel", b"")
    assert (await client.create("x", background=True))["status"] == "queued"
    await rig.context.background.stop()


async def test_a_response_that_is_made_and_only_to_be_kept_is_not_cancelled(rig: Rig, client: Client) -> None:
    """Its session has the turn: told as cancelled, it would say what is not so."""
    script = say("Hello!", hold_at=3)
    made = await client.create("hi", says=script, background=True)
    fold = rig.context.responses.live(made["id"]).fold
    script.release.set()
    await settled(lambda: fold.response["status"] == "completed")
    live = Live(fold)
    live.task = asyncio.create_task(asyncio.sleep(0))
    cancelling = asyncio.create_task(live.cancel())
    await live.task  # it ran to its end
    live.end()
    await cancelling
    assert not live.cancelled
