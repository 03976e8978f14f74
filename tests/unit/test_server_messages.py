"""POST /v1/messages on a scripted engine: what it answers, and whose session it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import TOOLS, Rig, user
from tests.fakes import ScriptedEngine, say
from tests.messages_rig import CALL, TOOL, ask, minimal, refusal, usage_before
from tests.waiting_sessions import followed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    message = await ask(rig, stream=stream)
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello.", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert usage["input_tokens"] == len(unpack_tokens(rig.engine.submits[0].tokens))
    assert usage["output_tokens"] == len("Hello.") + 1
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_stops(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("one END two")))
    message = await ask(rig, stream=stream, stop_sequences=["END", "zwei"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert message["content"][0]["text"] == "one "
    message = await ask(rig, stream=stream, max_tokens=3)
    assert (message["stop_reason"], message["content"][0]["text"]) == ("max_tokens", "one")


async def test_an_answer_that_the_context_ends() -> None:
    rig = Rig(ScriptedEngine(say("0123456789" * 20), max_model_len=128))
    assert (await ask(rig, max_tokens=10_000))["stop_reason"] == "model_context_window_exceeded"
    assert (await ask(rig, max_tokens=4))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_round_trip_computes_only_what_is_new(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say("Let me see." + CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], stream=stream)
    assert first["stop_reason"] == "tool_use"
    words, call = first["content"]
    assert (words["text"], call["name"]) == ("Let me see.", "weather")
    arguments = json.loads(call.pop("partial")) if stream else call["input"]
    assert arguments == {"city": "Oslo"}
    [session] = rig.context.directory.sessions("default")
    assert list(session.pending) == [call["id"]]

    rig.engine.reply = say("It rains.")
    history = [
        user("Oslo?"),
        {"role": "assistant", "content": [words, call | {"input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"}]},
    ]
    second = await ask(rig, *history, tools=[TOOL], stream=stream)
    assert second["content"][0]["text"] == "It rains."
    one, two = rig.engine.submits
    assert (one.session, one.turn, two.turn) == (two.session, 1, 2)
    usage = second["usage"]
    size = len(unpack_tokens(two.tokens))
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size
    assert usage["cache_read_input_tokens"] == usage_before(first) + first["usage"]["output_tokens"]
    rig.check_rest()


async def test_a_call_by_order() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = await ask(rig, tools=[TOOL], tool_choice=choice)
    assert message["stop_reason"] == "tool_use"
    [form] = rig.grammars.asked
    assert (form.choice, form.named, form.parallel) == ("named", "weather", False)
    assert (await ask(rig, tools=[TOOL], tool_choice={"type": "none"}))["stop_reason"] == "end_turn"


async def test_an_output_format() -> None:
    rig = Rig(ScriptedEngine(say("{}")))
    schema = {"type": "object"}
    await ask(rig, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert (rig.grammars.asked[0].json, rig.grammars.asked[0].schema) == (True, schema)
    bad = minimal(output_config={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}})
    status, kind, message = await refusal(rig, bad)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("output_config.format: ")


async def test_an_answer_goes_on_from_the_last_turn() -> None:
    rig = Rig(ScriptedEngine(say("B)")))
    await ask(rig, user("?"), {"role": "assistant", "content": "The best is ("})
    assert rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[0].tokens)).endswith("The best is (")


async def test_a_session_goes_on_in_the_other_dialect() -> None:
    rig = Rig(ScriptedEngine(say("Let me see. " + CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], session_id="s")
    words, call = first["content"]
    rig.engine.reply = say("It rains.")
    assistant = {
        "role": "assistant",
        "content": words["text"],
        "tool_calls": [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": "weather", "arguments": json.dumps(call["input"])},
            }
        ],
    }
    history = [user("Oslo?"), assistant, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    chat = await rig.chat(history, tools=[{"type": "function", "function": {"name": "weather"}}, TOOLS[1]])
    assert chat["session_id"] == "s"
    rig.engine.reply = say("Yes.")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    back = [
        user("Oslo?"),
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It rains."},
        user("Sure?"),
    ]
    await ask(rig, *back, tools=[TOOL])
    assert [submit.turn for submit in rig.engine.submits] == [1, 2, 3]
    assert len({submit.session for submit in rig.engine.submits}) == 1


async def test_a_result_brought_by_its_own_route() -> None:
    rig = Rig(ScriptedEngine(say(CALL)))
    first = await ask(rig, user("Oslo?"), tools=[TOOL], session_id="s")
    rig.engine.reply = say("It rains.")
    result = {"call_id": first["content"][0]["id"], "content": "rain"}
    reply = await rig.post("/agentserve/sessions/s/tool_results", result)
    assert reply.json()["choices"][0]["message"]["content"] == "It rains."


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 1),
        ({"cache_control": {"type": "ephemeral"}}, 0),
        ({"tools": [TOOL | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 1),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 1),
        ({"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]}, 0),
    ],
)
async def test_an_hour_is_worth_more_than_five_minutes(fields: Any, priority: int) -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    await ask(rig, session_id="s", **fields)
    assert rig.engine.hints[-1].priority == priority


async def test_an_hour_holds_until_a_request_comes_without_it_and_readers_hear_of_both() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    hour = {"type": "ephemeral", "ttl": "1h"}
    history = [user("hi")]
    for mark in (hour, hour, None, None):
        more = {} if mark is None else {"cache_control": mark}
        await ask(rig, *history, session_id="s", **more)
        history += [{"role": "assistant", "content": "Hello."}, user("more")]
    assert [hints.priority for hints in rig.engine.hints] == [1, 1, 0, 0]
    said = [event for event in await followed(rig, "s") if event.kind == "hints"]
    receipts = [event.data["receipts"]["priority"] for event in said]
    assert [(receipt["status"], receipt["value"]) for receipt in receipts] == [
        ("deferred", 1),
        ("accepted", None),
    ]


async def test_a_priority_that_its_client_gave_meanwhile_is_not_taken_back() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    await ask(rig, session_id="s", cache_control={"type": "ephemeral", "ttl": "1h"})
    await rig.post("/agentserve/sessions/s/hints", {"priority": 2})
    history = [user("hi"), {"role": "assistant", "content": "Hello."}, user("b")]
    await ask(rig, *history, session_id="s")
    assert rig.engine.hints[-1].priority == 2


async def test_a_priority_that_was_given_stays() -> None:
    rig = Rig(ScriptedEngine(say("Hello.")))
    await ask(rig, session_id="s")
    await rig.post("/agentserve/sessions/s/hints", {"priority": -1})
    history = [user("hi"), {"role": "assistant", "content": "Hello."}, user("b")]
    await ask(rig, *history, session_id="s", cache_control={"type": "ephemeral", "ttl": "1h"})
    assert rig.engine.hints[-1].priority == -1
