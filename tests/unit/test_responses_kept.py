"""Responses that are kept: retrieval, deletion, disks that are full, servers that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from agentserve.server.http.responses.conversations import Conversations
from agentserve.server.http.responses.desk import Desk
from agentserve.server.http.responses.records import Records
from agentserve.server.http.responses.shelf import Shelf
from agentserve.server.sessions.book import StorageError
from tests.api_rig import Rig, settled, user
from tests.fakes import ScriptedEngine, say
from tests.responses_rig import (
    CALL,
    RESPONSES,
    WEATHER,
    Call,
    Client,
    call_of,
    checked,
    parsed,
    result,
    text_of,
)


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


async def test_a_response_is_there_until_it_is_deleted(client: Client) -> None:
    made = await client.create("hi", says="Hm. " + CALL, tools=[WEATHER])
    assert await client.get(f"{RESPONSES}/{made['id']}") == made
    deleted = await client.rig.client.delete(f"{RESPONSES}/{made['id']}")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    await client.get(f"{RESPONSES}/{made['id']}", 404)
    assert (await client.rig.client.delete(f"{RESPONSES}/{made['id']}")).status_code == 404
    assert not client.rig.context.responses.shelf


async def test_what_goes_on_from_a_deleted_response_keeps_its_history(client: Client) -> None:
    first = await client.create("one", says="first")
    second = await client.create("two", says="second", previous_response_id=first["id"])
    await client.rig.client.delete(f"{RESPONSES}/{first['id']}")
    await client.refused("x", 404, previous_response_id=first["id"])
    third = await client.create("three", says="third", previous_response_id=second["id"])
    items = await client.get(f"{RESPONSES}/{third['id']}/input_items?order=asc")
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["one", "first", "two", "second", "three"]


async def test_input_items_page_by_page(client: Client) -> None:
    made = await client.create([user(str(n)) for n in range(5)])
    path = f"{RESPONSES}/{made['id']}/input_items"
    first = await client.get(f"{path}?limit=2")
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert (first["has_more"], first["last_id"]) == (True, first["data"][1]["id"])
    rest = await client.get(f"{path}?after={first['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    for bad in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody"):
        await client.get(f"{path}?{bad}", 400)


async def test_a_stream_of_what_is_over(client: Client) -> None:
    made = await client.create("hi", says="Hm. " + CALL, tools=[WEATHER])
    events = await replay(client, made["id"], "")
    final = events[-2]["response"]
    assert final == made
    assert [event["type"] for event in events[-3::-1]].count("response.output_item.done") == 2
    [end, done] = await replay(client, made["id"], "&starting_after=3")
    assert (end["type"], end["response"], done) == ("response.completed", made, "[DONE]")
    assert end["sequence_number"] > 3
    await client.get(f"{RESPONSES}/{made['id']}?stream=true&starting_after=-1", 400)
    await client.get(f"{RESPONSES}/{made['id']}?stream=yes", 400)


async def test_a_query_that_cannot_be_meant_is_refused(client: Client) -> None:
    made = await client.create("hi")
    path = f"{RESPONSES}/{made['id']}"
    for query in (
        "?stream=true&stream=false",
        "?stream=true&starting_after=\u0661",
        "?stream=true&starting_after=",
    ):
        await client.get(path + query, 400)
    for query in ("limit=1&limit=2", "limit=\u0661", "order=asc&order=desc", "limit=" + 30 * "1"):
        await client.get(f"{path}/input_items?{query}", 400)


class FullDisk:
    """A book that takes nothing, from a moment on."""

    def __init__(self) -> None:
        self.full = False

    def put(self, name: str, content: bytes) -> Future[None]:
        done: Future[None] = Future()
        if self.full:
            done.set_exception(StorageError("no space left"))
        else:
            done.set_result(None)
        return done

    def drop(self, name: str) -> Future[None]:
        return self.put(name, b"")

    def write(self, records: Any) -> Future[None]:
        return self.put("", b"")


async def test_a_conversation_that_could_not_be_kept_is_as_before(rig: Rig, client: Client) -> None:
    """Its response could be: its disk is another."""
    disk = FullDisk()
    rig.context.responses.conversations = Conversations(max_count=9, max_bytes=1 << 20, book=disk)
    made = (await rig.post("/v1/conversations", {"items": [user("a")]})).json()
    first = await client.create("b", says="B", conversation=made["id"])
    disk.full = True
    assert (await client.refused("c", 503, conversation=made["id"]))["code"] == "storage_failed"
    found = rig.context.responses.conversations.get(made["id"])
    assert (found.count, found.session) == (3, first["session_id"])
    assert rig.context.responses.conversations.size_bytes == found.cost
    disk.full = False
    await client.create("c", says="C", conversation=made["id"])
    items = await client.get(f"/v1/conversations/{made['id']}/items?order=asc")
    assert [item["content"][0]["text"] for item in items["data"]] == ["a", "b", "B", "c", "C"]


async def test_a_response_that_cannot_be_kept_has_failed(rig: Rig, client: Client) -> None:
    disk = FullDisk()
    rig.context.responses.shelf = Shelf(lambda: 0.0, max_count=99, max_bytes=1 << 20, ttl=9.0, book=disk)
    first = await client.create("one", says="first")
    disk.full = True
    error = await client.refused("two", 503, previous_response_id=first["id"])
    assert error["code"] == "storage_failed"
    final = checked(await client.stream("two", previous_response_id=first["id"]))
    assert (final["status"], final["error"]["code"], final["output"]) == ("failed", "server_error", [])
    assert (await client.get(f"{RESPONSES}/{final['id']}"))["status"] == "failed"
    error = await client.refused("two", 503, background=True)
    assert error["code"] == "storage_failed"
    assert all(not kept.running for kept in rig.context.responses.shelf)
    assert text_of(await client.create("two", says="ok", store=False)) == "ok"
    disk.full = False
    third = await client.create("two", says="third", previous_response_id=first["id"])
    assert text_of(third) == "third"
    rig.check_rest()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Rig, list[str]]]:
    """A server that keeps responses; the disk takes nothing while the list says why."""
    full: list[str] = []
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    write = records._store.write

    def failing(changes: Any) -> None:
        if full:
            raise StorageError(full[0])
        write(changes)

    records._writer._write = failing
    rig = Rig(ScriptedEngine(say("Hello!")), responses=Desk(lambda: 0.0, records=records))
    yield rig, full
    full.clear()
    asyncio.run(rig.context.responses.close())


async def test_a_disk_that_failed_costs_no_more_turns(on_disk: tuple[Rig, list[str]]) -> None:
    rig, full = on_disk
    client = Client(rig)
    first = await client.create("one", says="first")
    conversation = (await rig.post("/v1/conversations", {})).json()["id"]
    full.append("no space left")
    error = await client.refused("two", 503, previous_response_id=first["id"])
    assert (error["code"], len(rig.engine.submits)) == ("storage_failed", 2)  # nobody knew it before
    wanted: list[dict[str, Any]] = [
        {"previous_response_id": first["id"]},
        {"stream": True},
        {"background": True},
        {"conversation": conversation, "store": False},
    ]
    for fields in wanted:
        assert (await client.refused("two", 503, **fields))["code"] == "storage_failed"
    assert len(rig.engine.submits) == 2  # nothing was computed
    health = (await rig.client.get("/health")).json()["responses_disk"]
    assert (health["state"], health["reason"]) == ("failing", "no space left")
    assert text_of(await client.create("two", says="ok", store=False)) == "ok"
    full.clear()
    third = await client.create("two", says="third", previous_response_id=first["id"])
    assert text_of(third) == "third"
    assert rig.context.responses.lives.running == 0
    assert not rig.context.responses.conversations.busy
    rig.check_rest()


async def test_a_turn_whose_response_cannot_be_kept_is_nobody_s(on_disk: tuple[Rig, list[str]]) -> None:
    """Its session has it, with a call that nobody will answer: it waits for none, and the client goes on
    from before."""
    rig, full = on_disk
    client = Client(rig)
    first = await client.create("one", says="first")
    conversation = (await rig.post("/v1/conversations", {})).json()["id"]
    full.append("no space left")
    await client.refused("two", 503, says=CALL, tools=[WEATHER], previous_response_id=first["id"])
    session = await rig.session(first["session_id"])
    assert (session["turns"], session["state"], session["devalued"]) == (2, "IDLE", "abandoned")
    full.clear()
    again = await client.create("two", says=CALL, tools=[WEATHER], previous_response_id=first["id"])
    assert again["session_id"] != first["session_id"]
    assert (await rig.session(again["session_id"]))["parent"] == first["session_id"]
    full.append("no space left")
    await client.refused("two", 503, conversation=conversation)
    full.clear()
    items = await client.get(f"/v1/conversations/{conversation}/items")
    assert items["data"] == []  # what its client was told to have failed is not in it
    rig.check_rest()


async def test_a_turn_that_was_rolled_back_ends_no_wait(on_disk: tuple[Rig, list[str]]) -> None:
    """Its response cannot be kept either, but its session is as before, and waits on."""
    rig, full = on_disk
    client = Client(rig)
    first = await client.create("one", says=CALL, tools=[WEATHER])
    given: Any = [result(call_of(first))]
    made = await client.create(
        given,
        says=say("Hello!", hold_at=3),
        tools=[WEATHER],
        previous_response_id=first["id"],
        background=True,
    )
    await settled(lambda: rig.engine.live)
    full.append("no space left")
    shown = (await rig.post(f"{RESPONSES}/{made['id']}/cancel", b"")).json()
    assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
    session = await rig.session(first["session_id"])
    assert (session["turns"], session["state"]) == (1, "WAITING_TOOL")
    full.clear()
    again = await client.create(given, says="ok", tools=[WEATHER], previous_response_id=first["id"])
    assert again["session_id"] == first["session_id"]
    rig.check_rest()


async def test_a_server_that_leaves_says_so_in_the_stream(rig: Rig) -> None:
    """As the HTTP server cancels what runs when its drain is over."""
    rig.engine.reply = say("Hello!", hold_at=2)
    call = Call(rig, "POST", RESPONSES, {"model": "tiny", "input": "x", "stream": True})
    await settled(lambda: b"output_text.delta" in call.content)
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    *events, done = call.events()
    numbers = [event["sequence_number"] for event in events]
    # An event that was made, and not sent when the task was cancelled, leaves a gap.
    assert numbers == sorted(set(numbers))
    final = events[-1]["response"]
    assert (done, events[-1]["type"]) == ("[DONE]", "response.failed")
    assert (final["status"], final["error"]["code"]) == ("failed", "rate_limit_exceeded")
    assert "try again in 1s" in final["error"]["message"]
    await settled(lambda: not rig.engine.live)
    rig.check_rest()


async def test_a_server_that_leaves_while_the_end_is_sent_tells_no_second_one(rig: Rig) -> None:
    class Slow(Call):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if b"response.completed" in message.get("body", b""):
                await asyncio.sleep(3600)

    call = Slow(rig, "POST", RESPONSES, {"model": "tiny", "input": "x", "stream": True})
    await settled(lambda: b"response.completed" in call.content)
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    assert checked(call.events())["status"] == "completed"
    rig.check_rest()
