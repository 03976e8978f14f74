"""POST /v1/responses: what it answers, whole and as a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.types import FinishReason
from tests.api_rig import Rig, hermes, settled
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_not_to_be_run_says_so_also_before_others(client: Client, stream: bool) -> None:
    says = hermes("weather", '{"city": "a", "city": "b"}') + "\n" + CALL
    if stream:
        made = checked(await client.stream("x", says=says, tools=[WEATHER]))
    else:
        made = await client.create("x", says=says, tools=[WEATHER])
    assert [item["status"] for item in made["output"]] == ["incomplete", "completed"]
    assert made["status"] == "incomplete"
