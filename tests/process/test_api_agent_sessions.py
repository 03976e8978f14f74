"""The unmodified openai SDK's Agents API against a real socket, with a scripted model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.beta.agent_session import AgentSession
from openai.types.beta.agent_session_event import AgentSessionEvent
from openai.types.beta.agent_session_item import AgentSessionItem
from openai.types.beta.agents.sessions.turn import Turn

from agentserve.messages import Submit
from agentserve.server.http.app import begin_drain
from tests.agents_rig import CALL, SESSIONS, TWO, WEATHER, Agent, body, check_events, created, message
from tests.api_rig import Rig, served, settled
from tests.fakes import Script, ScriptedEngine, say
from tests.sse import sent, take_until

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(AgentSessionEvent)
ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(AgentSessionItem)
AGENT: Any = {"model": "tiny", "instructions": "Be brief.", "tools": [WEATHER]}
NONE: Any = {"type": "none"}


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(say("Hello from here.")))


@pytest.fixture
async def base(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as url:
        yield url


@pytest.fixture
async def client(base: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x") as made:
        yield made


def tool_then_answer(rig: Rig, calls: str = CALL) -> None:
    def reply(command: Submit) -> Script:
        return say("Let me see. " + calls) if len(rig.engine.submits) == 1 else say("It rains.")

    rig.engine.reply = reply


async def test_a_tool_round_trip_by_the_stream_helper(rig: Rig, client: openai.AsyncOpenAI) -> None:
    tool_then_answer(rig)
    session = await client.beta.agents.sessions.create(environment=NONE, agent=AGENT)
    asked: list[Any] = []

    def weather(arguments: dict[str, Any]) -> str:
        asked.append(arguments)
        return "rain"

    async with client.beta.agents.sessions.stream(
        session.id, input="Weather in Oslo?", tool_handlers={"weather": weather}
    ) as stream:
        stream.with_result_collection()
        kinds = [event.type async for event in stream]
        final = await stream.get_final_result()
    assert asked == [{"city": "Oslo"}]
    assert final.output_text == "It rains."
    assert final.turn.status == "completed"
    assert final.turn.usage is not None
    assert kinds[-2:] == ["agent.session.turn.completed", "agent.session.idle"]
    assert "agent.session.requires_action" in kinds
    items = [item async for item in client.beta.agents.sessions.items.list(session.id, order="asc")]
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    rig.check_rest()


async def test_a_handler_that_fails_and_a_synchronous_client(rig: Rig, base: str) -> None:
    tool_then_answer(rig)

    def weather(arguments: dict[str, Any]) -> str:
        raise RuntimeError("secret")

    def work() -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=f"{base}/v1", api_key="x") as client:
            session = client.beta.agents.sessions.create(environment=NONE, agent=AGENT)
            with client.beta.agents.sessions.stream(
                session.id, input="?", tool_handlers={"weather": weather}
            ) as stream:
                text = stream.get_final_result().output_text
            turns = client.beta.agents.sessions.turns.list(session.id)
            return text, [turn.status for turn in turns]

    assert await asyncio.to_thread(work) == ("It rains.", ["completed"])
    assert "Error: Tool handler failed." in Agent(rig, _only(rig)).prompt()


async def test_a_stream_from_creation(rig: Rig, client: openai.AsyncOpenAI) -> None:
    tool_then_answer(rig)
    stream = await client.beta.agents.sessions.create(
        environment=NONE,
        agent=AGENT,
        input="Weather?",
        stream=True,
        tool_handlers={"weather": lambda arguments: "rain"},
    )
    final = await stream.get_final_result()
    assert final.output_text == "It rains."


async def test_a_structured_answer(rig: Rig, client: openai.AsyncOpenAI) -> None:
    class Reading(pydantic.BaseModel):
        degrees: int

    rig.engine.reply = say('{"degrees": 4}')
    stream = await client.beta.agents.sessions.create(
        environment=NONE, agent={"model": "tiny"}, input="?", output_type=Reading, stream=True
    )
    assert (await stream.get_final_result()).output_parsed == Reading(degrees=4)
    assert rig.grammars.asked[-1].schema["properties"]["degrees"]["type"] == "integer"


async def test_everything_is_of_the_types_that_the_sdk_has(rig: Rig) -> None:
    agent = await created(rig, say("<think>Hm.</think>Ah. " + TWO), input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    AgentSession.model_validate(await agent.get(), strict=True)
    rig.engine.reply = say("It rains.")
    await agent.give(first, [{"type": "input_text", "text": "rain"}])
    await agent.send(
        {**message("")}
        | {
            "type": "agent.session.input.tool_result",
            "turn_id": second["turn_id"],
            "call_id": second["call_id"],
            "success": False,
            "error": "no clock",
        }
    )
    await agent.until("idle")
    for event in agent.events():
        EVENT.validate_python(event, strict=True)
    for item in await agent.items():
        ITEM.validate_python(item, strict=True)
    for turn in (await agent.get("/turns"))["data"]:
        Turn.model_validate(turn, strict=True)
    check_events(agent.events())


async def test_a_stream_is_taken_up_where_it_broke_off(rig: Rig, base: str) -> None:
    """Closing it cancels nothing, and no event comes twice or is missing."""
    script = say("Hello from here.", hold_at=6)
    rig.engine.reply = script
    agent = await created(rig)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        async with client.stream("GET", f"{agent.path}/events") as reply:
            await agent.say("Hi")
            events = sent(reply.aiter_raw())
            seen = await take_until(events, "agent.session.turn.output_text.delta")
        assert rig.engine.live
        script.release.set()
        await agent.until("idle")
        async with client.stream(
            "GET", f"{agent.path}/events", headers={"last-event-id": seen[-1].id}
        ) as reply:
            seen += await take_until(sent(reply.aiter_raw()), "agent.session.idle")
    told = [event.data for event in seen]
    assert told == agent.events()[1:]  # all but `created`, which was before
    assert [event.id for event in seen] == [event["event_id"] for event in told]
    check_events(told)


async def test_a_gap_is_told_and_the_lists_have_it_all(rig: Rig, base: str) -> None:
    agent = await created(rig, input="Hi")
    await agent.until("idle")
    first = agent.events()[0]["event_id"]
    agent.log.bound(1000)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        for place in (first, "0123-7"):
            async with client.stream(
                "GET", f"{agent.path}/events", headers={"last-event-id": place}
            ) as reply:
                seen = await take_until(sent(reply.aiter_raw()), "agent.session.idle")
            assert seen[0].data["error"]["code"] == "events_lost"
            EVENT.validate_python(seen[0].data, strict=True)
        assert (await client.get(f"{agent.path}/events?after=x")).status_code == 400
    assert [item["role"] for item in await agent.items()] == ["user", "assistant"]


@pytest.mark.parametrize("way", ["delete", "drain"])
async def test_a_stream_ends_with_its_session_or_the_server(rig: Rig, base: str, way: str) -> None:
    agent = await created(rig)
    async with (
        httpx.AsyncClient(base_url=base, timeout=60) as client,
        client.stream("GET", f"{agent.path}/events") as reply,
    ):
        await agent.say("Hi")
        await agent.until("idle")
        if way == "delete":
            await client.delete(agent.path)
        else:
            begin_drain(rig.app)
        seen = [event async for event in sent(reply.aiter_raw())]
    assert seen[-1].kind == "agent.session.idle"


async def test_the_same_key_is_one_turn(rig: Rig, base: str) -> None:
    agent = await created(rig)
    sent_before = {"idempotency-key": "k1"}
    await agent.say("Hi", headers=sent_before)
    await agent.until("idle")
    await agent.say("Hi", headers=sent_before)
    assert (await agent.say("Other", headers=sent_before, status=422))["code"] == "idempotency_key_reused"
    rig.app.middleware_stack = None  # as after a restart: what the middleware knew is gone
    await agent.say("Hi", headers=sent_before)
    assert len((await agent.get("/turns"))["data"]) == 1


async def test_two_messages_at_once_are_one_turn(rig: Rig, client: openai.AsyncOpenAI) -> None:
    script = say("Hello", hold_at=1)
    rig.engine.reply = script
    session = await client.beta.agents.sessions.create(environment=NONE, agent=AGENT)
    both = [client.beta.agents.sessions.events.create(session.id, events=[message("Hi")]) for _ in range(5)]  # type: ignore[list-item]
    ends = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(end).__name__ for end in ends) == ["ConflictError"] * 4 + ["NoneType"]
    script.release.set()
    await settled(lambda: not rig.engine.live)


def _only(rig: Rig) -> Any:
    (history,) = rig.context.agents.shelf
    return {"id": history.id}


async def test_beside_the_sdk_header_or_without(rig: Rig, base: str) -> None:
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        for headers in ({}, {"openai-beta": "agents=v1"}):
            made = await client.post(SESSIONS, json=body(), headers=headers)
            assert made.status_code == 200
            assert made.headers["x-session-id"] == made.json()["id"]
