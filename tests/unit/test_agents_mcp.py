"""Agents with tools of scripted MCP servers: listings, calls, approvals, restarts, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agentserve.messages import Submit
from agentserve.server.agents.records import CallItem, McpServer
from agentserve.server.agents.remote import McpTools
from agentserve.server.agents.runners import ToolCall
from agentserve.server.http.agents.shown import item_objects
from tests.agents_machine import Machine, Sleeper
from tests.agents_rig import CANCEL, SESSIONS, WEATHER, Agent, body, check_events, created
from tests.api_rig import Rig, hermes, settled
from tests.fakes import Script, ScriptedEngine, say
from tests.mcp_rig import ADD, NUMBERS, SUB, URL, FakeMcp, server
from tools_bridge.mcp.types import Answer, Fault, ListedTool, McpFailed

SUM = hermes("add", '{"a": 1, "b": 2}')
SECRET = "very-secret-key"


def rig_of(*tools: ListedTool) -> tuple[Rig, FakeMcp]:
    mcp = FakeMcp(*(tools or (SUB, ADD)))
    return Rig(mcp=mcp), mcp


async def agent_of(rig: Rig, *tools: dict[str, Any], says: str = SUM, then: str = "Done.") -> Agent:
    """`then`: what the model says after its call."""
    rig.engine.reply = one_after_the_other(says, then)
    return await created(rig, agent={"tools": list(tools)}, input="1 + 2?")


def shown_calls(agent: Agent) -> list[dict[str, Any]]:
    return [item for item in item_objects(agent.history) if item["type"].endswith("_call")]


def one_after_the_other(*texts: str) -> Callable[[Submit], Script]:
    left = list(texts)
    return lambda submit: say(left.pop(0) if left[1:] else left[0])


def decision(request: dict[str, Any], word: str) -> dict[str, Any]:
    return {
        "type": "agent.session.input.mcp_approval_request_result",
        "request_id": request["request_id"],
        "response": {"type": "mcp_tool_call", "decision": word},
    }


async def test_a_call_runs_without_the_client() -> None:
    rig, mcp = rig_of()
    agent = await agent_of(rig, server(headers={"x-key": SECRET}), WEATHER, then="It is 3.")
    await agent.until("idle")
    listing, question, call, reply = await agent.items()
    assert listing["type"] == "mcp_list_tools"
    assert [tool["name"] for tool in listing["tools"]] == ["add", "sub"]
    assert question["role"] == "user"
    assert call == {
        "id": call["id"],
        "turn_id": call["turn_id"],
        "type": "mcp_call",
        "server_label": "calc",
        "name": "add",
        "arguments": {"a": 1, "b": 2},
        "output": "3",
        "error": None,
        "approval_request_id": None,
        "status": "completed",
    }
    assert reply["content"][0]["text"] == "It is 3."
    assert mcp.calls == [("add", {"a": 1, "b": 2})]
    assert {place.headers["x-key"] for place in mcp.places} == {SECRET}
    kinds = agent.kinds()
    assert kinds.count("requires_action") == 0
    done = [e["item"] for e in agent.events() if e["type"].endswith("item.done")]
    assert [item["type"] for item in done] == ["mcp_call", "message"]
    assert done[0]["output"] == "3"
    check_events(agent.events())
    rig.check_rest()


async def test_the_listing_is_frozen() -> None:
    rig, mcp = rig_of()
    agent = await agent_of(rig, server(), says="Hello.")
    await agent.until("idle")
    first = agent.prompt()
    mcp.default = [ListedTool("other", "", NUMBERS), ADD]
    await agent.say("Again?", says="Yes.")
    await agent.until("idle")
    assert len(mcp.places) == 1
    assert agent.prompt().startswith(first)
    await agent.get()
    changed = await rig.post(agent.path, {"agent": {"tools": [server(allowed_tools=["other"])]}})
    assert changed.status_code == 200, changed.text
    await agent.say("And now?", says="Yes.")
    await agent.until("idle")
    assert len(mcp.places) == 2
    assert '"other"' in agent.prompt()
    assert '"add"' not in agent.prompt()


async def test_names_clash_with_functions_and_other_servers() -> None:
    rig, mcp = rig_of()
    add = {"type": "function", "name": "sub", "description": "", "parameters": {}}
    second = server(server_label="two", server_url=URL + "/2")
    mcp.tools[URL + "/2"] = [ADD]
    agent = await agent_of(rig, server(), second, add, says=hermes("two_add", "{}"))
    await agent.until("idle")
    names = {tool.name: tool.kind for tool in agent.history.config.tools}
    assert names == {"sub": "function", "calc_add": "mcp", "calc_sub": "mcp", "two_add": "mcp"}
    assert mcp.calls == [("add", {})]
    assert mcp.places[-1].url == URL + "/2"


@pytest.mark.parametrize(
    ("word", "output", "error"),
    [("approve", "3", None), ("deny", None, "not allow"), ("cancel", None, "not allow")],
)
async def test_approval(word: str, output: str | None, error: str | None) -> None:
    rig, mcp = rig_of()
    given = server()
    del given["require_approval"]  # as at OpenAI: always
    agent = await agent_of(rig, given)
    (request,) = (await agent.until("requires_action"))["required_actions"]
    assert request["type"] == "mcp_approval_request"
    assert request["request"]["name"] == "add"
    assert request["request"]["arguments"] == {"a": 1, "b": 2}
    assert (await agent.send(decision({"request_id": "mcpr_x"}, word), status=400))["param"] == "request_id"
    assert not mcp.calls
    rig.engine.reply = say("Done.")
    await agent.send(decision(request, word))
    await agent.until("idle")
    await agent.send(decision(request, word))  # a repeat
    other = "deny" if word == "approve" else "approve"
    assert (await agent.send(decision(request, other), status=409))["code"] == "decision_conflict"
    call = (await agent.items())[2]
    assert call["output"] == output
    assert call["approval_request_id"] == request["request_id"]
    assert (call["error"] is None) == (error is None)
    assert error is None or error in call["error"]
    assert len(mcp.calls) == (word == "approve")
    assert agent.kinds().count("requires_action") == 1
    rig.check_rest()


async def test_a_turn_is_cancelled_while_approval_is_awaited_or_a_call_runs() -> None:
    rig, mcp = rig_of()
    agent = await agent_of(rig, server(require_approval="always"))
    (request,) = (await agent.until("requires_action"))["required_actions"]
    await agent.send(CANCEL)
    assert (await agent.send(decision(request, "approve"), status=400))["code"] == "unknown_approval_request"
    ended = asyncio.Event()

    async def hang() -> Answer:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    mcp.answer = hang
    await agent.say("Again?", says=SUM)
    (request,) = (await agent.until("requires_action"))["required_actions"]
    await agent.send(decision(request, "approve"))
    await settled(lambda: mcp.calls)
    await agent.send(CANCEL)
    assert ended.is_set()
    mcp.answer = Answer("3")
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    assert (await agent.items())[-1]["content"][0]["text"] == "Yes."
    rig.check_rest()


@pytest.mark.parametrize(
    "answer",
    [
        Answer("There is none.", failed=True),
        McpFailed(Fault.TIMEOUT, "The MCP server did not answer within 60 s."),
        RuntimeError("a mistake of ours"),
    ],
)
async def test_failures_are_read_by_the_model(answer: Answer | Exception) -> None:
    rig, mcp = rig_of()
    mcp.answer = answer
    agent = await agent_of(rig, server())
    await agent.until("idle")
    call = (await agent.items())[2]
    assert (call["status"], call["output"]) == ("failed", None)
    assert call["error"]
    assert f"Error: {call['error']}" in agent.prompt()
    assert "a mistake of ours" not in agent.prompt()


async def test_arguments_that_are_no_object() -> None:
    rig, mcp = rig_of()
    agent = await agent_of(rig, server(), says=hermes("add", '{"a": NaN}'))
    await agent.until("idle")
    assert not mcp.calls


async def test_a_server_that_is_down_leaves_the_session_usable() -> None:
    rig, mcp = rig_of()
    mcp.raises = McpFailed(Fault.UNREACHABLE, "The MCP server cannot be reached.")
    agent = await agent_of(rig, server(), says="No tools today.")
    await agent.until("idle")
    listing = (await agent.items())[0]
    assert (listing["type"], listing["tools"]) == ("mcp_list_tools", [])
    assert listing["error"] == "The MCP server cannot be reached."
    mcp.raises = None
    rig.engine.reply = one_after_the_other(SUM, "It is 3.")
    await agent.say("And now?")
    await agent.until("idle")
    assert (await agent.items())[-1]["content"][0]["text"] == "It is 3."


async def test_a_server_that_is_required() -> None:
    rig, mcp = rig_of()
    agent = await created(rig, "Hello.", agent={"tools": [server(required=True)]})
    mcp.raises = McpFailed(Fault.UNREACHABLE, "The MCP server cannot be reached.")
    assert (await agent.say("Hi", status=424))["code"] == "mcp_server_unavailable"
    assert await agent.items() == []
    mcp.raises = None
    await agent.say("Hi")
    await agent.until("idle")
    assert len(await agent.items()) == 3


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/mcp", "https://localhost/mcp", "https://u:p@x.com/", "nothing"]
)
async def test_addresses_are_judged_when_an_agent_is_made(url: str) -> None:
    rig, mcp = rig_of()
    reply = await rig.post(SESSIONS, body({"tools": [server(server_url=url)]}, input="Hi"))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "mcp_address_refused"
    assert not mcp.places


async def test_without_the_extra_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools_bridge.mcp.remote.installed", lambda: False)
    reply = await Rig().post(SESSIONS, body({"tools": [server()]}, input="Hi"))
    assert reply.status_code == 400
    assert "agentserve-llm[mcp]" in reply.json()["error"]["message"]


async def test_secrets_are_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig, mcp = rig_of()
    given = server(headers={"x-key": SECRET}, authorization=SECRET, server_url=f"{URL}?key={SECRET}")
    saved = (await rig.post("/v1/agents", {"model": "tiny", "tools": [given]})).json()
    agent = await agent_of(rig, given)
    await agent.until("idle")
    mcp.answer = McpFailed(Fault.HTTP, "The MCP server answers with HTTP status 401.")
    rig.engine.reply = one_after_the_other(SUM, "Done.")
    await agent.say("Again?")
    await agent.until("idle")
    shown = json.dumps([saved, await agent.get(), await agent.items(), agent.events()])
    assert URL in shown
    for text in (shown, caplog.text, repr(agent.history), agent.prompt()):
        assert SECRET not in text
    assert mcp.places[-1].headers["authorization"] == f"Bearer {SECRET}"


async def test_nobody_says_anything_to_a_call() -> None:
    time, mcp = Sleeper(), FakeMcp(ADD)
    rig = Rig(mcp=mcp, sleep=time.sleep, wall=time.wall, tool_wait_seconds=100)
    agent = await agent_of(rig, server(require_approval="always"))
    (request,) = (await agent.until("requires_action"))["required_actions"]
    rig.engine.reply = say("Then not.")
    await settled(
        lambda: time.asleep == 1
    )  # its time is counted from when it waits, not from when it says so
    time.pass_(99)
    await agent.until("requires_action")
    time.pass_(1)
    await agent.until("idle")
    assert (await agent.items())[2]["error"] == "Nobody allowed this call within 100 s."
    assert (await agent.send(decision(request, "approve"), status=400))["code"] == "unknown_approval_request"
    assert not mcp.calls


async def test_two_calls_of_which_one_is_approved() -> None:
    rig, mcp = rig_of()
    given = server(require_approval={"always": {"tool_names": ["add"]}})
    agent = await agent_of(
        rig, given, WEATHER, says=SUM + hermes("sub", "{}") + hermes("weather", '{"city": "Oslo"}')
    )
    await settled(lambda: mcp.calls)
    request, call = (await agent.until("requires_action"))["required_actions"]
    assert (request["type"], call["type"]) == ("mcp_approval_request", "function_call")
    await settled(
        lambda: [item["status"] for item in shown_calls(agent)] == ["in_progress", "completed", "in_progress"]
    )
    await agent.give(call)
    await agent.until("requires_action")
    assert mcp.calls == [("sub", {})]
    rig.engine.reply = say("Done.")
    await agent.send(decision(request, "approve"))
    await agent.until("idle")
    assert mcp.calls == [("sub", {}), ("add", {"a": 1, "b": 2})]
    check_events(agent.events())
    rig.check_rest()


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    made = Machine(ScriptedEngine(), mcp=FakeMcp(SUB, ADD))
    yield made
    await made.close()


async def test_a_restart_renders_the_same(machine: Machine) -> None:
    given = server(require_approval={"never": {"tool_names": ["sub"]}}, authorization=SECRET)
    agent = await created(machine.rig, SUM, agent={"tools": [given]}, input="1 + 2?")
    (request,) = (await agent.until("requires_action"))["required_actions"]
    before, items = agent.prompt(), await agent.items()
    machine.mcp.default = []
    agent = await machine.kill(agent)
    assert (await agent.until("requires_action"))["required_actions"] == [request]
    assert await agent.items() == items
    machine.engine.reply = say("It is 3.")
    await agent.send(decision(request, "approve"))
    await agent.until("idle")
    assert agent.prompt().startswith(before)
    assert machine.mcp.calls == [("add", {"a": 1, "b": 2})]
    assert machine.mcp.places[-1].headers == {"authorization": f"Bearer {SECRET}"}
    machine.rig.check_rest()


async def test_a_call_that_ran_at_the_end_of_the_server_is_not_made_again(machine: Machine) -> None:
    async def hang() -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    machine.mcp.answer = hang
    agent = await created(machine.rig, SUM, agent={"tools": [server()]}, input="1 + 2?")
    await settled(lambda: machine.mcp.calls)
    machine.engine.reply = say("I do not know.")
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert len(machine.mcp.calls) == 1
    assert "interrupted" in (await agent.items())[2]["error"]


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
async def test_arguments_that_are_not_sent(arguments: str) -> None:
    mcp = FakeMcp(ADD)
    item = CallItem("i", "c", "add", arguments, kind="mcp", server="calc", remote="add")
    outcome = await McpTools(mcp).run(ToolCall("s", "t", item, server=McpServer("calc", URL)))
    assert outcome.error == "Bad arguments. They are no JSON object."
    gone = await McpTools(mcp).run(ToolCall("s", "t", item))
    assert gone.error == "The session has no MCP server 'calc' any more."
    assert not mcp.calls
