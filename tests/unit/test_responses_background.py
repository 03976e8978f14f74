"""Responses in the background: read while they are made, cancelled, deleted, bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.server.http.responses.desk import Desk, DeskBounds
from agentserve.server.http.responses.events import Fold
from agentserve.server.http.responses.live import EVENT_SECONDS, Live, Lives
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.responses.shown import response_object
from agentserve.server.http.responses.tools import Toolbox
from agentserve.server.sessions.answer import Delta
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
    rig = Rig(ScriptedEngine(say("Hello!", hold_at=1)), responses=Desk(bounds=DeskBounds(running=2)))
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
    live = Live(fold, lambda: 0.0, most=1000)
    live.task = asyncio.create_task(asyncio.sleep(0))
    cancelling = asyncio.create_task(live.cancel())
    await live.task  # it ran to its end
    live.end()
    await cancelling
    assert not live.cancelled


# --- bounds of what is kept for readers ---------------------------------------------------


def fold_of(name: str) -> Fold:
    shown = response_object(
        ResponsesRequest(), Toolbox(), id_=name, model="tiny", created=0, conversation=None
    )
    return Fold(shown, Toolbox(), lambda prefix: prefix)


def said(live: Live, text: str) -> None:
    live.add(live.fold.delta(Delta(text=text)))


async def read(live: Live, after: int | None = None) -> list[Any]:
    return parsed(b"".join([body async for body in live.follow(after)]))


async def test_events_of_one_response_are_bounded_and_a_late_reader_gets_the_end() -> None:
    live = Lives(most_running=9, most_bytes=1 << 20, one_bytes=5000).begin(fold_of("resp_1"), lambda: 0.0)
    live.add(live.fold.created("queued"))
    early = live.follow(None)
    begun = parsed(await anext(early))
    for number in range(200):
        said(live, f"word {number} ")
        assert live.size_bytes <= 5000
    assert live.first > 100
    recent = live.follow(live.fold.sequence - 3)
    assert [event["sequence_number"] for event in parsed(await anext(recent))] == [
        live.fold.sequence + by for by in (-2, -1, 0)
    ]
    late = asyncio.create_task(read(live, 5))
    await asyncio.sleep(0)
    live.fold.cancel()
    live.add(live.fold.ended())
    live.end()
    [end, done] = await late
    assert (end["type"], end["response"]["status"], done) == ("response.incomplete", "cancelled", "[DONE]")
    assert end["sequence_number"] == live.fold.sequence
    rest = parsed(b"".join([body async for body in early]))
    assert (begun[-1]["sequence_number"], rest) == (1, [end, done])  # of what it missed, the end
    assert parsed(b"".join([body async for body in recent])) == [end, done]  # it missed nothing


async def test_events_of_all_responses_together_are_bounded() -> None:
    lives = Lives(most_running=9, most_bytes=20_000, one_bytes=15_000)
    many = [lives.begin(fold_of(f"resp_{number}"), lambda: 0.0) for number in range(5)]
    for number in range(300):
        said(many[number % 4], "x" * 100)
        assert lives.size_bytes <= 20_000
        assert lives.size_bytes == sum(live.size_bytes for live in many)
    said(many[4], "the newest")
    assert many[4].first == 0  # the largest give way
    lives.over(many[4])
    held = many[4].follow(None)
    for number in range(400):
        said(many[number % 4], "x" * 100)
        assert lives.size_bytes <= 20_000
    assert lives.get("resp_4") is None  # what is over goes before what is read now
    assert many[4].window_bytes == 0  # whoever still reads it holds nothing of it
    assert parsed(b"".join([body async for body in held])) == ["[DONE]"]  # the server left it without an end
    for live in many:
        lives.over(live)
        lives.over(live)
        lives.forget(live)
    assert (len(lives), lives.size_bytes) == (0, 0)


async def test_a_reader_takes_a_bounded_piece_at_a_time() -> None:
    live = Live(fold_of("resp_1"), lambda: 0.0, most=8 << 20)
    for _ in range(300):
        said(live, "x" * 1000)
    assert len(await anext(live.follow(None))) < 70_000


async def test_silence_is_broken_once_for_all_readers() -> None:
    now = 0.0
    live = Live(fold_of("resp_1"), lambda: now, most=1 << 20)
    live.add(live.fold.created("queued"))
    for second in range(1, 200):
        now = float(second)
        for _ in range(10):  # readers
            live.tick()
    assert live.fold.sequence == 1 + int(199 // EVENT_SECONDS)
    said(live, "x")
    before = live.fold.sequence
    now += EVENT_SECONDS - 1
    live.tick()
    assert live.fold.sequence == before  # it was not silent
    live.fold.cancel()
    now += 100
    live.tick()
    assert live.fold.sequence == before  # its end is what comes next
    live.add(live.fold.ended())
    now += 100
    live.tick()
    assert live.fold.ended() == []
    live.end()
    assert [event for event in await read(live) if event != "[DONE]"][-1]["type"] == "response.incomplete"


async def test_a_finished_response_is_there_whatever_became_of_its_events() -> None:
    desk = Desk(bounds=DeskBounds(one_events_bytes=3000, responses=1))
    rig = Rig(ScriptedEngine(), responses=desk)
    client = Client(rig)
    script = say("Hello! " * 40, hold_at=200)
    made = await client.create("x", says=script, background=True)
    await settled(lambda: (live := desk.live(made["id"])) is not None and live.first > 3)
    late = asyncio.create_task(replay(client, made["id"], ""))
    for _ in range(3):
        await client.create("y", says="ok")  # the shelf is full; what is made stays on it
    assert (await client.get(f"{RESPONSES}/{made['id']}"))["status"] == "in_progress"
    script.release.set()
    [end, done] = await late
    final = await client.get(f"{RESPONSES}/{made['id']}")
    assert (end["response"], done, text_of(final)) == (final, "[DONE]", "Hello! " * 40)
    whole = await replay(client, made["id"], "")  # made from the response; its end keeps its number
    assert (whole[0]["type"], whole[-2:]) == ("response.created", [end, "[DONE]"])
    recent = await replay(client, made["id"], f"&starting_after={end['sequence_number'] - 2}")
    assert [event["sequence_number"] for event in recent[:-1]] == [
        end["sequence_number"] - 1,
        end["sequence_number"],
    ]
    [again, done] = await replay(client, made["id"], "&starting_after=2")
    assert (again, done) == (end, "[DONE]")
    rig.check_rest()


async def test_a_burst_does_not_pass_the_bound() -> None:
    rig = Rig(ScriptedEngine(say("Hello!", hold_at=1)), responses=Desk(bounds=DeskBounds(running=2)))
    body = {"model": "tiny", "input": "x", "background": True}
    replies = await asyncio.gather(*(rig.post(RESPONSES, body) for _ in range(8)))
    assert sorted(reply.status_code for reply in replies) == [200, 200] + 6 * [429]
    lives = rig.context.responses.lives
    for reply in replies:
        if reply.status_code == 200:
            await rig.post(f"{RESPONSES}/{reply.json()['id']}/cancel", b"")
    for bad in ({"temperature": 9}, {"previous_response_id": "resp_x"}, {"store": False}):
        assert (await rig.post(RESPONSES, body | bad)).status_code in (400, 404)
    assert lives.running == 0


async def test_metrics_tell_what_is_kept(rig: Rig, client: Client) -> None:
    async def shown() -> dict[str, float]:
        page = (await rig.client.get("/metrics")).text
        lines = (line.split() for line in page.splitlines() if line.startswith("agentserve_"))
        return {words[0]: float(words[1]) for words in lines}

    script = say("Hello!", hold_at=3)
    made = await client.create("x", says=script, background=True)
    await rig.post("/v1/conversations", {"items": [{"role": "user", "content": "a"}]})
    desk = rig.context.responses
    seen = await shown()
    assert (seen["agentserve_responses"], seen["agentserve_responses_running"]) == (1, 1)
    assert seen["agentserve_responses_bytes"] == desk.shelf.size_bytes > 0
    assert (seen["agentserve_conversations"], seen["agentserve_conversations_bytes"] > 0) == (1, True)
    assert seen["agentserve_response_events_bytes"] == desk.lives.size_bytes > 0
    assert seen["agentserve_responses_disk_failing"] == 0
    await rig.post(f"{RESPONSES}/{made['id']}/cancel", b"")
    await rig.client.delete(f"{RESPONSES}/{made['id']}")
    seen = await shown()
    assert (seen["agentserve_responses"], seen["agentserve_responses_running"]) == (0, 0)
    assert (seen["agentserve_responses_bytes"], seen["agentserve_response_events_bytes"]) == (0, 0)
