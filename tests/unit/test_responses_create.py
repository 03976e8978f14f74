"""POST /v1/responses: what it answers, whole and as a stream, and whose session it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.messages import unpack_tokens
from agentserve.server.http.responses.schemas import ResponsesRequest
from agentserve.types import FinishReason
from tests.api_rig import Rig, hermes, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.responses_rig import CALL, RESPONSES, WEATHER, Client, call_of, checked, parsed, result, text_of


@pytest.fixture
def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello!")))


@pytest.fixture
def client(rig: Rig) -> Client:
    return Client(rig)


async def test_a_text(client: Client) -> None:
    response = await client.create("hi", metadata={"a": "b"}, user="me", temperature=0.5)
    [message] = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [
        {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    ]
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert (response["metadata"], response["user"], response["temperature"]) == ({"a": "b"}, "me", 0.5)
    prompt = len(client.rig.engine.submits[0].tokens) // 4
    assert response["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": prompt},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 7,
    }
    client.rig.check_rest()


@pytest.mark.parametrize(
    "says", ["Hello!", CALL, "Look: " + CALL + " done", CALL + hermes("weather", "{}"), ""]
)
async def test_a_stream_ends_in_the_whole_reply(client: Client, says: str) -> None:
    whole = await client.create("hi", says=says, tools=[WEATHER])
    events = await client.stream("hi", says=says, tools=[WEATHER])
    streamed = checked(events)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None

    def bare(response: Any) -> Any:
        """Without what differs from request to request."""
        items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
        left = ("id", "session_id", "created_at", "completed_at", "usage")
        return {k: v for k, v in response.items() if k not in left} | {"output": items}

    assert bare(streamed) == bare(whole)
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    client.rig.check_rest()


async def test_the_exact_events_of_a_text_and_a_call(client: Client) -> None:
    says = Script(list(b"Ah" + CALL.encode()))
    kinds = [event["type"] for event in (await client.stream("x", says=says, tools=[WEATHER]))[:-1]]
    merged = [kind for i, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[i - 1] == kind)]
    assert merged == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_tool_round_trip_stays_in_its_session(client: Client) -> None:
    first = await client.create("Weather?", says="Let me see. " + CALL, tools=[WEATHER])
    call = call_of(first)
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo"}')
    second = await client.create(
        [result(call)], says="It rains.", tools=[WEATHER], previous_response_id=first["id"]
    )
    assert text_of(second) == "It rains."
    assert second["previous_response_id"] == first["id"]
    one, two = (unpack_tokens(submit.tokens) for submit in client.rig.engine.submits)
    assert two[: len(one)] == one
    assert len({submit.session for submit in client.rig.engine.submits}) == 1
    assert second["session_id"] == first["session_id"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > len(one)


async def test_a_whole_history_goes_on_in_its_session_too(client: Client) -> None:
    """As agents send it that keep their own state: easy messages, items without ids, outputs as parts."""
    history: list[Any] = [user("Weather?")]
    first = await client.create(history, says="Hm. " + CALL, tools=[WEATHER], store=False)
    history += [{k: v for k, v in item.items() if k not in ("id", "status")} for item in first["output"]]
    history.append(result(call_of(first), [{"type": "input_text", "text": "rain"}]))
    second = await client.create(history, says="It rains.", tools=[WEATHER], store=False)
    assert second["session_id"] == first["session_id"]
    history += second["output"] + [user("Thanks.")]
    third = await client.create(history, says="Welcome.", tools=[WEATHER], store=False)
    assert third["session_id"] == first["session_id"]
    assert [submit.turn for submit in client.rig.engine.submits] == [1, 2, 3]


async def test_text_after_a_call_comes_back_as_it_was_said(client: Client) -> None:
    first = await client.create("x", says="a " + CALL + " b " + CALL, tools=[WEATHER])
    kinds = [item["type"] for item in first["output"]]
    assert kinds[:2] == ["message", "function_call"]
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    second = await client.create([*map(result, calls)], tools=[WEATHER], previous_response_id=first["id"])
    assert second["session_id"] == first["session_id"]
    assert client.rig.engine.submits[1].turn == 2


async def test_a_chain_has_everything_before_it(client: Client) -> None:
    first = await client.create("one", says="first", instructions="Be brief.")
    second = await client.create("two", says="second", previous_response_id=first["id"])
    third = await client.create(
        "three", says="third", previous_response_id=second["id"], instructions="Be long."
    )
    prompt = bytes(t for t in unpack_tokens(client.rig.engine.submits[2].tokens) if t < 256).decode()
    assert [prompt.index(word) for word in ("Be long.", "one", "first", "two", "second", "three")] == sorted(
        prompt.index(word) for word in ("Be long.", "one", "first", "two", "second", "three")
    )
    assert "Be brief." not in prompt
    assert third["instructions"] == "Be long."


async def test_a_chain_whose_session_is_gone_is_computed_again(client: Client) -> None:
    first = await client.create("one", says="first")
    deleted = await client.rig.client.delete(f"/agentserve/sessions/{first['session_id']}")
    assert deleted.status_code == 200
    second = await client.create("two", says="second", previous_response_id=first["id"])
    assert text_of(second) == "second"
    assert second["session_id"] != first["session_id"]


async def test_a_chain_that_branches(client: Client) -> None:
    first = await client.create("one", says="first")
    left = await client.create("left", says="l", previous_response_id=first["id"])
    right = await client.create("right", says="r", previous_response_id=first["id"])
    assert left["session_id"] == first["session_id"]
    assert right["session_id"] != first["session_id"]
    assert right["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_max_output_tokens(client: Client) -> None:
    response = await client.create("hi", says="A long text.", max_output_tokens=4)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][-1]["status"] == "incomplete"
    assert text_of(response) == "A lo"
    assert response["completed_at"] is None
    events = await client.stream("hi", says="A long text.", max_output_tokens=4)
    assert checked(events)["status"] == "incomplete"
    assert events[-2]["type"] == "response.incomplete"


async def test_a_call_that_was_cut_can_be_gone_on_from(client: Client) -> None:
    first = await client.create("x", says=CALL, tools=[WEATHER], max_output_tokens=len(CALL) - 18)
    call = call_of(first)
    assert (first["status"], call["status"]) == ("incomplete", "incomplete")
    with pytest.raises(ValueError):
        json.loads(call["arguments"])
    second = await client.create("go on", says="ok", tools=[WEATHER], previous_response_id=first["id"])
    assert second["session_id"] == first["session_id"]
    await client.rig.client.delete(f"/agentserve/sessions/{first['session_id']}")
    third = await client.create("go on", says="ok", tools=[WEATHER], previous_response_id=first["id"])
    assert text_of(third) == "ok"


async def test_logprobs(client: Client) -> None:
    response = await client.create("hi", says="Hey", include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = response["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["H", "e", "y"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    events = await client.stream("hi", says="Hey", top_logprobs=1)
    told = [p for e in events[:-1] if e["type"] == "response.output_text.delta" for p in e["logprobs"]]
    assert [one["token"] for one in told] == ["H", "e", "y"]
    checked(events)


async def test_tools_of_all_kinds(client: Client) -> None:
    group = {"type": "namespace", "name": "mcp.files", "tools": [{"type": "function", "name": "read"}]}
    tools = [{"type": "web_search"}, group, {"type": "custom", "name": "apply_patch"}, WEATHER]
    response = await client.create("x", says=hermes("mcp_files__read", "{}"), tools=tools)
    call = call_of(response)
    assert (call["name"], call["namespace"]) == ("read", "mcp.files")
    assert response["tools"] == [group, WEATHER]
    prompt = bytes(t for t in unpack_tokens(client.rig.engine.submits[0].tokens) if t < 256)
    assert b"mcp_files__read" in prompt
    assert b"apply_patch" not in prompt
    second = await client.create([result(call)], tools=tools, previous_response_id=response["id"])
    assert second["session_id"] == response["session_id"]


async def test_tool_choices(client: Client) -> None:
    other = {"type": "function", "name": "other"}
    asked = client.rig.grammars.asked
    await client.create(
        "x", says=CALL, tools=[WEATHER, other], tool_choice={"type": "function", "name": "weather"}
    )
    assert (asked[-1].choice, asked[-1].named) == ("named", "weather")
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}],
    }
    response = await client.create("x", says=CALL, tools=[WEATHER, other], tool_choice=allowed)
    assert asked[-1].choice == "required"
    assert asked[-1].allowed == ("weather",)
    assert len(asked[-1].tools) == 2  # the prompt shows all, so that its prefix stays
    assert response["tool_choice"] == allowed
    await client.create("x", says=CALL, tools=[WEATHER], parallel_tool_calls=False)
    assert asked[-1].parallel is False
    none = await client.create("x", says=CALL, tools=[WEATHER], tool_choice="none")
    assert text_of(none) == CALL


async def test_text_formats(client: Client) -> None:
    schema = {"type": "object", "properties": {}}
    wanted = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    response = await client.create("x", says="{}", text={"format": wanted, "verbosity": "low"})
    form = client.rig.grammars.asked[-1]
    assert (form.json, form.schema, form.strict_schema) == (True, schema, True)
    assert response["text"] == {"format": wanted | {"description": None}, "verbosity": "low"}
    await client.create("x", says="{}", text={"format": {"type": "json_object"}})
    assert client.rig.grammars.asked[-1].json
    error = await client.refused(
        "x", text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}
    )
    assert error["param"].startswith("text.format")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "message", "role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        (
            {"input": [user("x"), {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[1].content[0].type",
        ),
        ({"input": [user("x"), result({"call_id": "nobody"})]}, "input[1].tool_call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{]"}]},
            "input[0].tool_calls[0].function.arguments",
        ),
        ({"input": []}, "input"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": [{"type": "web_search"}, WEATHER | {"name": "a b"}]}, "tools[1].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
        ),
        ({"input": "x", "temperature": 9}, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 99}, "top_logprobs"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "metadata": {"k": "v" * 600}}, "metadata"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"input": 7}, "input"),
        ({"input": "x", "model": None}, "model"),
    ],
)
async def test_refusals_name_the_place(client: Client, fields: Any, param: str) -> None:
    reply = await client.rig.post(RESPONSES, {"model": "tiny", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert reply.headers["x-should-retry"] == "false"
    assert not client.rig.engine.submits
    assert not client.rig.context.responses.shelf


async def test_what_is_not_there(client: Client) -> None:
    assert (await client.refused("x", 404, previous_response_id="resp_no"))["code"] == (
        "previous_response_not_found"
    )
    assert (await client.refused("x", 404, conversation="conv_no"))["code"] == "conversation_not_found"
    assert (await client.refused([{"type": "item_reference", "id": "msg_no"}], 404))["code"] == (
        "item_not_found"
    )
    assert (await client.refused("x", 404, model="other"))["code"] == "model_not_found"
    reply = await client.rig.post("/v1/responses/compact", {"model": "tiny", "input": "x"})
    assert reply.status_code == 404


async def test_references_stand_for_items_of_other_responses(client: Client) -> None:
    first = await client.create("one", says="first")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    await client.create([user("one"), reference, user("two")], says="second")
    submits = client.rig.engine.submits
    assert submits[0].session == submits[1].session
    again = await client.create([reference, user("two")], says="x", previous_response_id=first["id"])
    prompt = bytes(t for t in unpack_tokens(submits[2].tokens) if t < 256)
    assert prompt.count(b"first") == 1
    assert again["status"] == "completed"


async def test_kinds_of_items_that_mean_nothing_here_are_skipped(client: Client) -> None:
    items = [user("hi"), {"type": "web_search_call", "id": "ws_1", "status": "completed"}, user("there")]
    response = await client.create(items)
    kept = await client.get(f"{RESPONSES}/{response['id']}/input_items?order=asc")
    assert [item["type"] for item in kept["data"]] == ["message", "message"]


async def test_a_prompt_that_is_too_long(client: Client) -> None:
    rig = Rig(ScriptedEngine(say("ok"), max_model_len=200))
    client = Client(rig)
    error = await client.refused("x" * 300)
    assert error["code"] == "context_length_exceeded"
    events = await client.stream("x" * 150 + " " + "y" * 150)
    final = checked(events)
    assert (final["status"], final["error"]["code"]) == ("failed", "context_length_exceeded")
    assert not rig.engine.submits
    turns = [
        part for i in range(30) for part in (user(f"question {i}"), {"role": "assistant", "content": "a"})
    ]
    asked = [{"role": "system", "content": "rules"}, *turns, user("last")]
    assert (await client.refused(asked))["code"] == "context_length_exceeded"
    response = await client.create(asked, truncation="auto")
    assert response["status"] == "completed"
    prompt = bytes(t for t in unpack_tokens(rig.engine.submits[0].tokens) if t < 256)
    assert b"rules" in prompt
    assert b"last" in prompt
    assert b"question 0" not in prompt
    assert (await client.refused("x" * 300, truncation="auto"))["code"] == "context_length_exceeded"


async def test_failures_while_it_runs(client: Client) -> None:
    broken = Script(list(b"Hel"), reason=FinishReason.ERROR, error="the kernel failed")
    events = await client.stream("x", says=broken)
    final = checked(events)
    assert (final["status"], final["output"]) == ("failed", [])
    assert final["error"] == {"code": "server_error", "message": "the kernel failed"}
    assert (await client.get(f"{RESPONSES}/{final['id']}"))["status"] == "failed"
    error = await client.refused("x", 500)
    assert "kernel" in error["message"]
    refused = Script([], reason=FinishReason.REFUSED, error="it cannot fit")
    client.rig.engine.reply = refused
    assert (await client.refused("x", stream=True))["message"] == "it cannot fit"
    client.rig.check_rest()


async def test_a_client_that_leaves_takes_its_turn_with_it(rig: Rig, client: Client) -> None:
    script = say("Hello!", hold_at=2)
    rig.engine.reply = script
    body = {"model": "tiny", "input": "x", "stream": True}
    task = asyncio.create_task(rig.post(RESPONSES, body))
    await settled(lambda: rig.engine.live)
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await settled(lambda: not rig.engine.live)
    rig.check_rest()
    assert not rig.context.responses.shelf


async def test_nothing_is_kept_where_that_is_asked(client: Client) -> None:
    response = await client.create("x", store=False)
    assert response["store"] is False
    await client.get(f"{RESPONSES}/{response['id']}", 404)
    assert not client.rig.context.responses.shelf


async def test_input_tokens(client: Client) -> None:
    fields = {"instructions": "Be brief.", "tools": [WEATHER]}
    counted = await client.rig.post(f"{RESPONSES}/input_tokens", {"input": "hi", **fields})
    response = await client.create("hi", **fields)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": response["usage"]["input_tokens"],
    }


@pytest.mark.parametrize("background", [False, True])
async def test_a_silent_stream_repeats_that_it_goes_on(background: bool) -> None:
    class Clock:
        at = 0.0

        def now(self) -> float:
            return self.at

    clock = Clock()
    rig = Rig(ScriptedEngine(), clock=clock, keep_alive_seconds=0.001)
    script = say("Hello!", hold_at=2)
    rig.engine.reply = script
    body = {"model": "tiny", "input": "x", "stream": True, "background": background}
    task = asyncio.create_task(rig.post(RESPONSES, body))
    await settled(lambda: rig.engine.live)
    await asyncio.sleep(0.02)
    clock.at = 50.0
    await asyncio.sleep(0.02)
    script.release.set()
    reply = await task
    events = parsed(reply.content)
    kinds = [event["type"] for event in events[:-1]]
    assert kinds.count("response.in_progress") == 2
    assert b": keep-alive" in reply.content
    assert checked(events)["status"] == "completed"


async def test_a_session_goes_from_one_dialect_to_the_other(client: Client) -> None:
    chat_tool = {
        "type": "function",
        "function": {k: WEATHER[k] for k in ("name", "description", "parameters")},
    }
    client.rig.engine.reply = say("Hm. " + CALL)
    first = await client.rig.chat([user("Weather?")], tools=[chat_tool])
    [call] = first["choices"][0]["message"]["tool_calls"]
    items = [
        user("Weather?"),
        {"role": "assistant", "content": "Hm."},
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": "weather",
            "arguments": call["function"]["arguments"],
        },
        {"type": "function_call_output", "call_id": call["id"], "output": "rain"},
    ]
    second = await client.create(items, says="It rains.", tools=[WEATHER])
    assert second["session_id"] == first["session_id"]
    history = [
        user("Weather?"),
        first["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        user("Thanks."),
    ]
    third = await client.rig.chat(history, tools=[chat_tool])
    assert third["session_id"] == first["session_id"]
    # And by the session's own route, after a call that a response made.
    fourth = await client.create(
        [*items, {"role": "assistant", "content": "It rains."}, user("Thanks."), user("And now?")],
        says=CALL,
        tools=[WEATHER],
    )
    path = f"/agentserve/sessions/{fourth['session_id']}/tool_results"
    client.rig.engine.reply = say("Sun.")
    body = {"call_id": call_of(fourth)["call_id"], "content": "sun"}
    reply = (await client.rig.post(path, body)).json()
    assert reply["choices"][0]["message"]["content"] == "Sun."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = tuple(field for field in ResponsesRequest.__struct_fields__ if field not in ("model", "background"))
LIKELY = st.sampled_from(
    [
        True,
        "auto",
        "required",
        [WEATHER],
        [{"type": "namespace", "name": "n", "tools": [WEATHER]}],
        {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]},
        {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        {"effort": "low"},
        {"prewarm": True, "comparison_response_id": "x"},
        [user("x"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        ["message.output_text.logprobs"],
        5,
    ]
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | LIKELY, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_body_is_a_fault_of_ours(body: dict[str, Any], as_input: bool) -> None:
    async def run() -> None:
        rig = Rig(ScriptedEngine(say("Hello!")))
        sent = {"model": "tiny", **({"input": "hi"} if as_input else {}), **body}
        reply = await rig.post(RESPONSES, sent)
        assert reply.status_code < 500, reply.text
        if reply.status_code == 200 and body.get("stream") is True:
            checked(parsed(reply.content))
        else:
            assert reply.json()["object"] if reply.status_code == 200 else reply.json()["error"]["message"]
        rig.check_rest()
        assert not rig.context.responses.conversations.busy

    asyncio.run(run())
