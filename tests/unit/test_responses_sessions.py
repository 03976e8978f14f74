"""Whose session a response is: chains, whole histories, references, other dialects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, result, text_of


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


async def test_a_tool_round_trip_stays_in_its_session(client: Client) -> None:
    first = await client.create("Weather?", says="Let me see. " + CALL, tools=[WEATHER])
    call = call_of(first)
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo"}')
    second = await client.create(
        [result(call)], says="It rains.", tools=[WEATHER], previous_response_id=first["id"]
    )
    assert text_of(second) == "It rains."
    assert second["previous_response_id"] == first["id"]
    one, two = (unpack_tokens(submit.tokens) for submit in client.rig.engine.submits)
    assert two[: len(one)] == one
    assert len({submit.session for submit in client.rig.engine.submits}) == 1
    assert second["session_id"] == first["session_id"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > len(one)


async def test_a_whole_history_goes_on_in_its_session_too(client: Client) -> None:
    """As agents send it that keep their own state: easy messages, items without ids, outputs as parts."""
    history: list[Any] = [user("Weather?")]
    first = await client.create(history, says="Hm. " + CALL, tools=[WEATHER], store=False)
    history += [{k: v for k, v in item.items() if k not in ("id", "status")} for item in first["output"]]
    history.append(result(call_of(first), [{"type": "input_text", "text": "rain"}]))
    second = await client.create(history, says="It rains.", tools=[WEATHER], store=False)
    assert second["session_id"] == first["session_id"]
    history += second["output"] + [user("Thanks.")]
    third = await client.create(history, says="Welcome.", tools=[WEATHER], store=False)
    assert third["session_id"] == first["session_id"]
    assert [submit.turn for submit in client.rig.engine.submits] == [1, 2, 3]


async def test_text_after_a_call_comes_back_as_it_was_said(client: Client) -> None:
    first = await client.create("x", says="a " + CALL + " b " + CALL, tools=[WEATHER])
    kinds = [item["type"] for item in first["output"]]
    assert kinds[:2] == ["message", "function_call"]
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    second = await client.create([*map(result, calls)], tools=[WEATHER], previous_response_id=first["id"])
    assert second["session_id"] == first["session_id"]
    assert client.rig.engine.submits[1].turn == 2


async def test_a_chain_has_everything_before_it(client: Client) -> None:
    first = await client.create("one", says="first", instructions="Be brief.")
    second = await client.create("two", says="second", previous_response_id=first["id"])
    third = await client.create(
        "three", says="third", previous_response_id=second["id"], instructions="Be long."
    )
    prompt = bytes(t for t in unpack_tokens(client.rig.engine.submits[2].tokens) if t < 256).decode()
    assert [prompt.index(word) for word in ("Be long.", "one", "first", "two", "second", "three")] == sorted(
        prompt.index(word) for word in ("Be long.", "one", "first", "two", "second", "three")
    )
    assert "Be brief." not in prompt
    assert third["instructions"] == "Be long."


async def test_a_chain_whose_session_is_gone_is_computed_again(client: Client) -> None:
    first = await client.create("one", says="first")
    deleted = await client.rig.client.delete(f"/agentserve/sessions/{first['session_id']}")
    assert deleted.status_code == 200
    second = await client.create("two", says="second", previous_response_id=first["id"])
    assert text_of(second) == "second"
    assert second["session_id"] != first["session_id"]


async def test_a_chain_that_branches(client: Client) -> None:
    first = await client.create("one", says="first")
    left = await client.create("left", says="l", previous_response_id=first["id"])
    right = await client.create("right", says="r", previous_response_id=first["id"])
    assert left["session_id"] == first["session_id"]
    assert right["session_id"] != first["session_id"]
    assert right["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_a_call_that_was_cut_can_be_gone_on_from(client: Client) -> None:
    first = await client.create("x", says=CALL, tools=[WEATHER], max_output_tokens=len(CALL) - 18)
    call = call_of(first)
    assert (first["status"], call["status"]) == ("incomplete", "incomplete")
    with pytest.raises(ValueError):
        json.loads(call["arguments"])
    second = await client.create("go on", says="ok", tools=[WEATHER], previous_response_id=first["id"])
    assert second["session_id"] == first["session_id"]
    await client.rig.client.delete(f"/agentserve/sessions/{first['session_id']}")
    third = await client.create("go on", says="ok", tools=[WEATHER], previous_response_id=first["id"])
    assert text_of(third) == "ok"
    prompt = bytes(t for t in unpack_tokens(client.rig.engine.submits[-1].tokens) if t < 256)
    assert CALL[: len(CALL) - 20].encode() in prompt


async def test_references_stand_for_items_of_other_responses(client: Client) -> None:
    first = await client.create("one", says="first")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    await client.create([user("one"), reference, user("two")], says="second")
    submits = client.rig.engine.submits
    assert submits[0].session == submits[1].session
    again = await client.create([reference, user("two")], says="x", previous_response_id=first["id"])
    prompt = bytes(t for t in unpack_tokens(submits[2].tokens) if t < 256)
    assert prompt.count(b"first") == 1
    assert again["status"] == "completed"


async def test_a_session_goes_from_one_dialect_to_the_other(client: Client) -> None:
    chat_tool = {
        "type": "function",
        "function": {k: WEATHER[k] for k in ("name", "description", "parameters")},
    }
    client.rig.engine.reply = say("Hm. " + CALL)
    first = await client.rig.chat([user("Weather?")], tools=[chat_tool])
    [call] = first["choices"][0]["message"]["tool_calls"]
    items = [
        user("Weather?"),
        {"role": "assistant", "content": "Hm."},
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": "weather",
            "arguments": call["function"]["arguments"],
        },
        {"type": "function_call_output", "call_id": call["id"], "output": "rain"},
    ]
    second = await client.create(items, says="It rains.", tools=[WEATHER])
    assert second["session_id"] == first["session_id"]
    history = [
        user("Weather?"),
        first["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        user("Thanks."),
    ]
    third = await client.rig.chat(history, tools=[chat_tool])
    assert third["session_id"] == first["session_id"]
    # And by the session's own route, after a call that a response made.
    fourth = await client.create(
        [*items, {"role": "assistant", "content": "It rains."}, user("Thanks."), user("And now?")],
        says=CALL,
        tools=[WEATHER],
    )
    path = f"/agentserve/sessions/{fourth['session_id']}/tool_results"
    client.rig.engine.reply = say("Sun.")
    body = {"call_id": call_of(fourth)["call_id"], "content": "sun"}
    reply = (await client.rig.post(path, body)).json()
    assert reply["choices"][0]["message"]["content"] == "Sun."


async def test_a_session_named_in_a_header_counts_more_than_the_one_gone_on_from(client: Client) -> None:
    first = await client.create("hi", says="Hello!")
    body = {"model": "tiny", "input": "more", "previous_response_id": first["id"]}
    second = await client.rig.post(RESPONSES, body, {"x-session-id": "sub-2"})
    assert second.headers["x-session-id"] == "sub-2"
    third = await client.rig.post(RESPONSES, body)
    assert third.headers["x-session-id"] == first["session_id"]
