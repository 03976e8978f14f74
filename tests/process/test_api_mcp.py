"""Agents' sessions with real MCP servers: one made with the `mcp` package, in its own process, and such as
no package would make. The model is scripted; everything between it and the servers is what users have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agentserve.text.conversation import unread
from tests.agents_rig import CANCEL, SESSIONS, Agent, body, created
from tests.api_rig import Rig, hermes, served, settled
from tests.fakes import say
from tests.mcp_rig import needs_mcp, real_server
from tools_bridge.mcp.remote import RemoteMcp
from tools_bridge.mcp.types import Fault, McpFailed, Place
from tools_bridge.webhooks.address import AddressPolicy

pytestmark = [pytest.mark.process, needs_mcp]

LOCAL = AddressPolicy(hosts=("127.0.0.1",))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server() as found:
        yield found


def rig_of() -> Rig:
    return Rig(mcp=RemoteMcp(LOCAL, unread))


def calc(url: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "calc",
        "transport": {"type": "http", "server_url": url},
        "require_approval": "never",
        **fields,
    }


async def asked(
    rig: Rig, tool: dict[str, Any], name: str, arguments: str = "{}"
) -> tuple[Agent, dict[str, Any]]:
    """A turn that calls one tool; the call's item."""
    rig.engine.reply = lambda submit: say("Done." if rig.engine.submits[1:] else hermes(name, arguments))
    agent = await created(rig, agent={"tools": [tool]}, input="Go.")
    await settled(lambda: agent.history.status == "idle", patience=20_000)
    (call,) = [item for item in await agent.items() if item["type"] == "mcp_call"]
    return agent, call


async def test_a_call_of_a_real_server(url: str) -> None:
    rig = rig_of()
    agent, call = await asked(rig, calc(url), "add", '{"a": 1, "b": 2}')
    assert (call["status"], call["output"], call["error"]) == ("completed", "3", None)
    listed = (await agent.items())[0]
    names = [tool["name"] for tool in listed["tools"]]
    assert names == ["add", "broken", "large", "leave", "picture", "slow", "table", "tell"]
    assert "Adds numbers." in agent.prompt()
    prompts = [agent.prompt(0), agent.prompt()]
    assert prompts[1].startswith(prompts[0])
    rig.check_rest()


@pytest.mark.parametrize(
    ("name", "output", "error"),
    [
        ("table", '"deux": "é"', None),
        ("picture", "not readable by this model", None),
        ("broken", None, "broken"),
        ("add", None, "validation"),
    ],
)
async def test_what_the_model_reads(url: str, name: str, output: str | None, error: str | None) -> None:
    agent, call = await asked(rig_of(), calc(url, allowed_tools=[name]), name)
    assert (output is None) == (call["output"] is None)
    assert output is None or output in call["output"]
    assert (error is None) == (call["error"] is None)
    assert error is None or error in call["error"]
    assert (call["output"] or call["error"]).splitlines()[0] in agent.prompt()


async def test_a_call_over_the_sdk_with_approval(url: str) -> None:
    openai = pytest.importorskip("openai")
    rig = rig_of()
    given = calc(url)
    del given["require_approval"]
    async with served(rig.app) as base, openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="k") as client:
        rig.engine.reply = say(hermes("add", '{"a": 4, "b": 5}'))
        sessions = client.beta.agents.sessions
        made = await sessions.create(
            environment={"type": "none"}, agent={"model": "tiny", "tools": [given]}, input="4 + 5?"
        )
        history = Agent(rig, {"id": made.id}).history
        await settled(lambda: history.status == "requires_action")
        (action,) = (await sessions.retrieve(made.id)).required_actions
        assert (action.type, action.request.name) == ("mcp_approval_request", "add")
        rig.engine.reply = say("It is 9.")
        decision = {"type": "mcp_tool_call", "decision": "approve"}
        kind = "agent.session.input.mcp_approval_request_result"
        await sessions.events.create(
            made.id, events=[{"type": kind, "request_id": action.request_id, "response": decision}]
        )
        await settled(lambda: history.status == "idle")
        items = [item async for item in sessions.items.list(made.id, order="asc")]
        (call,) = [item for item in items if item.type == "mcp_call"]
        assert (call.output, call.server_label, call.status) == ("9", "calc", "completed")


async def test_a_call_that_takes_too_long_or_too_much(url: str) -> None:
    agent, call = await asked(rig_of(), calc(url, timeout=0.2), "slow", '{"name": "x"}')
    assert call["error"] == "The MCP server did not answer within 0.2 s."
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    _, call = await asked(rig_of(), calc(url), "large", '{"count": 100000000}')
    assert call["error"] == "The MCP server's reply is too large."


async def told(rig: Rig, place: Place, word: str) -> None:
    for _ in range(200):
        answer = await rig.context.mcp.call(place, "tell", {}, 10)
        if word in answer.text:
            return
    raise AssertionError(answer.text)


async def test_a_turn_that_is_cancelled_ends_its_call(url: str) -> None:
    rig, place = rig_of(), Place(url)
    agent = await created(rig, hermes("slow", '{"name": "cut"}'), agent={"tools": [calc(url)]}, input="Go.")
    await told(rig, place, "cut began")
    await agent.send(CANCEL)
    await told(rig, place, "cut ended")
    assert (await agent.items())[-1]["status"] == "incomplete"


async def test_a_server_that_dies_in_mid_call() -> None:
    with real_server() as mortal:
        agent, call = await asked(rig_of(), calc(mortal), "leave")
    assert call["status"] == "failed"
    assert "MCP server" in call["error"]
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    assert (await agent.items())[-1]["content"][0]["text"] == "Yes."


async def test_private_addresses_are_refused_where_nobody_allowed_them(url: str) -> None:
    reply = await Rig().post(SESSIONS, body({"tools": [calc(url)]}, input="Hi"))
    assert reply.json()["error"]["code"] == "mcp_address_refused"
    with pytest.raises(McpFailed) as failed:
        await RemoteMcp(AddressPolicy(), unread).list_tools(Place(url), 5)
    assert failed.value.fault is Fault.REFUSED


class Rebound:
    """A name that is at a public address when it is asked for, whatever it is at later."""

    async def resolve(self, host: str, port: int) -> list[str]:
        return ["127.0.0.1"]


async def test_a_name_at_a_private_address_is_not_dialled(url: str) -> None:
    remote = RemoteMcp(AddressPolicy(allow_http=True), unread, resolver=Rebound())
    with pytest.raises(McpFailed, match="private address"):
        await remote.list_tools(Place("http://mcp.example.com:8080/mcp"), 5)
