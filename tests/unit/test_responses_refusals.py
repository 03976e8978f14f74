"""Bodies of POST /v1/responses that are refused, and those that mean less than they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import unpack_tokens
from agentserve.server.http.responses.schemas import ResponsesRequest
from tests.api_rig import Rig, user
from tests.fakes import ScriptedEngine, say
from tests.responses_rig import RESPONSES, WEATHER, Client, checked, parsed, result


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        (
            {"input": [user("x"), {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[1].content[0].type",
        ),
        ({"input": [user("x"), result({"call_id": "nobody"})]}, "input[1].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]}, "input"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]},
            "input[0].arguments",
        ),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "web_search"}, WEATHER | {"name": "a b"}]}, "tools[1].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
        ),
        ({"input": "x", "temperature": 9}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 99}, "top_logprobs"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "metadata": {"k": "v" * 600}}, "metadata"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"input": 7}, "input"),
        ({"input": "x", "model": None}, "model"),
    ],
)
async def test_refusals_name_the_place(client: Client, fields: Any, param: str) -> None:
    reply = await client.rig.post(RESPONSES, {"model": "tiny", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert reply.headers["x-should-retry"] == "false"
    assert not client.rig.engine.submits
    assert not client.rig.context.responses.shelf


async def test_what_is_not_there(client: Client) -> None:
    assert (await client.refused("x", 404, previous_response_id="resp_no"))["code"] == (
        "previous_response_not_found"
    )
    assert (await client.refused("x", 404, conversation="conv_no"))["code"] == "conversation_not_found"
    assert (await client.refused([{"type": "item_reference", "id": "msg_no"}], 404))["code"] == (
        "item_not_found"
    )
    assert (await client.refused("x", 404, model="other"))["code"] == "model_not_found"
    reply = await client.rig.post("/v1/responses/compact", {"model": "tiny", "input": "x"})
    assert reply.status_code == 404


async def test_kinds_of_items_that_mean_nothing_here_are_skipped(client: Client) -> None:
    items = [user("hi"), {"type": "web_search_call", "id": "ws_1", "status": "completed"}, user("there")]
    response = await client.create(items)
    kept = await client.get(f"{RESPONSES}/{response['id']}/input_items?order=asc")
    assert [item["type"] for item in kept["data"]] == ["message", "message"]


async def test_a_prompt_that_is_too_long(client: Client) -> None:
    rig = Rig(ScriptedEngine(say("ok"), max_model_len=200))
    client = Client(rig)
    error = await client.refused("x" * 300)
    assert error["code"] == "context_length_exceeded"
    events = await client.stream("x" * 150 + " " + "y" * 150)
    final = checked(events)
    assert (final["status"], final["error"]["code"]) == ("failed", "context_length_exceeded")
    assert not rig.engine.submits
    turns = [
        part for i in range(30) for part in (user(f"question {i}"), {"role": "assistant", "content": "a"})
    ]
    asked = [{"role": "system", "content": "rules"}, *turns, user("last")]
    assert (await client.refused(asked))["code"] == "context_length_exceeded"
    response = await client.create(asked, truncation="auto")
    assert response["status"] == "completed"
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[0].tokens) if t < 256)
    assert b"rules" in prompt
    assert b"last" in prompt
    assert b"question 0" not in prompt
    assert (await client.refused("x" * 300, truncation="auto"))["code"] == "context_length_exceeded"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = tuple(field for field in ResponsesRequest.__struct_fields__ if field not in ("model", "background"))
LIKELY = st.sampled_from(
    [
        True,
        "auto",
        "required",
        [WEATHER],
        [{"type": "namespace", "name": "n", "tools": [WEATHER]}],
        {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]},
        {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        {"effort": "low"},
        {"prewarm": True, "comparison_response_id": "x"},
        [user("x"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        ["message.output_text.logprobs"],
        5,
    ]
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | LIKELY, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_body_is_a_fault_of_ours(body: dict[str, Any], as_input: bool) -> None:
    async def run() -> None:
        rig = Rig(ScriptedEngine(say("Hello!")))
        sent = {"model": "tiny", **({"input": "hi"} if as_input else {}), **body}
        reply = await rig.post(RESPONSES, sent)
        assert reply.status_code < 500, reply.text
        if reply.status_code == 200 and body.get("stream") is True:
            checked(parsed(reply.content))
        else:
            assert reply.json()["object"] if reply.status_code == 200 else reply.json()["error"]["message"]
        rig.check_rest()
        assert not rig.context.responses.conversations.busy

    asyncio.run(run())
