"""Agents' sessions: one turn, its events and items; what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from agentserve.messages import unpack_tokens
from agentserve.types import FinishReason
from tests.agents_rig import (
    CALL,
    CANCEL,
    NOW,
    SESSIONS,
    TWO,
    WEATHER,
    Agent,
    body,
    check_events,
    created,
    message,
    result,
)
from tests.api_rig import Rig, settled
from tests.fakes import Script, ScriptedEngine, say


async def test_a_turn_from_its_message_to_idle() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    agent = await created(rig)
    assert (await agent.get())["status"] == "idle"
    await agent.say("Hi")
    shown = await agent.until("idle")
    assert shown["required_actions"] == []
    assert shown["usage"]["output_tokens"] == len("Hello!") + 1
    kinds = agent.kinds()
    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "created",
        "turn.created",
        "in_progress",
        "turn.in_progress",
        "turn.item.added",
        "turn.item.added",
        "turn.content_part.added",
        "turn.output_text.done",
        "turn.content_part.done",
        "turn.item.done",
        "turn.completed",
        "idle",
    ]
    check_events(agent.events())
    asked, answer = await agent.items()
    assert asked["content"] == [{"type": "input_text", "text": "Hi"}]
    assert (answer["content"][0]["text"], answer["phase"]) == ("Hello!", "final_answer")
    assert "Be brief." in agent.prompt()
    rig.check_rest()


async def test_a_second_turn_goes_on_from_the_first() -> None:
    rig = Rig(ScriptedEngine(say("Hello!")))
    agent = await created(rig, input="Hi")
    await agent.until("idle")
    await agent.say("And?", says="More.")
    await agent.until("idle")
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    assert len({submit.session for submit in rig.engine.submits}) == 1
    turns = (await agent.get("/turns?order=asc"))["data"]
    assert [turn["status"] for turn in turns] == ["completed", "completed"]
    assert len((await agent.get(f"/turns/{turns[1]['id']}/items"))["data"]) == 2
    check_events(agent.events())
    rig.check_rest()


async def test_a_tool_round_trip() -> None:
    rig = Rig()
    agent = await created(rig, TWO, input="Weather?")
    shown = await agent.until("requires_action")
    first, second = shown["required_actions"]
    assert first["arguments"] == {"city": "Oslo"}
    session = rig.context.directory.get("default", agent.id)
    assert session.state.value == "WAITING_TOOL"
    assert rig.engine.tools[-1] == ("weather", "now")
    rig.engine.reply = say("It rains.")
    await agent.give(second, "noon")
    assert (await agent.get())["required_actions"] == [first]
    await agent.give(first, "rain")
    assert (await agent.get())["status"] in ("in_progress", "idle")
    await agent.until("idle")
    prompt = agent.prompt()
    assert prompt.index("rain") < prompt.index("noon")  # call order
    items = await agent.items()
    assert [item["type"] for item in items] == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]
    assert {item["status"] for item in items} == {"completed"}
    check_events(agent.events())
    assert agent.kinds().count("requires_action") == 1
    rig.check_rest()


async def test_results_that_do_not_fit_change_nothing() -> None:
    rig = Rig()
    agent = await created(rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    before = await agent.items()
    forged = {**first, "call_id": "call_made_up"}
    error = await agent.give(forged, status=400)
    assert error["code"] == "invalid_request_error"
    assert error["message"] == "Unknown pending tool call: call_made_up"
    error = await agent.give({**first, "turn_id": "turn_other"}, status=400)
    assert error["message"] == f"Unknown pending tool call: {first['call_id']}"
    error = await agent.send(result(first, "a"), result(second, "b"), result(first, "c"), status=409)
    assert error["code"] == "result_conflict"
    assert (await agent.send(result(first), message("x"), status=400))["param"] == "events"
    assert (await agent.give(first, "x" * (4 << 20), status=413))["code"] == "request_too_large"
    assert await agent.items() == before
    assert len((await agent.get())["required_actions"]) == 2
    rig.engine.reply = say("Done.")
    await agent.give(first, "a")
    await agent.give(first, "a")  # the answer was lost
    assert (await agent.give(first, "b", status=409))["code"] == "result_conflict"
    await agent.give(second, "b")
    await agent.until("idle")
    await agent.give(first, "a")
    assert (await agent.give(first, "b", status=409))["code"] == "result_conflict"
    assert len(rig.engine.submits) == 2
    rig.check_rest()


async def test_a_result_that_does_not_fit_into_the_context_is_given_back() -> None:
    rig = Rig(ScriptedEngine(max_model_len=700))
    agent = await created(rig, CALL, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    room = 700 - len(rig.engine.submits[0].tokens) // 4
    error = await agent.give(call, "x" * room, status=400)
    assert error["code"] == "context_length_exceeded"
    shown = await agent.get()
    assert (shown["status"], len(shown["required_actions"])) == ("requires_action", 1)
    rig.engine.reply = say("Ok.")
    await agent.give(call, "short")
    await agent.until("idle")
    assert [item["type"] for item in await agent.items()].count("function_call_output") == 1
    check_events(agent.events())
    rig.check_rest()


async def test_of_a_result_that_was_taken_before_the_model_reads_that_it_was_too_long() -> None:
    rig = Rig(ScriptedEngine(max_model_len=1100))
    agent = await created(rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    await agent.give(first, "x" * 1000)
    rig.engine.reply = say("Ok.")
    await agent.give(second, "noon")
    await agent.until("idle")
    assert "too long for the context" in agent.prompt()
    assert "noon" in agent.prompt()
    check_events(agent.events())
    rig.check_rest()


async def test_results_that_come_at_once_and_several_times_have_one_effect() -> None:
    rig = Rig()
    agent = await created(rig, TWO, input="Weather?")
    calls = (await agent.until("requires_action"))["required_actions"]
    rig.engine.reply = say("Done.")
    posts = [
        rig.post(f"{agent.path}/events", {"events": [result(call, f"{way}{n}")]})
        for way in ("same", "same", "other", "same", "same")
        for n, call in enumerate(calls)
    ]
    replies = await asyncio.gather(*posts)
    assert [reply.status_code for reply in replies].count(202) == 8
    assert {reply.json()["error"]["code"] for reply in replies if reply.content} == {"result_conflict"}
    await agent.until("idle")
    assert len(rig.engine.submits) == 2
    prompt = agent.prompt()
    assert (prompt.count("same0"), prompt.count("same1"), prompt.count("other")) == (1, 1, 0)
    check_events(agent.events())
    rig.check_rest()


async def test_one_turn_at_a_time() -> None:
    rig = Rig()
    script = say("Hello!", hold_at=2)
    agent = await created(rig, script, input="Hi")
    assert (await agent.say("No", status=409))["code"] == "turn_running"
    script.release.set()
    await agent.until("idle")
    rig.engine.reply = say(CALL)
    await agent.say("Weather?")
    await agent.until("requires_action")
    assert (await agent.say("No", status=409))["code"] == "turn_running"
    rig.check_rest()


async def test_cancel_in_every_state_leaves_the_session_usable() -> None:
    rig = Rig()
    agent = await created(rig)
    await agent.send(CANCEL)  # nothing runs
    await agent.say("Hi", says=say("Hello!", hold_at=2))
    await settled(lambda: "turn.output_text.delta" in agent.kinds())
    await agent.send(CANCEL)
    assert (await agent.get())["status"] == "idle"
    assert not rig.engine.live
    await agent.say("Hi", says="Hello!")
    await agent.until("idle")
    await agent.say("Go on", says=say("Hello!", hold_at=2))
    await settled(lambda: rig.engine.live)
    await agent.send(CANCEL)
    assert rig.context.directory.get("default", agent.id).left is None  # it is expected back
    await agent.say("Weather?", says=TWO)
    first, second = (await agent.until("requires_action"))["required_actions"]
    await agent.give(first, "rain")
    await agent.send(CANCEL)
    session = rig.context.directory.get("default", agent.id)
    assert session.state.value == "IDLE"
    assert rig.engine.parked[-1][2] is False
    error = await agent.give(second, status=400)
    assert error["message"] == f"Unknown pending tool call: {second['call_id']}"
    await agent.say("Never mind.", says="Fine.")
    await agent.until("idle")
    prompt = agent.prompt()
    assert (
        prompt.index("rain")
        < prompt.index("No result: the call was cancelled.")
        < prompt.index("Never mind.")
    )
    turns = (await agent.get("/turns?order=asc"))["data"]
    ends = ["cancelled", "completed", "cancelled", "cancelled", "completed"]
    assert [turn["status"] for turn in turns] == ends
    statuses = [item["status"] for item in await agent.items() if item["type"] == "function_call"]
    assert statuses == ["completed", "incomplete"]
    check_events(agent.events())
    rig.check_rest()


async def test_a_turn_that_fails_says_why() -> None:
    rig = Rig(ScriptedEngine(Script([], FinishReason.ERROR, "broke")))
    agent = await created(rig, input="Hi")
    await agent.until("idle")
    (turn,) = (await agent.get("/turns"))["data"]
    assert (turn["status"], turn["error"]["code"]) == ("failed", "server_error")
    assert agent.kinds()[-3:] == ["error", "turn.failed", "idle"]
    await agent.say("Again", says="Yes.")
    await agent.until("idle")
    await agent.say("Long", says=Script(list(b"word " * 3), FinishReason.LENGTH))
    await agent.until("idle")
    turn = (await agent.get("/turns"))["data"][0]
    assert turn["error"]["code"] == "max_output_tokens"
    check_events(agent.events())
    rig.check_rest()


async def test_sessions_are_listed_changed_and_deleted() -> None:
    rig = Rig()
    made = [await created(rig, metadata={"n": str(n)}) for n in range(3)]
    listed = (await rig.client.get(f"{SESSIONS}?limit=2")).json()
    assert [one["id"] for one in listed["data"]] == [made[2].id, made[1].id]
    assert listed["has_more"]
    rest = (await rig.client.get(f"{SESSIONS}?after={made[1].id}")).json()
    assert [one["id"] for one in rest["data"]] == [made[0].id]
    found = (await rig.client.get(SESSIONS, params={"metadata[n]": "1"})).json()
    assert [one["id"] for one in found["data"]] == [made[1].id]
    changed = await rig.post(
        made[0].path, {"metadata": None, "agent": {"tools": None, "reasoning": {"effort": "low"}}}
    )
    assert changed.status_code == 200, changed.text
    assert (changed.json()["metadata"], changed.json()["agent"]["tools"]) == ({}, [])
    assert changed.json()["agent"]["reasoning"]["effort"] == "low"
    gone = await rig.client.delete(made[0].path)
    assert gone.json()["deleted"] is True
    assert (await rig.client.get(made[0].path)).status_code == 404


async def test_saved_agents() -> None:
    rig = Rig()
    saved = (await rig.post("/v1/agents", {"model": "tiny", "name": "met", "tools": [WEATHER]})).json()
    path = f"/v1/agents/{saved['id']}"
    reply = await rig.post(SESSIONS, {"environment": {"type": "none"}, "agent_id": saved["id"]})
    session = reply.json()
    assert session["agent"]["id"] == saved["id"]
    assert session["agent"]["tools"] == saved["tools"]
    changed = (await rig.post(path, {"tools": None, "instructions": "Hm."})).json()
    assert (changed["tools"], changed["instructions"]) == ([], "Hm.")
    assert (await Agent(rig, session).get())["agent"]["tools"] == saved["tools"]
    override = {"environment": {"type": "none"}, "agent_id": saved["id"], "agent": {"tools": [NOW]}}
    assert [t["name"] for t in (await rig.post(SESSIONS, override)).json()["agent"]["tools"]] == ["now"]
    assert [one["id"] for one in (await rig.client.get("/v1/agents")).json()["data"]] == [saved["id"]]
    assert (await rig.client.delete(path)).json()["deleted"] is True
    assert (await rig.client.get(path)).status_code == 404
    assert (await rig.post(SESSIONS, override)).status_code == 404


async def test_what_cannot_be_is_refused_and_leaves_nothing() -> None:
    rig = Rig()
    bad: list[dict[str, Any]] = [
        {"agent": {"model": "tiny"}, "environment": {"type": "self_hosted"}},
        {"agent": {}, "environment": {"type": "none"}},
        body({"model": "other"}),
        body({"tools": [{"type": "function"}]}),
        body({"tools": [WEATHER, WEATHER]}),
        body({"tools": [{**WEATHER, "timeout": 0}]}),
        body({"tools": [{"type": "python", "name": "rm"}]}),
        body({"temperature": -1}),
        body({"max_output_tokens": 0}),
        body({"tools": [{**WEATHER, "name": "no spaces"}]}),
        body(input=""),
        body(input=[]),
        body(input="x" * 9000),
        body(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        body(metadata={str(n): "x" for n in range(17)}),
        body(stream=True),
        body({"text": {"format": {"type": "json_schema"}}}),
    ]
    for one in bad:
        reply = await rig.post(SESSIONS, one)
        assert reply.status_code in (400, 404), (one, reply.text)
        assert reply.json()["error"]["param"], one
    assert (await rig.client.get(SESSIONS)).json()["data"] == []
    assert len(rig.context.directory) == 0
    assert (await rig.client.get(f"{SESSIONS}/nope/events")).status_code == 404
