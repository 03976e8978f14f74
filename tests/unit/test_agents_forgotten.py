"""The directory has no room for an agent's session, or lost it: the turn goes on, computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import agentserve
from tests.agents_machine import Machine, shown
from tests.agents_rig import CALL, CANCEL, TWO, WEATHER, check_events, created, result
from tests.api_rig import hermes, settled
from tests.fakes import ScriptedEngine, say
from tests.unit.test_agents_restarts import undisturbed

DONE = asyncio.Event()


@agentserve.tool
async def clock() -> str:
    """Says what time it is when a test says so."""
    await DONE.wait()
    return "noon"


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    DONE.clear()
    made = Machine(ScriptedEngine(), {"clock": clock})
    yield made
    await made.close()


def forget(machine: Machine) -> None:
    """As where places are short: whoever has none is closed."""
    context = machine.rig.context
    sessions = list(context.directory.sessions("default"))
    assert sessions
    for session in sessions:
        context.directory.close(session)
        context.chronicle.gone(session.key, "its place was needed")


@pytest.mark.parametrize("when", ["before both", "between", "both times"])
@pytest.mark.parametrize("killed", [False, True])
async def test_results_are_taken_and_the_turn_goes_on(machine: Machine, when: str, killed: bool) -> None:
    items, _ = await undisturbed()
    agent = await created(machine.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    machine.engine.reply = say("It rains.")
    if when != "between":
        forget(machine)
    await agent.give(first, "rain")
    if when != "before both" and list(machine.rig.context.directory.sessions("default")):
        forget(machine)
    if killed:
        agent = await machine.kill(agent)
    assert (await agent.until("requires_action"))["required_actions"] == [second]
    await agent.give(first, "rain")  # a repeat
    error = await agent.give(first, "snow", status=409)
    assert error["code"] == "result_conflict"
    await agent.send(result(second, "noon"))
    await agent.until("idle")
    assert shown(await agent.items()) == items
    if not killed:
        check_events(agent.events())
    if killed:
        agent = await machine.kill(agent)
        assert shown(await agent.items()) == items
    before = len(machine.engine.submits)
    await agent.say("And now?", says="Sun.")
    await agent.until("idle")
    assert len(machine.engine.submits) == before + 1
    assert b"It rains." in bytes(agent.prompt(), "utf-8")
    machine.rig.check_rest()


async def test_a_reply_that_was_told_before_the_end_is_found_after_it(machine: Machine) -> None:
    """Numbers of turns go on where they were, or the start would take the reply for an older one."""
    agent = await created(machine.rig, "Hello.", input="Hi")
    await agent.until("idle")
    await agent.say("And?", says="Well.")
    await agent.until("idle")
    forget(machine)
    await agent.say("Weather?", says=CALL)
    (call,) = (await agent.until("requires_action"))["required_actions"]
    agent = await machine.kill(agent, lost=1)
    assert [one["name"] for one in (await agent.until("requires_action"))["required_actions"]] == ["weather"]
    assert len([item for item in await agent.items() if item["type"] == "function_call"]) == 1
    machine.engine.reply = say("It rains.")
    await agent.give((await agent.get())["required_actions"][0], "rain")
    await agent.until("idle")
    assert len(machine.engine.submits) == 4
    assert call["call_id"]


async def test_tools_that_run_here(machine: Machine) -> None:
    tools = [{"type": "python", "name": "clock"}, WEATHER]
    agent = await created(machine.rig, hermes("clock", "{}") + CALL, agent={"tools": tools}, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    forget(machine)
    machine.engine.reply = say("It rains.")
    DONE.set()
    await settled(lambda: agent.history.outputs() or None)
    await agent.give(call)
    await agent.until("idle")
    assert "noon" in agent.prompt()
    check_events(agent.events())
    machine.rig.check_rest()


async def test_a_result_that_does_not_fit_is_given_back(machine: Machine) -> None:
    agent = await created(machine.rig, CALL, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    forget(machine)
    error = await agent.give(call, "x" * 100_000, status=400)
    assert error["code"] == "context_length_exceeded"
    assert (await agent.get())["status"] == "requires_action"
    machine.engine.reply = say("It rains.")
    await agent.give(call, "rain")
    await agent.until("idle")
    machine.rig.check_rest()


async def test_a_cancel(machine: Machine) -> None:
    agent = await created(machine.rig, TWO, input="Weather?")
    first, _ = (await agent.until("requires_action"))["required_actions"]
    forget(machine)
    await agent.give(first)
    await agent.send(CANCEL)
    await agent.say("Well?", says="Yes.")
    await agent.until("idle")
    assert "rain" in agent.prompt()
    assert "No result: the call was cancelled." in agent.prompt()
    machine.rig.check_rest()


async def test_its_name_is_another_sessions_now(machine: Machine) -> None:
    agent = await created(machine.rig, CALL, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    forget(machine)
    machine.engine.reply = say("Hello.")
    await machine.rig.chat([{"role": "user", "content": "Hi"}], session_id=agent.id)
    await agent.give(call, status=404)
    await agent.send(CANCEL)
    assert (await agent.get())["status"] == "idle"
