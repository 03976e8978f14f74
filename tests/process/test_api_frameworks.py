"""Agent frameworks, unchanged, against a real socket with a scripted model: a tool round trip each, in one
session, whose second turn begins with the first one's tokens."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import Rig, hermes, served
from tests.fakes import Script, ScriptedEngine, say
from tests.mcp_rig import ADD, FakeMcp, server

CALL = hermes("weather", '{"city": "Oslo"}')
ANSWER = "It rains in Oslo."


def scripted(*texts: str) -> Rig:
    left: Iterator[str] = iter(texts)

    def reply(submit: object) -> Script:
        return say(next(left))

    return Rig(ScriptedEngine(reply, max_model_len=1 << 16))  # some frameworks have long prompts


@pytest.fixture
async def rig() -> Rig:
    return scripted(CALL, ANSWER)


@pytest.fixture
async def base(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as url:
        yield f"{url}/v1"


def check_one_session(rig: Rig) -> None:
    submits = rig.engine.submits
    assert [submit.turn for submit in submits] == [1, 2]
    assert len({submit.session for submit in submits}) == 1
    check_one_prefix(rig)


def check_one_prefix(rig: Rig) -> None:
    """What a turn computes begins where the one before ended."""
    submits = rig.engine.submits
    assert len(submits) == 2
    for earlier, later in pairwise(submits):
        before, after = unpack_tokens(earlier.tokens), unpack_tokens(later.tokens)
        assert after[: len(before)] == before
    rig.check_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents(rig: Rig, base: str, stream: bool) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    async with openai.AsyncOpenAI(base_url=base, api_key="x") as client:
        model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client)
        agent = agents.Agent(name="Forecaster", instructions="Be brief.", model=model, tools=[weather])
        if stream:
            result = agents.Runner.run_streamed(agent, "Weather in Oslo?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "Weather in Oslo?")
    assert asked == ["Oslo"]
    assert result.final_output == ANSWER
    check_one_session(rig)


async def test_openai_agents_with_a_typed_answer_beside_tools(base: str, rig: Rig) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    agents.set_tracing_disabled(True)
    left = iter([CALL, '{"city": "Oslo", "wet": true}'])
    rig.engine.reply = lambda submit: say(next(left))
    forecast = pydantic.create_model("Forecast", city=(str, ...), wet=(bool, ...))

    @agents.function_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return "rain"

    async with openai.AsyncOpenAI(base_url=base, api_key="x") as client:
        model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client)
        agent = agents.Agent(name="F", model=model, tools=[weather], output_type=forecast)
        result = await agents.Runner.run(agent, "Weather in Oslo?")
    assert result.final_output == forecast(city="Oslo", wet=True)
    assert all(form.json and form.schema and form.strict for form in rig.grammars.asked)
    check_one_session(rig)


@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai(rig: Rig, base: str, stream: bool) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked: list[str] = []
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base, api_key="x"))
    agent = Agent(model, instructions="Be brief.", system_prompt="You forecast.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return "rain"

    if stream:
        async with agent.run_stream("Weather in Oslo?") as result:
            said = await result.get_output()
        usage = result.usage
    else:
        whole = await agent.run("Weather in Oslo?")
        said, usage = whole.output, whole.usage
    assert said == ANSWER
    assert asked == ["Oslo"]
    assert usage.input_tokens == sum(len(submit.tokens) // 4 for submit in rig.engine.submits)
    assert usage.cache_read_tokens > 0
    check_one_session(rig)


async def test_smolagents(rig: Rig, base: str) -> None:
    pytest.importorskip("smolagents")
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    done = hermes("final_answer", '{"answer": "It rains in Oslo."}')
    left = iter([CALL, done])
    rig.engine.reply = lambda submit: say(next(left))
    asked: list[str] = []

    @tool
    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "rain"

    def run() -> object:
        model = OpenAIServerModel(model_id="tiny", api_base=base, api_key="x")
        return ToolCallingAgent(tools=[weather], model=model, verbosity_level=0).run("Weather in Oslo?")

    assert await asyncio.to_thread(run) == ANSWER
    assert asked == ["Oslo"]
    assert all(submit.sampling.stop == ("Observation:", "Calling tools:") for submit in rig.engine.submits)
    check_one_prefix(rig)  # it writes calls into its history as text, which is no session's any more


VERCEL = Path(__file__).parent.parent.parent / "examples" / "vercel_ai"


@pytest.mark.skipif(
    shutil.which("node") is None or not (VERCEL / "node_modules").exists(),
    reason="needs node, and `npm install` in examples/vercel_ai",
)
async def test_vercel_ai_sdk(rig: Rig, base: str) -> None:
    node = await asyncio.create_subprocess_exec(
        *("node", "agent.mjs", base.removesuffix("/v1"), "tiny"),
        cwd=VERCEL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(node.communicate(), 60)
    assert node.returncode == 0, err.decode()
    tool, answer, first, second = out.decode().splitlines()
    assert (tool, answer) == ("tool: weather(Oslo)", f"answer: {ANSWER}")
    assert first.startswith("step: stop, ")  # as OpenAI ends a call that was forced by name
    assert second.startswith("step: stop, ")
    assert " 0 cached" not in second
    check_one_session(rig)


@pytest.mark.parametrize("approval", ["never", "always"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_with_an_mcp_server(approval: str, stream: bool) -> None:
    """Its hosted MCP tool: this server lists and calls, the framework's callback approves."""
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    rig = scripted(hermes("add", '{"a": 1, "b": 2}'), "It is 3.")
    mcp = FakeMcp(ADD)
    rig = Rig(rig.engine, mcp=mcp)
    asked: list[str] = []

    def decide(request: Any) -> dict[str, Any]:
        asked.append(request.data.name)
        return {"approve": True}

    tool = agents.HostedMCPTool(
        tool_config=server(require_approval=approval),
        on_approval_request=decide if approval == "always" else None,
    )
    async with served(rig.app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = agents.OpenAIResponsesModel("tiny", client)
        agent = agents.Agent(name="a", model=model, tools=[tool])
        if stream:
            result = agents.Runner.run_streamed(agent, "1 + 2?")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, "1 + 2?")
    assert result.final_output == "It is 3."
    assert asked == (["add"] if approval == "always" else [])
    assert mcp.calls == [("add", {"a": 1, "b": 2})]
    check_one_session(rig)
