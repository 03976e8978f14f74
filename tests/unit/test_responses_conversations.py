"""Conversations: they grow with their responses, one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.http.responses.desk import Desk, DeskBounds
from tests.api_rig import Rig, settled, user
from tests.fakes import ScriptedEngine, say
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, result


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


CONVERSATIONS = "/v1/conversations"


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


async def test_a_conversation_that_is_full_takes_no_more() -> None:
    client = Client(
        Rig(ScriptedEngine(say("Hello!")), responses=Desk(bounds=DeskBounds(conversations_bytes=80_000)))
    )
    made = await conversation(client, items=[user("x" * 20_000)])
    other = await conversation(client)
    error = await client.refused("more", 413, conversation=made["id"])
    assert error["code"] == "conversation_full"
    path = f"{CONVERSATIONS}/{made['id']}"
    assert (await client.rig.post(f"{path}/items", {"items": [user("y")]})).status_code == 413
    assert len((await client.get(f"{path}/items"))["data"]) == 1
    assert (await client.create("hi", conversation=other["id"]))["status"] == "completed"


async def test_an_item_is_in_a_conversation_once(rig: Rig, client: Client) -> None:
    made = await conversation(client, items=[user("a") | {"id": "msg_a"}])
    path = f"{CONVERSATIONS}/{made['id']}/items"
    for given in ([user("x") | {"id": "msg_a"}], [user("x") | {"id": "msg_b"}, user("y") | {"id": "msg_b"}]):
        error = await client.refused(given, conversation=made["id"])
        assert (error["code"], error["param"]) == ("duplicate_item", f"input[{len(given) - 1}].id")
    assert (rig.engine.submits, len((await client.get(path))["data"])) == ([], 1)
    other = await client.create([user("z") | {"id": "msg_z"}])
    [ours] = [item["id"] for item in other["output"]]
    references = [{"type": "item_reference", "id": id_} for id_ in ("msg_a", ours, ours)]
    await client.create([*references, user("b")], conversation=made["id"])
    texts = [item["content"][0]["text"] for item in (await client.get(f"{path}?order=asc"))["data"]]
    assert texts == ["a", "Hello!", "b", "Hello!"]
    again = [user("z") | {"id": "msg_z"}]  # of a chain it may be said again
    assert (await client.create(again, previous_response_id=other["id"]))["status"] == "completed"
    assert not rig.context.responses.conversations.busy


async def test_a_prompt_that_is_only_computed_adds_nothing(client: Client) -> None:
    made = await conversation(client, items=[user("a")])
    await client.create("b", conversation=made["id"], prompt_cache_options={"prewarm": True})
    assert len((await client.get(f"{CONVERSATIONS}/{made['id']}/items"))["data"]) == 1


async def test_all_items_that_were_added_are_told(client: Client) -> None:
    made = await conversation(client)
    items = [user(str(n)) for n in range(120)]
    added = (await client.rig.post(f"{CONVERSATIONS}/{made['id']}/items", {"items": items})).json()
    assert [item["content"][0]["text"] for item in added["data"]] == [str(n) for n in range(120)]
    assert (added["has_more"], added["last_id"]) == (False, added["data"][-1]["id"])
