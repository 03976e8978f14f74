"""Official clients and an agent framework against a real socket, with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentserve.messages import unpack_tokens
from tests.api_rig import TOOLS, Rig, hermes, served, user
from tests.fakes import ScriptedEngine, say


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello from here.")))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(rig.app) as base, openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x") as made:
        yield made


async def test_openai_chat(rig: Rig, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=[user("hi")])
    reply = raw.parse()
    assert reply.choices[0].message.content == "Hello from here."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len("Hello from here.") + 1
    assert raw.headers["x-session-id"] == reply.session_id


async def test_openai_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=[user("hi")], stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
        usage = chunk.usage or usage
    assert text == "Hello from here."
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_openai_tools_round_trip(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.engine.reply = say(hermes("weather", '{"city": "Oslo"}'))
    messages: list[Any] = [user("Weather in Oslo?")]
    async with client.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert message.tool_calls
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    rig.engine.reply = say("It rains.")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    reply = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert reply.choices[0].message.content == "It rains."
    assert rig.engine.submits[0].session == rig.engine.submits[1].session
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    first = len(unpack_tokens(rig.engine.submits[0].tokens))
    assert (reply.usage.prompt_tokens_details.cached_tokens or 0) > first


async def test_openai_errors(rig: Rig, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=[user("hi")], temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=[user("hi")])
    assert not rig.engine.submits


async def test_openai_models_and_completions(rig: Rig, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    reply = await client.completions.create(model="tiny", prompt="hi", max_tokens=5)
    assert reply.choices[0].text == "Hello"


async def test_a_langgraph_agent_runs_its_tool_in_one_session(rig: Rig, client: openai.AsyncOpenAI) -> None:
    texts = iter([hermes("weather", '{"city": "Oslo"}'), "It rains in Oslo."])
    rig.engine.reply = lambda submit: say(next(texts))
    asked: list[str] = []

    @tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    model = ChatOpenAI(model="tiny", base_url=str(client.base_url), api_key="x")
    bound = model.bind_tools([weather])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([weather]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    agent = graph.compile()
    result = await agent.ainvoke({"messages": [("user", "Weather in Oslo?")]})
    assert asked == ["Oslo"]
    assert result["messages"][-1].content == "It rains in Oslo."
    assert len({submit.session for submit in rig.engine.submits}) == 1
    assert [submit.turn for submit in rig.engine.submits] == [1, 2]
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    rig.check_rest()
