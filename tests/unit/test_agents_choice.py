"""An agent's `tool_choice`: in either shape, and refused where it is given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agents_rig import NOW, SESSIONS, TWO, body, created
from tests.api_rig import Rig
from tests.fakes import ScriptedEngine, say


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ("required", ("required", None, ())),
        ({"type": "function", "name": "now"}, ("named", "now", ())),
        ({"type": "function", "function": {"name": "now"}}, ("named", "now", ())),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            ("required", None, ("now",)),
        ),
    ],
)
async def test_it_is_taken_in_the_shape_of_chat_completions_and_of_responses(choice: Any, chat: Any) -> None:
    rig = Rig(ScriptedEngine(say(TWO)))
    agent = await created(rig, agent={"tool_choice": choice}, input="?")
    await agent.until("requires_action")
    [form] = rig.grammars.asked
    assert (form.choice, form.named, form.allowed) == chat


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ("bogus", "agent.tool_choice: 'bogus' is not one of none, auto, required, or a named function"),
        ({"type": "zzz"}, "agent.tool_choice: type 'zzz' is not supported"),
        ({"type": "function", "name": "nope"}, "agent.tool_choice: 'nope' is not among the tools"),
        ({"type": "function", "function": {"name": "nope"}}, "agent.tool_choice: 'nope' is not among"),
        ({"type": "function"}, "agent.tool_choice: type 'function' is not supported, only"),
    ],
)
async def test_what_is_none_is_refused_before_there_is_a_session(choice: Any, told: str) -> None:
    rig = Rig()
    reply = await rig.post(SESSIONS, body({"tool_choice": choice}))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "agent.tool_choice")
    assert error["message"].startswith(told)
    agent = await created(rig)
    reply = await rig.post(agent.path, {"agent": {"tool_choice": choice}})
    assert reply.status_code == 400, reply.text
    reply = await rig.post("/v1/agents", {"model": "tiny", "tool_choice": choice})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body.tool_choice")


async def test_tools_that_go_take_the_choice_of_them_along_or_stay() -> None:
    agent = await created(Rig(), agent={"tool_choice": {"type": "function", "name": "weather"}})
    reply = await agent.rig.post(agent.path, {"agent": {"tools": [NOW]}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "agent.tool_choice")
    reply = await agent.rig.post(agent.path, {"agent": {"tools": [NOW], "tool_choice": None}})
    assert reply.status_code == 200, reply.text


async def test_tools_of_mcp_servers_are_not_known_yet() -> None:
    server = {"type": "mcp", "server_label": "far", "server_url": "https://mcp.example.com"}
    choice = {"type": "function", "name": "search"}
    reply = await Rig().post(SESSIONS, body({"tools": [server], "tool_choice": choice}))
    assert reply.status_code == 200, reply.text
