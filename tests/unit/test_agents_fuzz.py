"""Any body to an agent's routes gets an answer or a 4xx, never a fault, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.server.http.agents.schemas import AgentFields, AgentRequest, SessionRequest, SessionUpdate
from agentserve.server.text_port import JsonObject
from tests.agents_rig import CALL, CANCEL, SESSIONS, WEATHER, body, created, message, result
from tests.api_rig import Rig
from tests.fakes import ScriptedEngine, say

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
likely = st.sampled_from(
    [
        0,
        -1,
        2**63,
        "",
        "x",
        "auto",
        "tiny",
        [],
        {},
        [1],
        [WEATHER],
        {"type": "none"},
        {"effort": "low"},
        "\ud800",
    ]
)
anything = values | likely
BODIES: dict[str, tuple[JsonObject, tuple[str, ...]]] = {
    SESSIONS: (body(), SessionRequest.__struct_fields__),
    f"{SESSIONS}/ID": ({}, SessionUpdate.__struct_fields__),
    "/v1/agents": ({"model": "tiny"}, AgentRequest.__struct_fields__),
}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_field_with_any_value(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(BODIES)))
    valid, names = BODIES[path]
    changes = data.draw(st.dictionaries(st.sampled_from(names), anything, max_size=3))
    if data.draw(st.booleans()):
        inner = st.dictionaries(st.sampled_from(AgentFields.__struct_fields__), anything, max_size=3)
        changes["agent"] = {"model": "tiny", **data.draw(inner)}
    asyncio.run(_post(path, valid | changes))


async def _post(path: str, given: JsonObject) -> None:
    rig = Rig()
    agent = await created(rig)
    reply = await rig.post(path.replace("ID", agent.id), json.dumps(given))
    assert reply.status_code in (200, 400, 404), (given, reply.text)
    if reply.status_code == 200:
        for history in rig.context.agents.shelf:
            await rig.context.agents.cancel(history)
    assert (await rig.client.get(SESSIONS)).status_code == 200
    assert not rig.engine.live


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_events(data: st.DataObject) -> None:
    asyncio.run(_events(data))


async def _events(data: st.DataObject) -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    agent = await created(rig, input="?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    rig.engine.reply = say("Done.")
    valid: list[Any] = [message("x"), CANCEL, result(call), {"type": "agent.session.input.other"}]
    valid.append({"type": "agent.session.input.mcp_approval_request_result", "request_id": "r"})
    events = data.draw(st.lists(st.sampled_from(valid), max_size=3))
    names = ("type", "input", "turn_id", "call_id", "success", "output", "error", "role")
    events = [
        event | data.draw(st.dictionaries(st.sampled_from(names), anything, max_size=2)) for event in events
    ]
    given = data.draw(st.just(events) | anything)
    reply = await rig.post(f"{agent.path}/events", json.dumps({"events": given}))
    assert reply.status_code in (202, 400, 409), (given, reply.text)
    await agent.send(CANCEL)
    await agent.say("Still there?", says="Yes.")
    await agent.until("idle")
    assert (await agent.items())[-1]["content"][0]["text"] == "Yes."
    rig.check_rest()
