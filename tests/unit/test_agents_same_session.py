"""An agent's session is the session of that name under /agentserve/sessions: everything there works on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.types import FinishReason
from tests.agents_machine import Sleeper
from tests.agents_rig import CALL, CANCEL, SESSIONS, TWO, Agent, check_events, created, message
from tests.api_rig import TOOLS, Rig, settled, user
from tests.fakes import Script, say


def native(agent: Agent, rest: str = "") -> str:
    return f"/agentserve/sessions/{agent.id}{rest}"


async def waiting(rig: Rig) -> tuple[Agent, dict[str, Any], dict[str, Any]]:
    agent = await created(rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    rig.engine.reply = say("It rains.")
    return agent, first, second


async def test_it_shows_what_the_agent_waits_for() -> None:
    rig = Rig()
    agent, first, _ = await waiting(rig)
    view = await rig.session(agent.id)
    assert (view["state"], view["turns"]) == ("WAITING_TOOL", 1)
    assert view["pending_tool_calls"][0]["id"] == first["call_id"]
    listed = (await rig.client.get("/agentserve/sessions")).json()["data"]
    assert [one["id"] for one in listed] == [agent.id]


async def test_results_by_the_other_way_and_an_upload() -> None:
    """The agent goes on with them: there is one turn, and its items have them."""
    rig = Rig()
    agent, first, second = await waiting(rig)
    reply = await rig.post(native(agent, "/tool_results"), {"call_id": second["call_id"], "content": "noon"})
    assert reply.json()["outstanding"] == [first["call_id"]]
    assert (await agent.give(second, "noon")) is None  # a repeat, whichever way it came
    path = native(agent, f"/tool_results/{first['call_id']}/stream")
    reply = await rig.client.post(path, content=b"heavy rain")
    assert (reply.status_code, reply.json()["object"]) == (200, "agentserve.tool_results")
    await agent.until("idle")
    assert len(rig.engine.submits) == 2
    prompt = agent.prompt()
    assert prompt.index("heavy rain") < prompt.index("noon")
    outputs = [item["output"] for item in await agent.items() if item["type"] == "function_call_output"]
    assert sorted(outputs) == ["heavy rain", "noon"]
    check_events(agent.events())
    rig.check_rest()


async def test_going_on_without_what_is_missing() -> None:
    rig = Rig()
    agent, first, _ = await waiting(rig)
    await agent.give(first)
    assert (await rig.post(native(agent, "/tool_results"), {"continue": True})).status_code == 200
    await agent.until("idle")
    assert "No result: the call was cancelled." in agent.prompt()
    check_events(agent.events())


async def test_hints_have_receipts() -> None:
    rig = Rig()
    agent, first, second = await waiting(rig)
    reply = await rig.post(native(agent, "/hints"), {"expected_wait": 5, "priority": 9})
    receipts = reply.json()["receipts"]
    assert [receipts[name]["status"] for name in ("expected_wait", "priority")] == ["accepted", "clipped"]
    await agent.give(first)
    await agent.give(second)
    await agent.until("idle")


async def test_hints_before_the_first_turn_count_from_it_on() -> None:
    time = Sleeper()
    rig = Rig(wall=time.wall)
    agent = await created(rig)
    hints = {"priority": 9, "retain": 0.5, "deadline": 100, "expected_wait": -1, "nonsense": 1}
    reply = (await rig.post(native(agent, "/hints"), hints)).json()
    receipts = reply["receipts"]
    assert reply["session_id"] == agent.id
    assert {name: receipt["status"] for name, receipt in receipts.items()} == {
        "priority": "clipped",
        "retain": "deferred",
        "deadline": "deferred",
        "expected_wait": "rejected",
        "nonsense": "rejected",
    }
    assert receipts["retain"]["reason"] == "counts from the session's first turn on"
    time.pass_(40)
    assert (await rig.post(native(agent, "/hints"), {"retain": None})).json()["receipts"]["retain"]
    await agent.say("Hi", says="Hello.")
    await agent.until("idle")
    (session,) = rig.context.directory.sessions("default")
    assert session.said.priority == 2
    assert session.said.retain is None
    assert session.said.wait.deadline is not None
    assert session.said.wait.deadline - rig.context.clock.now() <= 60
    assert (await rig.post(native(agent, "/hints"), {"priority": 1})).json()["receipts"]["priority"]
    await agent.say("Again", says="Hello.")
    await agent.until("idle")
    assert session.said.priority == 1
    gone = await rig.post("/agentserve/sessions/sess_none/hints", {"priority": 1})
    assert gone.status_code == 404


async def test_the_reply_to_a_message_names_its_turn() -> None:
    rig = Rig()
    agent = await created(rig, "Hello.")
    path, body_ = f"{agent.path}/events", {"events": [message("Hi")]}
    first = await rig.post(path, body_, {"idempotency-key": "one"})
    await agent.until("idle")
    again = await rig.post(path, body_, {"idempotency-key": "one"})
    (turn,) = agent.history.turns
    assert first.headers["x-turn-id"] == again.headers["x-turn-id"] == turn.id
    assert (first.status_code, first.content) == (202, b"")


async def test_a_fork_goes_its_own_way() -> None:
    rig = Rig()
    agent, first, second = await waiting(rig)
    fork = (await rig.post(native(agent, "/fork"), {})).json()
    assert fork["pending_tool_calls"] == [first["call_id"], second["call_id"]]
    results = [{"call_id": call, "content": "other"} for call in fork["pending_tool_calls"]]
    reply = await rig.post(f"/agentserve/sessions/{fork['id']}/tool_results", results)
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."
    assert (await agent.get())["status"] == "requires_action"
    await agent.give(first, "mine")
    await agent.give(second, "mine")
    await agent.until("idle")
    assert "other" not in agent.prompt()
    assert (await rig.client.get(f"{SESSIONS}/{fork['id']}")).status_code == 404  # it is no agent's


async def test_a_turn_of_chat_completions_goes_on_from_it() -> None:
    rig = Rig()
    agent = await created(rig, "Hello!", input="Hi")
    await agent.until("idle")
    history = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Hello!"},
    ]
    reply = await rig.chat([*history, user("More")], session_id=agent.id, tools=TOOLS)
    assert reply["session_id"] == agent.id
    await agent.say("And?", says="Well.")
    await agent.until("idle")
    assert "More" in agent.prompt()
    rig.check_rest()


async def test_results_in_a_chat_request_end_the_agents_turn() -> None:
    """The session went on elsewhere: the turn cannot, and says so when it next looks."""
    rig = Rig()
    agent = await created(rig, CALL, input="Hi")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    rig.engine.reply = say("It rains.")
    raw = {"id": call["call_id"], "type": "function"}
    raw["function"] = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    asked = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [raw]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "rain"},
    ]
    assert (await rig.chat(asked, tools=TOOLS))["session_id"] == agent.id
    assert (await agent.give(call, "sun", status=409))["code"] == "result_conflict"
    await agent.send({"type": "agent.session.input.cancel"})
    await agent.say("So?", says="Well.")
    await agent.until("idle")
    rig.check_rest()


async def test_closing_it_closes_both() -> None:
    for path in ("native", "alias", "agents"):
        rig = Rig()
        agent, *_ = await waiting(rig)
        if path == "native":
            reply = await rig.client.delete(native(agent))
        elif path == "alias":
            reply = await rig.post("/close_session", {"session_id": agent.id})
        else:
            reply = await rig.client.delete(agent.path)
        assert reply.status_code == 200
        assert (await rig.client.get(agent.path)).status_code == 404
        assert (await rig.client.get(native(agent))).status_code == 404
        assert len(rig.context.agents) == 0


async def test_deleting_while_its_turn_runs() -> None:
    rig = Rig()
    agent = await created(rig, say("Hello!", hold_at=2), input="Hi")
    assert (await rig.client.delete(agent.path)).status_code == 200
    assert not rig.engine.live
    assert len(rig.context.directory) == 0
    assert len(rig.context.agents) == 0


async def test_what_the_directory_had_to_forget_is_told_again_from_the_items() -> None:
    """The prompt is the same, but for replies that a template does not render as they were generated."""
    prompts = []
    for forget in ("nothing", "the session", "its messages"):
        rig = Rig()
        agent, first, second = await waiting(rig)
        await agent.give(first)
        rig.engine.reply = say("It rains.")
        await agent.give(second, [{"type": "input_text", "text": "noon"}])
        await agent.until("idle")
        await agent.say("Lost", says=Script([], FinishReason.ERROR, "broke"))
        await agent.until("idle")
        await agent.say("Tea?", says=TWO)
        await agent.until("requires_action")
        await agent.send({"type": "agent.session.input.cancel"})
        session = rig.context.directory.get("default", agent.id)
        if forget == "the session":
            rig.context.directory.close(session)
        elif forget == "its messages":
            rig.context.chronicle.transcripts.forget(session.key)
        await agent.say("So?", says="Well.")
        await agent.until("idle")
        assert (await agent.get("/turns"))["data"][0]["status"] == "completed"
        prompts.append(agent.prompt())
        rig.check_rest()
    assert prompts[0] == prompts[1] == prompts[2]
    assert "Lost" not in prompts[0]


async def test_results_are_taken_though_the_messages_had_to_go() -> None:
    rig = Rig()
    agent, first, second = await waiting(rig)
    session = rig.context.directory.get("default", agent.id)
    rig.context.chronicle.transcripts.forget(session.key)
    await agent.give(second, "noon")
    await agent.give(first, "rain")
    await agent.until("idle")
    prompt = agent.prompt()
    assert prompt.index("rain") < prompt.index("noon")
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    check_events(agent.events())
    rig.check_rest()


@pytest.mark.parametrize("way", ["delete", "cancel"])
async def test_a_session_that_is_left_while_its_turn_is_being_begun(way: str) -> None:
    rig = Rig()
    agent = await created(rig)
    asking = asyncio.create_task(rig.post(f"{agent.path}/events", {"events": [message("Hi")]}))
    for _ in range(1000):
        if rig.context.agents._starting:
            break
        await asyncio.sleep(0)
    if way == "delete":
        assert (await rig.client.delete(agent.path)).status_code == 200
        assert (await asking).status_code in (202, 404, 409)
        assert (await rig.client.get(agent.path)).status_code == 404
    else:
        await agent.send(CANCEL)
        assert (await asking).status_code == 202
        assert (await agent.get("/turns"))["data"][0]["status"] == "cancelled"
    await settled(lambda: not len(rig.context.agents) and not rig.engine.live)
    assert len(rig.context.directory) == 0
    assert len(rig.context.telling.logs) == (way == "cancel")
