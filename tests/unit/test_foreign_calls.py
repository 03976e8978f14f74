"""Calls in histories that no model of ours may have written: arguments that are no JSON object, results
that are missing or late."""

from __future__ import annotations

from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import CHAT, TOOLS, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import CALL, TOOL, ask, refusal

RESPONSES = "/v1/responses"


def shown(rig: Rig) -> str:
    return bytes(t for t in unpack_tokens(rig.engine.submits[-1].tokens) if t < 256).decode()


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": id_, "type": "function", "function": {"name": "now", "arguments": text}} for id_, text in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(id_: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


def item(id_: str, arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "now", "arguments": arguments, **more}


def output(id_: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": text}


@pytest.mark.parametrize("said", ['{"a": "x', "[1]", "sunny", '"x"', '{"a": NaN}'])
async def test_arguments_that_are_no_object_are_text_and_the_session_goes_on(said: str) -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    history = [user("a"), called(("c1", said), ("c2", "{}")), result("c1", "bad"), result("c2", "noon")]
    first = await rig.chat(history, tools=TOOLS)
    prompt = shown(rig)
    assert prompt.index(f'{{"name": "now", "arguments": {said}') < prompt.index("noon") < prompt.index("bad")
    counted = await rig.post("/tokenize", {"messages": history, "tools": TOOLS})
    assert counted.json()["count"] == len(unpack_tokens(rig.engine.submits[-1].tokens))
    history += [{"role": "assistant", "content": "ok"}, user("b")]
    second = await rig.chat(history, tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    assert shown(rig).startswith(prompt)


async def test_of_the_responses_api_too() -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    for more in ({}, {"status": "incomplete"}):
        items = [user("a"), item("c1", '{"a": "x', **more), output("c1", "bad"), user("b")]
        reply = await rig.post(RESPONSES, {"model": "tiny", "input": items})
        assert reply.status_code == 200, reply.text
        assert shown(rig).index('"arguments": {"a": "x') < shown(rig).index("bad")


async def test_of_the_messages_api_an_input_is_an_object() -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    turns = [
        user("a"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]},
        user("b"),
    ]
    told = await refusal(rig, {"model": "tiny", "max_tokens": 9, "messages": turns})
    assert told[::2] == (400, "messages[1].content[0].input: must be an object")
    turns[1]["content"][0]["input"] = {}
    status, _, message = await refusal(rig, {"model": "tiny", "max_tokens": 9, "messages": turns})
    assert (status, message.partition(";")[0]) == (400, "messages[1]: no result for 't'")
    turns[2]["content"] = [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]
    assert (await ask(rig, *turns))["stop_reason"] == "end_turn"


@pytest.mark.parametrize("behind", [[], [user("b")], [result("c1", "r")], [result("c1", "r"), user("b")]])
async def test_a_call_without_a_result_is_refused_however_many_are_missing(behind: list[Any]) -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    history = [user("a"), called(("c1", "{}"), ("c2", "{}")), *behind]
    reply = await rig.post(CHAT, {"messages": history, "tools": TOOLS})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "missing_tool_result")
    assert error["param"] == "messages[1].tool_calls"
    rig.check_rest()


async def test_in_a_conversation_a_late_result_finds_its_call() -> None:
    rig = Rig(ScriptedEngine(say("ok")))
    items = [user("a"), item("c1"), item("c2"), user("meanwhile")]
    made = (await rig.post("/v1/conversations", {"items": items})).json()
    body = {"model": "tiny", "conversation": made["id"], "input": [output("c2", "two")]}
    refused = (await rig.post(RESPONSES, body)).json()["error"]
    assert (refused["code"], refused["param"]) == ("missing_tool_result", "input")
    assert refused["message"].startswith("input: no result for 'c1'; put a function_call_output for it into")
    body["input"] = [output("c2", "two"), output("c1", "one"), user("at last")]
    reply = await rig.post(RESPONSES, body)
    assert reply.status_code == 200, reply.text
    order = [shown(rig).index(text) for text in ("one", "two", "meanwhile", "at last")]
    assert order == sorted(order)


async def test_a_half_input_that_an_sdk_closed_does_not_stop_its_session() -> None:
    """Streams of the Messages API tell of a call that was cut, and SDKs close its JSON."""
    rig = Rig(ScriptedEngine(say(CALL.split("slo")[0])))
    told = await ask(rig, user("a"), tools=[TOOL], stream=True)
    assert told["stop_reason"] != "tool_use"
    use = {**told["content"][-1], "input": {"city": "Os"}}
    rig.engine.reply = say("ok")
    turns = [user("a"), {"role": "assistant", "content": [use]}, user("go on")]
    assert (await ask(rig, *turns, tools=[TOOL]))["content"][0]["text"] == "ok"
    one, two = rig.engine.submits
    assert one.session == two.session
    assert unpack_tokens(two.tokens)[: len(unpack_tokens(one.tokens))] == unpack_tokens(one.tokens)
