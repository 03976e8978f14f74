"""Responses whose tools are MCP servers': this server lists and calls them, between model calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from agentserve.messages import unpack_tokens
from agentserve.server.http.responses.mcp_items import DENIED, UNDECIDED
from tests.api_rig import hermes
from tests.mcp_rig import server
from tests.responses_mcp_rig import (
    SUM,
    approval,
    begins_with_all_before,
    checked_mcp,
    client_of,
    kinds,
    of_kind,
    prompts,
)
from tests.responses_rig import CALL, RESPONSES, WEATHER, call_of, parsed, result, text_of

SECRET = "very-secret-key"


async def test_a_call_is_made_and_the_model_goes_on() -> None:
    client, mcp = client_of(SUM, "It is 3.")
    response = await client.create("1 + 2?", tools=[server(headers={"x-key": SECRET}), WEATHER])
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    listing, call, _ = response["output"]
    assert [tool["name"] for tool in listing["tools"]] == ["add", "sub"]
    assert {**call, "id": ""} == {
        "id": "",
        "type": "mcp_call",
        "status": "completed",
        "server_label": "calc",
        "name": "add",
        "arguments": '{"a": 1, "b": 2}',
        "output": "3",
        "error": None,
        "approval_request_id": None,
    }
    assert text_of(response) == "It is 3."
    assert mcp.calls == [("add", {"a": 1, "b": 2})]
    assert {place.headers["x-key"] for place in mcp.places} == {SECRET}
    first, second = client.rig.engine.submits
    assert response["usage"]["input_tokens"] == len(unpack_tokens(first.tokens)) + len(
        unpack_tokens(second.tokens)
    )
    assert begins_with_all_before(client)
    Response.model_validate(response)
    assert (await client.get(f"{RESPONSES}/{response['id']}"))["output"] == response["output"]
    client.rig.check_rest()


async def test_what_follows_goes_on_in_the_session_and_lists_nothing_again() -> None:
    client, mcp = client_of(SUM, "It is 3.", hermes("sub", "{}"), "It is 1.")
    first = await client.create("1 + 2?", tools=[server()])
    mcp.default = []
    second = await client.create("And?", tools=[server()], previous_response_id=first["id"])
    assert kinds(second) == ["mcp_call", "message"]
    assert first["session_id"] == second["session_id"]
    assert begins_with_all_before(client)
    assert len(mcp.places) == 3  # a listing, two calls
    client.rig.check_rest()


async def test_a_client_that_keeps_its_history_itself() -> None:
    client, mcp = client_of(SUM + hermes("sub", "{}"), "It is 3.", "Bye.")
    items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    first = await client.create(items, tools=[server()], store=False)
    items += [*first["output"], {"role": "user", "content": "Thanks."}]
    second = await client.create(items, tools=[server()], store=False)
    assert kinds(second) == ["message"]
    assert [name for name, _ in mcp.calls] == ["add", "sub"]
    assert begins_with_all_before(client)
    client.rig.check_rest()


async def test_a_conversation_has_the_items() -> None:
    client, mcp = client_of(SUM, SUM, "Six.", "Bye.")
    made = (await client.rig.post("/v1/conversations", {})).json()
    await client.create("1 + 2?", tools=[server()], conversation=made["id"])
    await client.create("Again.", tools=[server()], conversation=made["id"])
    items = (await client.get(f"/v1/conversations/{made['id']}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == [
        *("message", "mcp_list_tools", "mcp_call", "mcp_call", "message"),
        *("message", "message"),
    ]
    assert begins_with_all_before(client)
    assert len(mcp.calls) == 2


async def test_the_stream() -> None:
    client, _ = client_of("Let me see. " + SUM + hermes("sub", "{}"), "It is 3.")
    events = await client.stream("1 + 2?", tools=[server()])
    final = checked_mcp(events)
    told = [event["type"].removeprefix("response.") for event in events[:-1]]
    assert told[:6] == [
        *("created", "in_progress"),
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"),
    ]
    assert [kind for kind in told if kind.startswith("mcp_call.")] == [
        *("mcp_call.in_progress", "mcp_call.in_progress", "mcp_call.completed", "mcp_call.completed")
    ]
    assert kinds(final) == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    Response.model_validate(final)
    again = await client.rig.client.get(f"{RESPONSES}/{final['id']}?stream=true")
    assert checked_mcp(parsed(again.content))["output"] == final["output"]


@pytest.mark.parametrize("word", [True, False])
async def test_approval(word: bool) -> None:
    client, mcp = client_of(SUM, "Done.")
    given = server()
    del given["require_approval"]  # as at OpenAI: always
    first = await client.create("1 + 2?", tools=[given])
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    request = of_kind(first, "mcp_approval_request")
    assert json.loads(request["arguments"]) == {"a": 1, "b": 2}
    assert not mcp.calls
    said = [approval(request, word, reason="Too dear.")]
    events = await client.stream(said, tools=[given], previous_response_id=first["id"])
    second = checked_mcp(events)
    if word:
        assert kinds(second) == ["mcp_call", "message"]
        assert second["output"][0]["approval_request_id"] == request["id"]
        assert mcp.calls == [("add", {"a": 1, "b": 2})]
    else:
        assert kinds(second) == ["message"]
        assert f"{DENIED} Too dear." in prompts(client)[-1]
        assert not mcp.calls
    assert begins_with_all_before(client)
    assert first["session_id"] == second["session_id"]
    Response.model_validate(second)
    third = await client.create("Thanks.", tools=[given], previous_response_id=second["id"])
    assert kinds(third) == ["message"]
    assert begins_with_all_before(client)
    assert len(mcp.calls) == word
    client.rig.check_rest()


async def test_what_is_said_to_approvals_is_checked() -> None:
    client, mcp = client_of(SUM, "Done.", "Well.")
    given = server(require_approval="always")
    first = await client.create("1 + 2?", tools=[given])
    request, chain = of_kind(first, "mcp_approval_request"), {"previous_response_id": first["id"]}
    error = await client.refused([approval({"id": "mcpr_x"})], tools=[given], **chain)
    assert (error["code"], error["param"]) == ("unknown_approval_request", "input[0].approval_request_id")
    both = [approval(request), approval(request, False)]
    assert (await client.refused(both, 409, tools=[given], **chain))["code"] == "decision_conflict"
    for broken in ({"approve": "yes"}, {"approval_request_id": 3}, {"reason": []}):
        await client.refused([approval(request) | broken], tools=[given], **chain)
    # Who says nothing to it has it not made, and may still say it, to that response.
    other = await client.create("Never mind.", tools=[given], **chain)
    assert kinds(other) == ["message"]
    assert UNDECIDED in prompts(client)[-1]
    assert not mcp.calls
    await client.create([approval(request), approval(request)], tools=[given], **chain)
    assert len(mcp.calls) == 1
    client.rig.check_rest()


async def test_some_calls_are_the_clients() -> None:
    client, mcp = client_of(CALL + SUM, "Rain, and 3.")
    first = await client.create("Both?", tools=[WEATHER, server()])
    assert kinds(first) == ["mcp_list_tools", "function_call", "mcp_call"]
    assert first["output"][2]["output"] == "3"
    second = await client.create(
        [result(call_of(first))], tools=[WEATHER, server()], previous_response_id=first["id"]
    )
    assert text_of(second) == "Rain, and 3."
    prompt = prompts(client)[-1]
    assert prompt.endswith("tool\nrain\ntool\n3\nassistant\n")  # in call order
    assert begins_with_all_before(client)
    assert len(mcp.calls) == 1
    client.rig.check_rest()


async def test_a_call_behind_one_that_was_refused_is_another_reply() -> None:
    """Also where its client sends all items in one input."""
    client, _ = client_of(SUM, hermes("sub", "{}"), "I see.")
    given = server(require_approval={"always": {"tool_names": ["add"]}})
    items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    first = await client.create(items, tools=[given], store=False)
    items += [*first["output"], approval(of_kind(first, "mcp_approval_request"), approve=False)]
    second = await client.create(items, tools=[given], store=False)
    assert kinds(second) == ["mcp_call", "message"]
    items += [*second["output"], {"role": "user", "content": "Thanks."}]
    await client.create(items, tools=[given], store=False)
    assert begins_with_all_before(client)
