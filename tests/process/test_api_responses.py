"""The unmodified openai SDK, its agents framework and llm-comply against a real socket, with a scripted
model behind it; and requests in the shape that Codex sends them in."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from agentserve.messages import Submit, unpack_tokens
from agentserve.types import FinishReason
from tests.api_rig import Rig, hermes, served, settled, user
from tests.fakes import Script, ScriptedEngine, say
from tests.responses_rig import CALL, RESPONSES, WEATHER, checked, parsed

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello from here.")))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(rig.app) as base, openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x") as made:
        yield made


def text_in(submit: Submit) -> str:
    return bytes(token for token in unpack_tokens(submit.tokens) if token < 256).decode()


async def test_a_response_is_of_the_types_that_the_sdk_has(rig: Rig, client: openai.AsyncOpenAI) -> None:
    raw = await client.responses.with_raw_response.create(
        model="tiny", input="hi", tools=[WEATHER], include=["message.output_text.logprobs"], top_logprobs=1
    )
    Response.model_validate(raw.http_response.json(), strict=True)
    reply = raw.parse()
    assert reply.output_text == "Hello from here."
    assert reply.usage is not None
    assert reply.usage.output_tokens == len("Hello from here.") + 1
    assert reply.usage.input_tokens_details.cache_write_tokens == reply.usage.input_tokens
    again = await client.responses.retrieve(reply.id)
    assert again == reply
    items = [item async for item in client.responses.input_items.list(reply.id)]
    assert [item.type for item in items] == ["message"]
    await client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(reply.id)


async def test_every_event_is_of_a_type_that_the_sdk_has(rig: Rig) -> None:
    rig.engine.reply = say("Ah. " + CALL)
    body = {"model": "tiny", "input": "x", "tools": [WEATHER], "stream": True}
    events = parsed((await rig.post(RESPONSES, body)).content)
    for event in events[:-1]:
        EVENT.validate_python(event, strict=True)
    checked(events)


async def test_a_streamed_tool_round_trip(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.reply = say("Let me see. " + CALL)
    async with client.responses.stream(model="tiny", input="Weather in Oslo?", tools=[WEATHER]) as stream:
        pieces = [e.delta async for e in stream if e.type == "response.function_call_arguments.delta"]
        first = await stream.get_final_response()
    message, call = first.output
    assert "".join(pieces) == call.arguments == '{"city": "Oslo"}'
    assert message.content[0].text == "Let me see."
    assert len(pieces) > 2
    rig.engine.reply = say("It rains.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    async with client.responses.stream(
        model="tiny", input=[result], tools=[WEATHER], previous_response_id=first.id
    ) as stream:
        second = await stream.get_final_response()
    assert second.output_text == "It rains."
    assert len({submit.session for submit in rig.engine.submits}) == 1
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > len(one)
    rig.check_rest()


async def test_closing_a_stream_cancels_its_turn(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.reply = say("Hello from here.", hold_at=5)
    stream = await client.responses.create(model="tiny", input="hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await settled(lambda: rig.engine.aborted)
    await settled(lambda: not rig.engine.live)
    rig.check_rest()


async def test_background_polling_streaming_and_cancelling(rig: Rig, client: openai.AsyncOpenAI) -> None:
    script = say("Hello from here.", hold_at=5)
    rig.engine.reply = script
    made = await client.responses.create(model="tiny", input="hi", background=True)
    assert made.status == "queued"
    await settled(lambda: rig.engine.live)
    seen: list[Any] = []
    stream = await client.responses.retrieve(made.id, stream=True, starting_after=1)
    async for event in stream:
        seen.append(event)
        script.release.set()
    assert [event.sequence_number for event in seen] == list(range(2, 2 + len(seen)))
    assert (await client.responses.retrieve(made.id)).output_text == "Hello from here."
    rig.engine.reply = say("Hello from here.", hold_at=5)
    stopped = await client.responses.create(model="tiny", input="hi", background=True)
    await settled(lambda: rig.engine.live)
    assert (await client.responses.cancel(stopped.id)).status == "cancelled"
    rig.check_rest()


async def test_conversations(rig: Rig, client: openai.AsyncOpenAI) -> None:
    made = await client.conversations.create(items=[user("My name is Ann.")], metadata={"a": "b"})
    reply = await client.responses.create(model="tiny", input="Hi", conversation=made.id)
    assert reply.conversation is not None
    assert reply.conversation.id == made.id
    items = [item async for item in client.conversations.items.list(made.id, order="asc")]
    assert [item.role for item in items] == ["user", "user", "assistant"]
    added = await client.conversations.items.create(made.id, items=[user("More.")])
    await client.conversations.items.delete(added.data[0].id, conversation_id=made.id)
    one = await client.conversations.items.retrieve(items[0].id, conversation_id=made.id)
    assert one == items[0]
    assert (await client.conversations.update(made.id, metadata={"c": "d"})).metadata == {"c": "d"}
    assert (await client.conversations.delete(made.id)).deleted


async def test_counting_and_errors(rig: Rig, client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input="hi", instructions="Brief.")
    reply = await client.responses.create(model="tiny", input="hi", instructions="Brief.")
    assert reply.usage is not None
    assert counted.input_tokens == reply.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(model="tiny", input="hi", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="tiny", input="hi", previous_response_id="resp_0")
    rig.engine.reply = Script([], error="it cannot fit", reason=FinishReason.REFUSED)
    with pytest.raises(openai.BadRequestError, match="cannot fit"):
        await client.responses.create(model="tiny", input="hi", stream=True)


async def test_structured_output(rig: Rig, client: openai.AsyncOpenAI) -> None:
    class City(pydantic.BaseModel):
        name: str

    rig.engine.reply = say('{"name": "Oslo"}')
    reply = await client.responses.parse(model="tiny", input="Which city?", text_format=City)
    assert reply.output_parsed == City(name="Oslo")
    assert rig.grammars.asked[-1].strict_schema


CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent. " * 20,
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "mcp__files",
            "tools": [{"type": "function", "name": "list", "parameters": {"type": "object"}}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "prompt_cache_key": "0193c9ee-4b6f-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}


async def test_codex_computes_only_what_is_new_in_its_second_turn(rig: Rig) -> None:
    """It keeps its own history and sends all of it, items without ids and without status."""
    headers = {"thread-id": "0193c9ee", "originator": "codex_cli_rs", "accept": "text/event-stream"}
    texts = iter(
        ["I look. " + hermes("shell", '{"command": ["ls"]}'), hermes("mcp__files__list", "{}"), "Done."]
    )
    rig.engine.reply = lambda submit: say(next(texts))
    history: list[Any] = [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is here?"}]},
    ]
    finals: list[Any] = []
    for _ in range(3):
        reply = await rig.post(RESPONSES, CODEX | {"input": history}, headers)
        assert reply.status_code == 200, reply.text
        events = parsed(reply.content)
        finals.append(checked(events))
        done = [event["item"] for event in events[:-1] if event["type"] == "response.output_item.done"]
        history += [{k: v for k, v in item.items() if k not in ("id", "status")} for item in done]
        history += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "a.py\nb.py"}
            for item in done
            if item["type"] == "function_call"
        ]
    assert [submit.turn for submit in rig.engine.submits] == [1, 2, 3]
    assert len({submit.session for submit in rig.engine.submits}) == 1
    for before, after, final in zip(rig.engine.submits, rig.engine.submits[1:], finals[1:], strict=False):
        known = len(unpack_tokens(before.tokens))
        assert unpack_tokens(after.tokens)[:known] == unpack_tokens(before.tokens)
        fresh = final["usage"]["input_tokens"] - final["usage"]["input_tokens_details"]["cached_tokens"]
        assert fresh < len("a.py\nb.py") + 60
    assert finals[1]["output"][0]["namespace"] == "mcp__files"
    rig.check_rest()


async def test_an_agent_of_the_agents_framework_runs_its_tool(rig: Rig, client: openai.AsyncOpenAI) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    texts = iter([hermes("weather", '{"city": "Oslo"}'), "It rains in Oslo."] * 2)
    rig.engine.reply = lambda submit: say(next(texts))
    asked: list[str] = []

    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
    agent = agents.Agent(
        name="Forecaster", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)]
    )
    done = await agents.Runner.run(agent, "Weather in Oslo?")
    assert (done.final_output, asked) == ("It rains in Oslo.", ["Oslo"])
    assert len({submit.session for submit in rig.engine.submits}) == 1
    streamed = agents.Runner.run_streamed(agent, [*done.to_input_list(), user("And now?")])
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == "It rains in Oslo."
    assert [submit.turn for submit in rig.engine.submits] == [1, 2, 3, 4]
    assert len({submit.session for submit in rig.engine.submits}) == 1
    rig.check_rest()


async def test_an_agent_whose_memory_is_a_conversation(rig: Rig, client: openai.AsyncOpenAI) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    memory = agents.OpenAIConversationsSession(openai_client=client)
    model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
    agent = agents.Agent(name="Forecaster", instructions="Be brief.", model=model)
    for word in ("first", "second"):
        rig.engine.reply = say(word)
        done = await agents.Runner.run(agent, f"Say {word}.", session=memory)
        assert done.final_output == word
    assert len(await memory.get_items()) == 4
    assert [submit.turn for submit in rig.engine.submits] == [1, 2]
    await memory.clear_session()
    rig.check_rest()


async def test_llm_comply_passes_but_for_images(rig: Rig) -> None:
    """Its image is refused, which is the honest answer of a server that has no eyes; compaction, which
    the specification leaves open, is a 404."""
    pytest.importorskip("llm_comply")
    weather = hermes("get_weather", '{"location": "San Francisco"}')
    rig.engine.reply = lambda submit: say(weather if "get_weather" in text_in(submit) else "Hello there.")
    async with served(rig.app) as base:
        command = [
            sys.executable,
            "-m",
            "llm_comply.cli",
            "-u",
            f"{base}/v1",
            "-k",
            "x",
            "-m",
            "tiny",
            "--json",
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
    results = json.loads(out)
    found = {one["id"]: one["status"] for one in results["results"]}
    assert {name for name, status in found.items() if status == "failed"} == {"image-input"}, results
    assert {name for name, status in found.items() if status == "skipped"} == {"reasoning-summary"}
    assert len(found) == 13
