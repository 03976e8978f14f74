"""/openapi.json says what the routes are and what they take."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.routing import Route

from agentserve.server.http import replies
from agentserve.server.http.anthropic.schemas import CountRequest, MessagesRequest
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.server.http.schemas import ChatRequest, CompletionRequest
from tests.api_rig import TOOLS, Rig, hermes, user
from tests.fakes import ScriptedEngine, say

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
    msgspec.convert(await rig.chat([user("a")], tools=TOOLS), replies.ChatReply, strict=True)
    reply = await rig.post("/v1/completions", {"prompt": "a"})
    msgspec.convert(reply.json(), replies.CompletionReply, strict=True)
    listed = (await rig.client.get("/v1/models")).json()
    msgspec.convert(listed, replies.ModelList, strict=True)
    counted = (await rig.post("/tokenize", {"prompt": "a"})).json()
    msgspec.convert(counted, replies.TokensReply, strict=True)
    refused = (await rig.post("/v1/chat/completions", {})).json()
    msgspec.convert(refused, replies.ErrorReply, strict=True)
