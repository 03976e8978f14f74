"""/openapi.json says what the routes are and what they take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from agentserve.server.http import openapi_replies
from agentserve.server.http.agents import openapi_replies as agents
from agentserve.server.http.anthropic.schemas import CountRequest, MessagesRequest
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.schemas import ChatRequest, CompletionRequest
from agentserve.types import FinishReason
from tests import agents_rig
from tests.api_rig import TOOLS, Rig, hermes, settled, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import CALL, COUNT, MESSAGES, TOOL
from tests.responses_rig import RESPONSES, Client

BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


async def shown(rig: Rig) -> Any:
    reply = await rig.client.get("/openapi.json")
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_every_route_is_in_it() -> None:
    rig = Rig(aliases=("small",))
    document = await shown(rig)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in rig.app.routes
        if isinstance(route, Route) and route.path != "/openapi.json"
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == routes
    ids = [said["operationId"] for methods in document["paths"].values() for said in methods.values()]
    assert len(set(ids)) == len(ids)
    assert document["openapi"] == "3.1.0"
    summaries = [said["summary"] for methods in document["paths"].values() for said in methods.values()]
    assert all(summary.endswith(".") for summary in summaries)


async def test_what_is_not_there_and_what_a_query_takes() -> None:
    document = await shown(Rig())
    assert "200" not in document["paths"]["/v1/responses/compact"]["post"]["responses"]
    taken = document["paths"]["/v1/responses/{id}"]["get"]["parameters"]
    assert [one["name"] for one in taken if one["in"] == "query"] == ["stream", "starting_after"]


async def test_bodies_are_those_that_are_decoded() -> None:
    rig = Rig(aliases=("small",))
    document = await shown(rig)
    for path, kind in BODIES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
        assert set(schema["properties"]) == set(kind.__struct_fields__)
        assert schema["properties"]["model"] == {"enum": ["tiny", "small"]}
        streams = "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]
        assert streams == (path in STREAMED)


@pytest.mark.parametrize("text", ["Hello!", hermes("weather", '{"city": "Oslo"}')])
async def test_replies_are_what_it_says(text: str) -> None:
    rig = Rig(ScriptedEngine(say(text)))
    msgspec.convert(await rig.chat([user("a")], tools=TOOLS), openapi_replies.ChatReply, strict=True)
    reply = await rig.post("/v1/completions", {"prompt": "a"})
    msgspec.convert(reply.json(), openapi_replies.CompletionReply, strict=True)
    listed = (await rig.client.get("/v1/models")).json()
    msgspec.convert(listed, openapi_replies.ModelList, strict=True)
    counted = (await rig.post("/tokenize", {"prompt": "a"})).json()
    msgspec.convert(counted, openapi_replies.TokensReply, strict=True)
    refused = (await rig.post("/v1/chat/completions", {})).json()
    msgspec.convert(refused, openapi_replies.ErrorReply, strict=True)


@pytest.mark.parametrize("text", ["Hello!", CALL, "<think>\nHm.\n</think>\nHello!"])
async def test_messages_are_what_it_says(text: str) -> None:
    rig = Rig(ScriptedEngine(say(text)))
    body = {"max_tokens": 99, "messages": [user("a")], "tools": [TOOL]}
    told = (await rig.post(MESSAGES, body)).json()
    msgspec.convert(told, openapi_replies.MessageReply, strict=True)
    assert set(told) == set(openapi_replies.MessageReply.__struct_fields__)
    assert set(told["usage"]) == set(openapi_replies.MessageUsage.__struct_fields__)
    warmed = (await rig.post(MESSAGES, body | {"max_tokens": 0})).json()
    msgspec.convert(warmed, openapi_replies.MessageReply, strict=True)
    counted = (await rig.post(COUNT, body)).json()
    msgspec.convert(counted, openapi_replies.MessageTokens, strict=True)
    refused = (await rig.post(MESSAGES, {})).json()
    msgspec.convert(refused, openapi_replies.MessagesErrorReply, strict=True)


@pytest.mark.parametrize("fields", [{}, {"background": True}, {"max_output_tokens": 2}, {"reasoning": {}}])
async def test_responses_are_what_it_says(fields: Any) -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    client = Client(rig)
    made = await client.create("a", instructions="Be brief.", metadata={"k": "v"}, **fields)
    await settled(lambda: not rig.engine.live and not len(rig.context.background))
    path = f"{RESPONSES}/{made['id']}"
    cancelled = (await rig.client.post(f"{path}/cancel")).json()
    for told in (made, await client.get(path), cancelled):
        if "error" in told and "id" not in told:  # only background responses can be cancelled
            msgspec.convert(told, openapi_replies.ErrorReply, strict=True)
            continue
        msgspec.convert(told, openapi_replies.ResponseReply, strict=True)
        assert set(told) == set(openapi_replies.ResponseReply.__struct_fields__)
    msgspec.convert(await client.get(f"{path}/input_items"), openapi_replies.ItemList, strict=True)
    counted = (await rig.post(f"{RESPONSES}/input_tokens", {"model": "tiny", "input": "a"})).json()
    msgspec.convert(counted, openapi_replies.InputTokensReply, strict=True)
    deleted = (await rig.client.delete(path)).json()
    msgspec.convert(deleted, openapi_replies.DeletedReply, strict=True)


async def test_a_response_that_failed_is_what_it_says() -> None:
    client = Client(Rig(ScriptedEngine(say("x", reason=FinishReason.ERROR, error="broken"))))
    *_, last, _ = await client.stream("a")
    msgspec.convert(last["response"], openapi_replies.ResponseReply, strict=True)
    assert last["response"]["error"]["code"] == "server_error"


async def test_conversations_are_what_it_says() -> None:
    client = Client(Rig())
    made = (await client.rig.post("/v1/conversations", {"items": [user("a")], "metadata": {"k": "v"}})).json()
    path = f"/v1/conversations/{made['id']}"
    added = (await client.rig.post(f"{path}/items", {"items": [user("b")]})).json()
    msgspec.convert(added, openapi_replies.ItemList, strict=True)
    msgspec.convert(await client.get(f"{path}/items"), openapi_replies.ItemList, strict=True)
    fewer = (await client.rig.client.delete(f"{path}/items/{added['data'][0]['id']}")).json()
    changed = (await client.rig.post(path, {"metadata": {}})).json()
    for told in (made, await client.get(path), fewer, changed):
        msgspec.convert(told, openapi_replies.ConversationReply, strict=True)
    deleted = (await client.rig.client.delete(path)).json()
    msgspec.convert(deleted, openapi_replies.DeletedReply, strict=True)


async def test_agents_are_what_it_says() -> None:
    rig = Rig()
    agent = await agents_rig.created(rig, agents_rig.CALL, agent={"temperature": 0}, input="Hi")
    await agent.until("requires_action")
    msgspec.convert(await agent.get(), agents.SessionReply, strict=True)
    (turn,) = (await agent.get("/turns"))["data"]
    msgspec.convert(await agent.get(f"/turns/{turn['id']}"), agents.TurnReply, strict=True)
    saved = (await rig.post("/v1/agents", {"model": "tiny"})).json()
    msgspec.convert(saved, agents.AgentReply, strict=True)
    for path in ("/items", "/turns", f"/turns/{turn['id']}/items"):
        msgspec.convert(await agent.get(path), openapi_replies.ItemList, strict=True)
    for path in ("/v1/agents", agents_rig.SESSIONS):
        msgspec.convert((await rig.client.get(path)).json(), openapi_replies.ItemList, strict=True)
    for path in (f"/v1/agents/{saved['id']}", agent.path):
        msgspec.convert((await rig.client.delete(path)).json(), openapi_replies.DeletedReply, strict=True)


async def test_every_dialect_says_what_its_replies_are() -> None:
    document = await shown(Rig())
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            unsaid = ("/compact", "/items/{item}", "/events", "/tool_callbacks/{token}")
            if not path.startswith("/v1/") or path.endswith(unsaid):
                continue
            schema = said["responses"]["200"]["content"]["application/json"]["schema"]
            assert "$ref" in schema, (method, path)
