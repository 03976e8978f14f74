"""The unmodified Anthropic SDK, and llm-comply, against a real socket with a scripted model behind it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import beta_async_tool

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, hermes, served, settled, user
from tests.fakes import ScriptedEngine, say

TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = hermes("weather", '{"city": "Oslo"}')


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello from here.")))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with served(rig.app) as base, anthropic.AsyncAnthropic(base_url=base, api_key="x") as made:
        yield made


def sizes(rig: Rig) -> list[int]:
    return [len(unpack_tokens(submit.tokens)) for submit in rig.engine.submits]


async def test_a_message(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    raw = await client.messages.with_raw_response.create(model="tiny", max_tokens=64, messages=[user("hi")])
    message = await raw.parse()
    [block] = message.content
    assert (block.type, block.text, message.stop_reason) == ("text", "Hello from here.", "end_turn")
    assert message._request_id == raw.headers["request-id"]
    assert raw.headers["x-session-id"]
    assert message.usage.input_tokens == sizes(rig)[0]
    assert message.usage.output_tokens == len("Hello from here.") + 1


async def test_a_stream_with_usage(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(model="tiny", max_tokens=64, messages=[user("hi")]) as stream:
        pieces = [piece async for piece in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(pieces) == "Hello from here."
    assert len(pieces) > 2
    count = await client.messages.count_tokens(model="tiny", messages=[user("hi")])
    assert count.input_tokens == message.usage.input_tokens == sizes(rig)[0]
    assert message.usage.output_tokens == len("Hello from here.") + 1


async def test_a_streamed_tool_round_trip(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.reply = say("Let me see." + CALL)
    messages: list[Any] = [user("Weather in Oslo?")]
    fields: Any = {"model": "tiny", "max_tokens": 200, "tools": [TOOL], "system": "Be brief."}
    async with client.messages.stream(messages=messages, **fields) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        first = await stream.get_final_message()
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}

    rig.engine.reply = say("It rains.")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    messages += [first.to_param(), {"role": "user", "content": [result]}]
    count = await client.messages.count_tokens(
        model="tiny", messages=messages, tools=[TOOL], system="Be brief."
    )
    async with client.messages.stream(messages=messages, **fields) as stream:
        second = await stream.get_final_message()
    assert second.content[0].type == "text"
    assert second.content[0].text == "It rains."
    usage = second.usage
    assert usage.cache_read_input_tokens == sizes(rig)[0] + first.usage.output_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens == sizes(rig)[1]
    assert len({submit.session for submit in rig.engine.submits}) == 1
    rig.check_rest()


async def test_the_sdks_own_agent_loop(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    texts = iter([hermes("rain_in", '{"city": "Oslo"}'), hermes("rain_in", '{"city": "Rome"}'), "Both dry."])
    rig.engine.reply = lambda submit: say(next(texts))
    asked: list[str] = []

    @beta_async_tool
    async def rain_in(city: str) -> str:
        """Whether it rains in a city."""
        asked.append(city)
        return "no"

    runner = client.beta.messages.tool_runner(
        model="tiny", max_tokens=200, tools=[rain_in], messages=[user("Does it rain in Oslo or Rome?")]
    )
    final = await runner.until_done()
    assert asked == ["Oslo", "Rome"]
    assert final.content[0].type == "text"
    assert final.content[0].text == "Both dry."
    assert [submit.turn for submit in rig.engine.submits] == [1, 2, 3]
    tokens = [unpack_tokens(submit.tokens) for submit in rig.engine.submits]
    assert all(after[: len(before)] == before for before, after in pairwise(tokens))


async def test_a_thread_that_was_lost_is_sent_again_whole(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    thread = client.beta.messages.thread(model="tiny", max_tokens=64, system="Be brief.", messages=[])
    await thread.send(user("a"))
    await thread.send(user("b"))
    assert len({submit.session for submit in rig.engine.submits}) == 1
    for session in list(rig.context.directory.sessions("default")):
        rig.context.directory.close(session)
    await thread.send(user("c"))
    prompt = rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[-1].tokens))
    assert [prompt.count(word) for word in ("Be brief.", "Hello from here.")] == [1, 2]
    assert len({submit.session for submit in rig.engine.submits}) == 2


async def test_an_answer_in_a_shape(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    rig.engine.reply = say('{"name": "Oslo", "people": 700000}')
    message = await client.messages.parse(
        model="tiny", max_tokens=64, messages=[user("Which city?")], output_format=City
    )
    assert message.parsed_output == City(name="Oslo", people=700000)
    assert rig.grammars.asked[0].schema["required"] == ["name", "people"]


async def test_leaving_a_stream_rolls_its_turn_back(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    rig.engine.reply = say("Hello from here.", hold_at=5)
    async with client.messages.stream(model="tiny", max_tokens=64, messages=[user("hi")]) as stream:
        async for _ in stream.text_stream:
            break
    await settled(lambda: not rig.engine.live)
    await settled(lambda: not len(rig.context.directory))
    assert rig.engine.aborted
    rig.check_rest()


async def test_errors_are_the_sdks_own(rig: Rig, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be at least 1") as bad:
        await client.messages.create(model="tiny", max_tokens=-1, messages=[user("hi")])
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", max_tokens=9, messages=[user("hi")])
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text"):
        await client.messages.create(
            model="tiny", max_tokens=9, messages=[{"role": "user", "content": [image]}]
        )
    assert not rig.engine.submits


async def test_llm_comply() -> None:
    """All of its checks but one: images, which a model that reads text refuses. (It asks for thinking
    from models whose name says that they are Anthropic's.)"""

    def reply(submit: Any) -> Any:
        called = hermes("get_weather", '{"location": "San Francisco"}')
        return say(called if submit.sampling.grammar else "Hello from here.")

    rig = Rig(ScriptedEngine(reply, max_model_len=20_000))
    flags = "-k x -m tiny --format anthropic --auth-header x-api-key --no-bearer --json"
    async with served(rig.app) as base:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from llm_comply.cli import main; sys.exit(main())",
            *("-u", f"{base}/v1", *flags.split(), "-H", "anthropic-version:2023-06-01"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
    results = {result["id"]: result for result in json.loads(output)["results"]}
    image = results.pop("anth-image-input")
    assert image["errors"][0] == "HTTP 400 (expected [200])"
    assert results.pop("anth-thinking-display")["status"] == "skipped"
    assert len(results) == 7
    assert {result["status"] for result in results.values()} == {"passed"}, results
