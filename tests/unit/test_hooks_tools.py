"""Tools of agents that are webhooks: each call has one result or a defined error, whatever receivers do."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentserve.server.webhooks.making import make_hooks
from tests.agents_rig import CANCEL, Agent, body, check_events
from tests.agents_rig import result as tool_result
from tests.api_rig import settled
from tests.fakes import say
from tests.hooks_rig import ACTION, CALL, ENDPOINTS, LATER, URL, HooksRig, result, webhook_tool
from tests.webhook_rig import VirtualTime, settle
from tools_bridge.webhooks.address import AddressPolicy
from tools_bridge.webhooks.attempt import HttpSender
from tools_bridge.webhooks.replies import Answered, Failed, Fault
from tools_bridge.webhooks.types import State


@pytest.fixture
async def desk() -> AsyncIterator[HooksRig]:
    made = HooksRig()
    yield made
    await made.close()


def nothing_owed(desk: HooksRig) -> bool:
    ledger = desk.hooks.ledger
    ledger.check()
    return not ledger.pending() and not ledger.unacknowledged()


async def waiting_for_callback(desk: HooksRig, **tool: Any) -> tuple[Any, str]:
    desk.sender.answer(URL, LATER)
    agent = await desk.agent(await desk.endpoint(payload="full"), **tool)
    (event,) = await desk.sent()
    await settled(lambda: nothing_owed(desk))
    return agent, event["data"]["required_action"]["callback_url"]


async def test_a_reply_that_has_the_result(desk: HooksRig) -> None:
    desk.sender.answer(URL, result("rain"))
    agent = await desk.agent(await desk.endpoint())
    assert await desk.outcome(agent) == "rain"
    assert "rain" in agent.prompt()
    (event,) = await desk.sent()
    assert event.pop("id").startswith("evt_")
    assert event == {
        "object": "event",
        "type": ACTION,
        "created_at": int(desk.clock.now()),
        "data": {"id": agent.id, "required_action": {"type": "function_call"}},
    }
    await settled(lambda: nothing_owed(desk))
    check_events(agent.events())
    desk.rig.check_rest()


async def test_a_full_payload_and_a_result_that_comes_later(desk: HooksRig) -> None:
    agent, url = await waiting_for_callback(desk, timeout=60)
    session = await agent.until("requires_action")
    (action,) = session["required_actions"]
    (event,) = await desk.sent()
    told = event["data"]["required_action"]
    assert event["data"]["id"] == agent.id
    assert told.pop("expires_at") == int(desk.clock.now()) + 60
    assert told.pop("callback_url") == url
    assert told == action
    assert url.startswith("https://agents.example/v1/tool_callbacks/")
    assert await desk.callback(url, {"output": "rain"}) == (202, None)
    assert await desk.outcome(agent) == "rain"
    assert await desk.callback(url, {"output": "rain"}) == (202, None)  # it is a receipt again
    assert await desk.callback(url, {"output": "sun"}) == (409, "result_conflict")
    assert len([item for item in await agent.items() if item["type"] == "function_call_output"]) == 1
    assert len(desk.rig.engine.submits) == 2
    assert (desk.hooks.counts["callbacks"], desk.hooks.counts["refused"]) == (2, 1)


async def test_a_callback_needs_no_key_but_its_token() -> None:
    desk = HooksRig(api_keys=("secret",))
    desk.rig.client.headers["authorization"] = "Bearer secret"
    agent, url = await waiting_for_callback(desk)
    del desk.rig.client.headers["authorization"]
    assert await desk.callback(url + "x", {"output": "rain"}) == (404, "callback_not_found")
    assert (await desk.rig.client.get(ENDPOINTS)).status_code == 401
    assert await desk.callback(url, {"output": "rain"}, host="agents.example") == (202, None)
    desk.rig.client.headers["authorization"] = "Bearer secret"
    assert await desk.outcome(agent) == "rain"
    await desk.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", (400, "invalid_value")),
        (b"{", (400, "invalid_value")),
        (b"[]", (400, "invalid_value")),
        ({}, (400, "invalid_value")),
        ({"success": "yes"}, (400, "invalid_value")),
        (b"[" * 1000, (400, "json_too_deep")),
        (b'{"output": "' + b"x" * (1 << 20) + b'"}', (413, "request_too_large")),
        ({"output": "x" * 100_000}, (400, "context_length_exceeded")),
    ],
)
async def test_what_is_no_result_changes_nothing(desk: HooksRig, content: Any, told: Any) -> None:
    agent, url = await waiting_for_callback(desk)
    assert await desk.callback(url, content) == told
    assert await desk.callback(url, {"success": False, "error": "no city"}) == (202, None)
    assert await desk.outcome(agent) == "no city"


async def test_forged_tokens(desk: HooksRig) -> None:
    agent, url = await waiting_for_callback(desk)
    said, _, mac = url.rpartition("/")[2].partition(".")
    for token in (said, f"{said}.", f".{mac}", f"{said}.{mac[:-1]}", f"{said}A.{mac}", "x" * 3000, "%00"):
        status, code = await desk.callback(f"/v1/tool_callbacks/{token}", {"output": "sun"})
        assert (status, code) == (404, "callback_not_found"), token
    assert (await agent.get())["status"] == "requires_action"


async def test_a_late_result_is_refused(desk: HooksRig) -> None:
    agent, url = await waiting_for_callback(desk, timeout=5)
    await desk.clock.pass_by(6)
    assert await desk.outcome(agent) == "The tool did not answer within 5 s."
    assert await desk.callback(url, {"output": "rain"}) == (410, "call_over")


@pytest.mark.parametrize("gone", [False, True])
async def test_nobody_waits_after_a_cancel(desk: HooksRig, gone: bool) -> None:
    agent, url = await waiting_for_callback(desk)
    await agent.send(CANCEL)
    if gone:
        await desk.rig.client.delete(agent.path)
    assert await desk.callback(url, {"output": "rain"}) == (410, "call_over")
    desk.rig.check_rest()


async def test_a_cancel_withdraws_what_is_being_delivered(desk: HooksRig) -> None:
    desk.sender.hold(URL)
    agent = await desk.agent(await desk.endpoint())
    await desk.sent()
    await agent.send(CANCEL)
    await settled(lambda: nothing_owed(desk) and not desk.sender.running)
    assert desk.hooks.counts["withdrawn"] == 1
    check_events(agent.events())
    await agent.say("And now?", says="Nothing.")
    await agent.until("idle")


async def test_a_result_of_the_client_withdraws_too(desk: HooksRig) -> None:
    """As those do that OpenAI's webhooks ask to look at the session."""
    desk.sender.hold(URL)
    agent = await desk.agent(await desk.endpoint())
    (action,) = (await agent.until("requires_action"))["required_actions"]
    await desk.sent()
    await agent.send(tool_result(action, "sun"))
    assert await desk.outcome(agent) == "sun"
    await settled(lambda: nothing_owed(desk) and not desk.sender.running)


async def test_failures_are_tried_again_under_one_id(desk: HooksRig) -> None:
    desk.sender.answer(URL, Answered(500), Failed(Fault.CONNECT), Failed(Fault.TIMEOUT), result("rain"))
    agent = await desk.agent(await desk.endpoint())
    await desk.clock.pass_by(60)
    assert await desk.outcome(agent) == "rain"
    assert len(desk.sender.ids()) == 4
    assert len(set(desk.sender.ids())) == 1
    assert len(desk.rig.engine.submits) == 2


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Answered(500), "The tool's webhook did not take the call in time."),
        (Answered(410), "The tool's webhook is disabled."),
        (Answered(200, content_type="text/html", body=b"<p>"), "webhook answered with what is no result"),
        (Failed(Fault.REFUSED), "The address of the tool's webhook may not be called."),
        (result("", success=False, error="no city"), "no city"),
        (result("", success=False), "The tool failed."),
    ],
)
async def test_what_receivers_do_ends_in_an_error_that_the_model_reads(
    desk: HooksRig, reply: Any, told: str
) -> None:
    desk.sender.answer(URL, *[reply] * 9)
    agent = await desk.agent(await desk.endpoint(), timeout=20)
    await desk.clock.pass_by(21)
    assert told in await desk.outcome(agent)
    assert told in agent.prompt()
    await settled(lambda: nothing_owed(desk))
    desk.rig.check_rest()


async def test_an_endpoint_that_keeps_failing_is_not_called(desk: HooksRig) -> None:
    endpoint = await desk.endpoint()
    desk.sender.answer(URL, *[Failed(Fault.CONNECT)] * 50)
    agent = await desk.agent(endpoint, timeout=55)
    await desk.clock.pass_by(53)
    await desk.outcome(agent)
    assert (await desk.rig.client.get(f"{ENDPOINTS}/{endpoint}")).json()["circuit"] == "open"
    desk.rig.engine.submits.clear()
    second = await desk.agent(endpoint, timeout=2)
    assert await desk.outcome(second) == "The tool's webhook keeps failing, and was not called."
    assert len(desk.sender.posts) == 5


@pytest.mark.parametrize(
    ("action", "told"),
    [("disable", "The tool's webhook is disabled."), ("", "The tool's webhook does not exist any more.")],
)
@pytest.mark.parametrize("before", [True, False])
async def test_an_endpoint_that_goes(desk: HooksRig, action: str, told: str, before: bool) -> None:
    endpoint = await desk.endpoint()

    async def go() -> None:
        path = f"{ENDPOINTS}/{endpoint}"
        reply = await (desk.rig.post(f"{path}/{action}", {}) if action else desk.rig.client.delete(path))
        assert reply.status_code == 200

    desk.sender.hold(URL)
    if before:
        agent = await created_then(desk, endpoint, go)
    else:
        agent = await desk.agent(endpoint)
        await desk.sent()
        await go()
    assert await desk.outcome(agent) == told
    await settled(lambda: nothing_owed(desk))


async def created_then(desk: HooksRig, endpoint: str, go: Any) -> Agent:
    """A session whose first call comes after `go`."""
    reply = await desk.rig.post("/v1/agents/sessions", body({"tools": [webhook_tool(endpoint)]}))
    agent = Agent(desk.rig, reply.json())
    await go()
    desk.rig.engine.reply = lambda command: say(CALL if len(desk.rig.engine.submits) == 1 else "It rains.")
    await agent.say("Weather?")
    return agent


async def test_a_full_outbox(desk: HooksRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = desk.hooks.ledger
    monkeypatch.setattr(ledger, "limits", dataclasses.replace(ledger.limits, owed=0))
    agent = await desk.agent(await desk.endpoint())
    assert await desk.outcome(agent) == "Too many webhook calls are pending. Try again later."


async def test_arguments_that_are_too_long(desk: HooksRig, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = desk.hooks.ledger
    monkeypatch.setattr(ledger, "limits", dataclasses.replace(ledger.limits, body=10))
    agent = await desk.agent(await desk.endpoint())
    assert await desk.outcome(agent) == "The arguments are too long for the tool's webhook."


async def test_tools_name_endpoints_by_id_by_url_and_by_default(desk: HooksRig) -> None:
    endpoint = await desk.endpoint()
    for tool, default in ((endpoint, None), (URL, None), (None, endpoint), (None, URL)):
        agent = {"tools": [webhook_tool(tool)], **({} if default is None else {"webhook": default})}
        saved = (await desk.rig.post("/v1/agents", body(agent)["agent"])).json()
        assert saved["tools"][0].get("webhook") == tool
        assert saved.get("webhook") == default
    desk.sender.answer(URL, result("rain"))
    assert await desk.outcome(await desk.agent(URL)) == "rain"


@pytest.mark.parametrize(
    ("agent", "param"),
    [
        ({"tools": [webhook_tool()]}, "agent.tools[0].webhook"),
        ({"tools": [webhook_tool("we_none")]}, "agent.tools[0].webhook"),
        ({"tools": [webhook_tool("http://10.0.0.1/x")]}, "agent.tools[0].webhook"),
        ({"tools": [webhook_tool()], "webhook": "we_none"}, "agent.webhook"),
        ({"tools": [webhook_tool("we_none", **{"async": True})]}, "agent.tools[0].async"),
        ({"tools": [{**webhook_tool(), "webhook": 5}]}, "agent.tools[0].webhook"),
    ],
)
async def test_tools_that_could_not_be_called(desk: HooksRig, agent: Any, param: str) -> None:
    reply = await desk.rig.post("/v1/agents/sessions", body(agent))
    error = reply.json()["error"]
    status = 404 if error["code"] == "unknown_webhook" else 400
    assert (reply.status_code, error["param"]) == (status, param), reply.text


async def test_nobody_reaches_the_endpoints_of_others(desk: HooksRig) -> None:
    endpoint, _ = await desk.hooks.outbox.create_endpoint("another", "", URL, [ACTION])
    for name in (endpoint.id, URL):
        reply = await desk.rig.post("/v1/agents/sessions", body({"tools": [webhook_tool(name)]}))
        assert reply.json()["error"]["code"] == "unknown_webhook"
    assert (await desk.rig.client.get(f"{ENDPOINTS}/{endpoint.id}")).status_code == 404
    assert (await desk.rig.client.get(ENDPOINTS)).json()["data"] == []


async def test_two_calls_to_two_endpoints_that_answer_in_another_order(desk: HooksRig) -> None:
    other = "https://other.example/hook"
    one, two = await desk.endpoint(payload="full"), await desk.endpoint(other, payload="full")
    desk.sender.answer(URL, LATER)
    desk.sender.answer(other, LATER)
    desk.rig.engine.reply = say(CALL + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    tools = [webhook_tool(one), webhook_tool(two, name="now")]
    agent = Agent(
        desk.rig, (await desk.rig.post("/v1/agents/sessions", body({"tools": tools}, input="a"))).json()
    )
    events = {
        event["data"]["required_action"]["name"]: event["data"]["required_action"]["callback_url"]
        for event in await desk.sent(2)
    }
    desk.rig.engine.reply = say("It rains.")
    assert await desk.callback(events["now"], {"output": "noon"}) == (202, None)
    assert await desk.callback(events["weather"], {"output": "rain"}) == (202, None)
    await agent.until("idle")
    prompt = agent.prompt()
    assert prompt.index("rain") < prompt.index("noon")
    await settle()
    assert all(d.state is State.LOGGED for d in desk.hooks.ledger.of_endpoint(one))


class PrivateNames:
    """Every name is at an address that it was not at when its endpoint was created."""

    async def resolve(self, host: str, port: int) -> list[str]:
        return ["203.0.113.7", "169.254.169.254"]


async def test_an_address_that_may_not_be_dialled() -> None:
    clock = VirtualTime()
    sender = HttpSender(AddressPolicy(), PrivateNames())
    desk = HooksRig(hooks=make_hooks(wall=clock.now, sender=sender, clock=clock))
    agent = await desk.agent(await desk.endpoint())
    assert await desk.outcome(agent) == "The address of the tool's webhook may not be called."
    await desk.close()
