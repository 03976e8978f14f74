"""Responses that are kept: retrieval, background, cancelling, conversations, cache transparency."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.http.responses.desk import Bounds, Desk
from agentserve.server.http.responses.shelf import Shelf
from agentserve.server.sessions.book import StorageError
from agentserve.types import FinishReason
from tests.api_rig import Rig, settled, user
from tests.fakes import Script, ScriptedEngine, say, shared
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, checked, parsed, result, text_of

CONVERSATIONS = "/v1/conversations"


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


async def conversation(client: Client, **fields: Any) -> Any:
    reply = await client.rig.post(CONVERSATIONS, fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_a_conversation_grows_with_its_responses(client: Client) -> None:
    made = await conversation(client, metadata={"topic": "x"}, items=[user("My name is Ann.")])
    path = f"{CONVERSATIONS}/{made['id']}"
    first = await client.create("Weather?", says="Hm. " + CALL, tools=[WEATHER], conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]}
    second = await client.create(
        [result(call_of(first))], says="It rains.", tools=[WEATHER], conversation={"id": made["id"]}
    )
    assert second["session_id"] == first["session_id"]
    assert client.rig.engine.submits[1].turn == 2
    items = (await client.get(f"{path}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == [
        "message",
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    one = await client.get(f"{path}/items/{items[1]['id']}")
    assert one == items[1]
    third = await client.create("more", says="ok", previous_response_id=second["id"])
    assert third["session_id"] == first["session_id"]
    prompt = bytes(t for t in unpack_tokens(client.rig.engine.submits[2].tokens) if t < 256)
    assert b"Ann" in prompt
    assert prompt.count(b"It rains.") == 1
    kept = await client.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")
    assert [item["id"] for item in kept["data"]] == [item["id"] for item in items[:-1]]


async def test_conversations_are_changed_and_deleted(client: Client) -> None:
    made = await conversation(client)
    path = f"{CONVERSATIONS}/{made['id']}"
    assert (made["object"], made["metadata"]) == ("conversation", {})
    changed = await client.rig.post(path, {"metadata": {"a": "b"}})
    assert changed.json()["metadata"] == {"a": "b"} == (await client.get(path))["metadata"]
    added = (await client.rig.post(f"{path}/items", {"items": [user("a"), user("b")]})).json()
    assert [item["content"][0]["text"] for item in added["data"]] == ["a", "b"]
    twice = await client.rig.post(f"{path}/items", {"items": [added["data"][0]]})
    assert twice.json()["error"]["param"] == "items[0].id"
    item = f"{path}/items/{added['first_id']}"
    assert (await client.rig.client.delete(item)).json()["id"] == made["id"]
    assert (await client.rig.client.delete(item)).status_code == 404
    await client.get(item, 404)
    assert [i["content"][0]["text"] for i in (await client.get(f"{path}/items"))["data"]] == ["b"]
    response = await client.create("x", conversation=made["id"])
    assert (await client.rig.client.delete(path)).json()["deleted"]
    await client.get(path, 404)
    assert (await client.refused("x", 404, previous_response_id=response["id"]))["code"] == (
        "conversation_not_found"
    )
    assert (await client.get(f"{RESPONSES}/{response['id']}"))["status"] == "completed"


async def test_one_response_at_a_time_for_a_conversation(rig: Rig, client: Client) -> None:
    made = await conversation(client)
    script = say("Hello!", hold_at=3)
    running = await client.create("x", says=script, conversation=made["id"], background=True)
    await settled(lambda: rig.engine.live)
    assert (await client.refused("y", 409, conversation=made["id"]))["code"] == "conversation_locked"
    add = await rig.post(f"{CONVERSATIONS}/{made['id']}/items", {"items": [user("a")]})
    assert add.status_code == 409
    await rig.post(f"{RESPONSES}/{running['id']}/cancel", b"")
    assert (await client.get(f"{CONVERSATIONS}/{made['id']}/items"))["data"] == []
    await client.refused("y", conversation=made["id"], temperature=9)
    done = await client.create("y", says="ok", conversation=made["id"])
    assert done["status"] == "completed"
    assert len((await client.get(f"{CONVERSATIONS}/{made['id']}/items"))["data"]) == 2


async def test_of_two_responses_at_once_for_a_conversation_one_is_made(rig: Rig, client: Client) -> None:
    made = await conversation(client)
    body = {"model": "tiny", "input": "x", "conversation": made["id"]}
    replies = await asyncio.gather(*(rig.post(RESPONSES, body) for _ in range(5)))
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409, 409]
    assert replies[1].headers["x-should-retry"] == "true"
    assert len((await client.get(f"{CONVERSATIONS}/{made['id']}/items"))["data"]) == 2
    assert not rig.context.responses.conversations.busy


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


async def test_a_server_that_leaves_says_so_in_the_stream(rig: Rig) -> None:
    """As the HTTP server cancels what runs when its drain is over."""
    rig.engine.reply = say("Hello!", hold_at=2)
    body = json.dumps({"model": "tiny", "input": "x", "stream": True}).encode()
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent_body:
            sent_body.append(True)
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    sent_body: list[bool] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": RESPONSES,
        "raw_path": RESPONSES.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "state": {},
    }
    task = asyncio.create_task(rig.app(scope, receive, send))
    await settled(lambda: any(b"output_text.delta" in message.get("body", b"") for message in sent))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    *events, done = parsed(b"".join(message.get("body", b"") for message in sent))
    numbers = [event["sequence_number"] for event in events]
    # An event that was made, and not sent when the task was cancelled, leaves a gap.
    assert numbers == sorted(set(numbers))
    final = events[-1]["response"]
    assert (done, events[-1]["type"]) == ("[DONE]", "response.failed")
    assert (final["status"], final["error"]["code"]) == ("failed", "rate_limit_exceeded")
    assert "try again in 1s" in final["error"]["message"]
    await settled(lambda: not rig.engine.live)
    rig.check_rest()


async def test_prewarming(rig: Rig, client: Client) -> None:
    first = await client.create("one", says="first", tools=[WEATHER])
    before = await rig.session(first["session_id"])
    warm = await client.create(
        "two",
        says="never said",
        tools=[WEATHER],
        previous_response_id=first["id"],
        prompt_cache_options={"prewarm": True},
    )
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    assert rig.engine.submits[1].sampling.max_tokens == 1
    assert rig.engine.forked[-1][0] == rig.engine.submits[0].session
    assert await rig.session(first["session_id"]) == before
    assert rig.engine.closed == [rig.engine.submits[1].session]
    real = await client.create("two", says="second", tools=[WEATHER], previous_response_id=first["id"])
    assert real["session_id"] == first["session_id"]
    warmed = unpack_tokens(rig.engine.submits[1].tokens)
    assert unpack_tokens(rig.engine.submits[2].tokens) == warmed
    assert real["usage"]["input_tokens_details"]["cached_tokens"] == len(warmed) - 1
    after = await client.create("three", says="third", tools=[WEATHER], previous_response_id=warm["id"])
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[3].tokens) if t < 256)
    assert b"two" in prompt
    assert after["status"] == "completed"
    rig.check_rest()


async def test_prewarming_while_a_tool_runs_changes_nothing(rig: Rig, client: Client) -> None:
    first = await client.create("one", says=CALL, tools=[WEATHER])
    before = await rig.session(first["session_id"])
    assert before["state"] == "WAITING_TOOL"
    items = [result(call_of(first), "it is")]
    options = {"prewarm": True}
    events = await client.stream(
        items, says="x", tools=[WEATHER], previous_response_id=first["id"], prompt_cache_options=options
    )
    assert checked(events)["usage"]["output_tokens"] == 0
    assert await rig.session(first["session_id"]) == before
    error = await client.refused("x" * 5000, prompt_cache_options=options)
    assert error["code"] == "context_length_exceeded"


async def test_why_the_cache_did_not_serve(client: Client) -> None:
    first = await client.create("one " * 20, says="first", tools=[WEATHER])

    async def diagnosed(given: Any, **fields: Any) -> Any:
        options = {"comparison_response_id": first["id"]}
        made = await client.create(given, says="x", prompt_cache_options=options, **fields)
        return made["prompt_cache_diagnostics"], made["usage"]["input_tokens"]

    same, _ = await diagnosed("two", tools=[WEATHER], previous_response_id=first["id"])
    assert same == {"type": "cache_hit"}
    other, size = await diagnosed("one " * 19 + "two", tools=[WEATHER])
    assert (other["type"], other["reason"]) == ("cache_miss", "input_changed")
    submits = client.rig.engine.submits
    reusable = shared(unpack_tokens(submits[0].tokens), unpack_tokens(submits[2].tokens))
    assert (other["comparison_reusable_tokens"], other["cache_missed_tokens"]) == (reusable, size - reusable)
    tools, _ = await diagnosed("one " * 20)
    assert tools["reason"] == "tools_changed"
    key, _ = await diagnosed("two", tools=[WEATHER], prompt_cache_key="k")
    assert key["reason"] == "prompt_cache_key_changed"
    options = {"comparison_response_id": "resp_no"}
    made = await client.create("x", prompt_cache_options=options)
    assert made["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
