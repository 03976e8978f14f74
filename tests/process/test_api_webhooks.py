"""The unmodified openai SDK: its webhooks resource, and its verification of what comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from standardwebhooks import Webhook
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentserve.server.webhooks.making import make_hooks
from tests.api_rig import Rig, served, settled
from tests.fakes import ScriptedEngine, say
from tests.hooks_rig import ACTION, CALL, webhook_tool

pytestmark = pytest.mark.process


class Receiver:
    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.app = Starlette(routes=[Route("/hook", self.hook, methods=["POST"])])

    async def hook(self, request: Request) -> Response:
        self.got.append((dict(request.headers), await request.body()))
        action = json.loads(self.got[-1][1])["data"].get("required_action", {})
        if "arguments" not in action:
            return Response(status_code=202)
        return JSONResponse({"output": f"rain in {action['arguments']['city']}"})


@pytest.fixture
async def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(say(CALL)), hooks=make_hooks(allow_private=True))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(rig.app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


async def test_the_whole_life_of_an_endpoint(
    rig: Rig, client: openai.AsyncOpenAI, receiver: Receiver
) -> None:
    types = await client.webhooks.event_types.list()
    assert ACTION in types.data
    async with served(receiver.app) as url:
        made = await client.webhooks.create(name="tools", url=f"{url}/hook", event_types=[ACTION])
        assert made.signing_secret.startswith("whsec_")
        assert (await client.webhooks.retrieve(made.id)).name == "tools"
        changed = await client.webhooks.update(made.id, name="mine", event_types=["response.completed"])
        assert (changed.name, changed.event_types) == ("mine", ["response.completed"])
        assert [one.id async for one in client.webhooks.list()] == [made.id]
        tested = await client.webhooks.test(made.id, event_type="response.completed")
        assert tested.status_code == 202
        rotated = await client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        await client.webhooks.test(made.id, event_type=ACTION)
    (first, body), (second, _) = receiver.got
    unwrapped = client.webhooks.unwrap(body, first, secret=made.signing_secret)
    assert (unwrapped.type, unwrapped.data.id) == ("response.completed", "resp_test")
    for secret in (made.signing_secret, rotated.signing_secret):
        client.webhooks.verify_signature(receiver.got[1][1], second, secret=secret)
        Webhook(secret).verify(receiver.got[1][1], second)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body, first, secret=rotated.signing_secret)
    with pytest.raises(openai.BadRequestError, match="no connection"):
        await client.webhooks.test(made.id, event_type=ACTION)
    assert (await client.webhooks.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.webhooks.retrieve(made.id)


@pytest.mark.parametrize("payload", ["full", "thin"])
async def test_a_tool_by_webhook(
    rig: Rig, client: openai.AsyncOpenAI, receiver: Receiver, payload: str
) -> None:
    """`thin` is OpenAI's way: the receiver looks at the session and sends the result there."""
    async with served(receiver.app) as url:
        made = await client.webhooks.create(
            name="tools",
            url=f"{url}/hook",
            event_types=[ACTION, "agent.session.idle"],
            extra_body={"payload": payload},
        )
        agent: Any = {"model": "tiny", "tools": [webhook_tool(made.id)]}
        sessions = client.beta.agents.sessions
        session = await sessions.create(environment={"type": "none"}, agent=agent, input="Weather?")
        await settled(lambda: len(receiver.got) == 1)
        headers, body = receiver.got[0]
        rig.engine.reply = say("It rains.")
        event = client.webhooks.unwrap(body, headers, secret=made.signing_secret)
        assert event.type == ACTION
        assert event.data.id == session.id
        if payload == "thin":
            (action,) = (await sessions.retrieve(event.data.id)).required_actions
            assert action.type == "function_call"
            result: Any = {
                "type": "agent.session.input.tool_result",
                "turn_id": action.turn_id,
                "call_id": action.call_id,
                "success": True,
                "output": f"rain in {action.arguments['city']}",
            }
            await sessions.events.create(session.id, events=[result])
        await settled(lambda: len(receiver.got) == 2)
        assert json.loads(receiver.got[1][1])["type"] == "agent.session.idle"
        items = [item async for item in sessions.items.list(session.id, order="asc")]
        assert [item.type for item in items][1:3] == ["function_call", "function_call_output"]
        assert getattr(items[2], "output", None) == "rain in Oslo"
        await asyncio.sleep(0)
