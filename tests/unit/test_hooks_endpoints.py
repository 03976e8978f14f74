"""/v1/webhook_endpoints: where events go, what was delivered, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from agentserve.server.http import openapi_replies as common
from agentserve.server.http.webhooks import openapi_replies
from agentserve.server.webhooks.payloads import EVENT_TYPES
from agentserve.types import FinishReason
from tests.agents_rig import CALL as AGENT_CALL
from tests.agents_rig import created
from tests.api_rig import settled
from tests.fakes import say
from tests.hooks_rig import ACTION, ENDPOINTS, LATER, URL, HooksRig, result
from tests.responses_rig import Client
from tools_bridge.webhooks.replies import Answered, Failed, Fault
from tools_bridge.webhooks.signing import verify


@pytest.fixture
async def desk() -> AsyncIterator[HooksRig]:
    made = HooksRig()
    yield made
    await made.close()


def kinds(desk: HooksRig) -> list[str]:
    return [json.loads(post.body)["type"] for post in desk.sender.posts]


async def get(desk: HooksRig, path: str, status: int = 200) -> Any:
    reply = await desk.rig.client.get(path)
    assert reply.status_code == status, reply.text
    return reply.json()


async def post(desk: HooksRig, path: str, body: Any = None, status: int = 200) -> Any:
    reply = await desk.rig.post(path, {} if body is None else body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_replies_are_what_the_document_says(desk: HooksRig) -> None:
    made = await post(desk, ENDPOINTS, {"name": "a", "url": URL, "event_types": ["response.completed"]})
    msgspec.convert(made, openapi_replies.WebhookSecretReply, strict=True)
    assert set(made) == set(openapi_replies.WebhookSecretReply.__struct_fields__)
    assert made["signing_secret"][-4:].rstrip("=") in made["signing_secret_hint"]
    path = f"{ENDPOINTS}/{made['id']}"
    desk.secrets[made["id"]] = made["signing_secret"]
    shown = await get(desk, path)
    assert shown == {name: value for name, value in made.items() if name != "signing_secret"}
    changed = await post(desk, path, {"name": "b", "payload": "full", "event_types": [ACTION]})
    assert (changed["name"], changed["payload"], changed["url"]) == ("b", "full", URL)
    for told in (shown, changed, await post(desk, f"{path}/disable"), await post(desk, f"{path}/enable")):
        msgspec.convert(told, openapi_replies.WebhookEndpointReply, strict=True)
        assert set(told) == set(openapi_replies.WebhookEndpointReply.__struct_fields__)
    rotated = await post(desk, f"{path}/rotate_secret", {"keep_old_secret_active_for_24_hours": True})
    msgspec.convert(rotated, openapi_replies.WebhookSecretReply, strict=True)
    assert rotated["signing_secret"] != made["signing_secret"]
    tried = await post(desk, f"{path}/test", {"event_type": ACTION})
    assert tried == {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": made["id"],
        "event_type": ACTION,
        "success": True,
        "status_code": 200,
    }
    msgspec.convert(tried, openapi_replies.WebhookTestReply, strict=True)
    (sent,) = desk.sender.posts
    for secret in (made["signing_secret"], rotated["signing_secret"]):
        verify([secret], sent.headers, sent.body, desk.clock.unix())
    listed = await get(desk, ENDPOINTS)
    msgspec.convert(listed, openapi_replies.WebhookEndpointList, strict=True)
    kinds = await get(desk, "/v1/webhook_event_types")
    assert kinds == {"object": "list", "data": list(EVENT_TYPES)}
    msgspec.convert(kinds, openapi_replies.WebhookEventTypes, strict=True)
    msgspec.convert((await desk.rig.client.delete(path)).json(), common.DeletedReply, strict=True)
    assert (await get(desk, path, 404))["error"]["code"] == "webhook_endpoint_not_found"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"url": "http://tools.example/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://10.0.0.1/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://127.0.0.1/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://localhost/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://169.254.169.254/latest/meta-data"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://[::1]/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "https://0x7f000001/x"}, None, "invalid_webhook_endpoint"),
        ({"url": "file:///etc/passwd"}, None, "invalid_webhook_endpoint"),
        ({"event_types": []}, None, "invalid_webhook_endpoint"),
        ({"event_types": ["batch.completed"]}, "event_types", "invalid_value"),
        ({"name": "x" * 300}, None, "invalid_webhook_endpoint"),
        ({"name": 5}, "name", None),
        ({"payload": "fat"}, "payload", None),
    ],
)
async def test_what_is_refused(desk: HooksRig, fields: Any, param: str | None, code: str | None) -> None:
    body = {"name": "a", "url": URL, "event_types": [ACTION], **fields}
    error = (await post(desk, ENDPOINTS, body, 400))["error"]
    assert code in (None, error["code"])
    assert param in (None, error["param"])
    endpoint = await desk.endpoint()
    before = await get(desk, f"{ENDPOINTS}/{endpoint}")
    await post(desk, f"{ENDPOINTS}/{endpoint}", fields, 400)
    assert await get(desk, f"{ENDPOINTS}/{endpoint}") == before
    assert not desk.sender.posts


@pytest.mark.parametrize(
    "path", ["", "/rotate_secret", "/test", "/disable", "/enable", "/deliveries/x/replay"]
)
async def test_unknown_endpoints(desk: HooksRig, path: str) -> None:
    await post(desk, f"{ENDPOINTS}/we_none{path}", {"event_type": ACTION}, 404)
    endpoint = await desk.endpoint()
    unknown = await get(desk, f"{ENDPOINTS}/{endpoint}/deliveries/evt_none", 404)
    assert unknown["error"]["code"] == "webhook_delivery_not_found"


async def test_pages(desk: HooksRig) -> None:
    ids = []
    for _ in range(3):
        ids.append(await desk.endpoint())
        await desk.clock.pass_by(1)
    first = await get(desk, f"{ENDPOINTS}?limit=2")
    assert [one["id"] for one in first["data"]] == ids[:0:-1]
    assert first["has_more"]
    rest = await get(desk, f"{ENDPOINTS}?after={ids[1]}")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[:1], False)


async def test_a_test_that_nobody_answers(desk: HooksRig) -> None:
    endpoint = await desk.endpoint()
    desk.sender.answer(URL, Failed(Fault.REFUSED, "it is at a private address"), Answered(500))
    path = f"{ENDPOINTS}/{endpoint}/test"
    error = (await post(desk, path, {"event_type": ACTION}, 400))["error"]
    assert (error["code"], "private" in error["message"]) == ("webhook_test_failed", True)
    assert (await post(desk, path, {"event_type": ACTION}))["status_code"] == 500
    await post(desk, path, {"event_type": "nothing"}, 400)


async def test_the_log_and_a_replay(desk: HooksRig) -> None:
    endpoint = await desk.endpoint()
    path = f"{ENDPOINTS}/{endpoint}/deliveries"
    desk.sender.answer(URL, Answered(500), LATER)
    agent = await desk.agent(endpoint, timeout=60)
    await desk.sent()
    (pending,) = (await get(desk, path))["data"]
    assert (pending["status"], pending["tries"], pending["reason"]) == ("pending", 1, None)
    assert (await post(desk, f"{path}/{pending['id']}/replay", None, 409))["error"]["code"] == (
        "webhook_delivery_pending"
    )
    await desk.clock.pass_by(2)
    await settled(lambda: not desk.hooks.ledger.unacknowledged())
    listed = await get(desk, path)
    msgspec.convert(listed, openapi_replies.WebhookDeliveryList, strict=True)
    (entry,) = listed["data"]
    assert await get(desk, f"{path}/{entry['id']}") == entry
    assert set(entry) == set(openapi_replies.WebhookDeliveryReply.__struct_fields__)
    assert (entry["status"], entry["tries"]) == ("delivered", 2)
    assert [attempt["status_code"] for attempt in entry["attempts"]] == [500, 202]
    desk.sender.answer(URL, result("sun"))
    again = await post(desk, f"{path}/{entry['id']}/replay")
    assert (again["status"], again["replays"]) == ("pending", 1)
    await settled(lambda: not desk.hooks.ledger.pending())
    assert len(set(desk.sender.ids())) == 1
    assert (await agent.get())["status"] == "requires_action"  # nobody heard what the replay answered


async def test_sessions_are_told_of(desk: HooksRig) -> None:
    endpoint = await desk.endpoint(types=EVENT_TYPES)
    other = await desk.endpoint("https://other.example/x", types=("agent.session.idle",))
    desk.sender.answer(URL, *[Answered(200)] * 9)
    agent = await desk.agent(endpoint, "Hello.")
    await agent.until("idle")
    await settled(lambda: len(desk.sender.posts) == 4)
    bodies = await desk.sent(4)
    told = sorted((event["type"], post.url) for event, post in zip(bodies, desk.sender.posts, strict=True))
    assert told == [
        ("agent.session.created", URL),
        ("agent.session.idle", "https://other.example/x"),
        ("agent.session.idle", URL),
        ("agent.session.in_progress", URL),
    ]
    assert all(event["data"] == {"id": agent.id, "environment_type": "none"} for event in bodies)
    await settled(lambda: not desk.hooks.ledger.pending())
    assert (await get(desk, f"{ENDPOINTS}/{other}/deliveries"))["data"][0]["kind"] == "lifecycle"


async def test_a_call_that_the_client_runs(desk: HooksRig) -> None:
    """OpenAI's own way: an event says that the session wants something."""
    await desk.endpoint(types=(ACTION,))
    agent = await created(desk.rig, AGENT_CALL, input="a")
    (action,) = (await agent.until("requires_action"))["required_actions"]
    (event,) = await desk.sent()
    assert (event["type"], event["data"]["id"]) == (ACTION, agent.id)
    desk.rig.engine.reply = say("It rains.")
    await agent.give(action)
    await agent.until("idle")


async def test_a_turn_that_fails(desk: HooksRig) -> None:
    await desk.endpoint(types=("agent.session.failed",))
    agent = await created(desk.rig, say("x", reason=FinishReason.ERROR, error="broken"), input="a")
    await agent.until("idle")
    (event,) = await desk.sent()
    assert event["data"]["id"] == agent.id


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, "response.completed"), ({"max_output_tokens": 2}, "response.incomplete")],
)
async def test_background_responses_are_told_of(desk: HooksRig, fields: Any, kind: str) -> None:
    await desk.endpoint(types=EVENT_TYPES)
    client = Client(desk.rig)
    desk.rig.engine.reply = say("Hello from here!")
    await client.create("a", **fields)  # nobody is told of one that its client waits for
    made = await client.create("a", background=True, **fields)
    (event,) = await desk.sent()
    assert (event["type"], event["data"]) == (kind, {"id": made["id"]})
    await settled(lambda: not len(desk.rig.context.background))
    assert len(desk.sender.posts) == 1


async def test_health_and_metrics(desk: HooksRig) -> None:
    desk.sender.answer(URL, result("rain"))
    await desk.outcome(await desk.agent(await desk.endpoint()))
    assert (await get(desk, "/health"))["webhooks"] == {"state": "ok", "endpoints": 1, "owed": 0}
    text = (await desk.rig.client.get("/metrics")).text
    for line in ("endpoints 1.0", "calls 1.0", "calls_taken 1.0", "deliveries_pending 0.0", "callbacks 0.0"):
        assert f"agentserve_webhook_{line}\n" in text
