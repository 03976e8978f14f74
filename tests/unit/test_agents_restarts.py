"""Agents' turns across the end of their server: they go on as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import agentserve
from agentserve.messages import unpack_tokens
from agentserve.server.sessions.book import StorageError
from tests.agents_machine import Machine, MemoryBook, shown
from tests.agents_rig import CALL, CANCEL, NOW, TWO, WEATHER, created, result
from tests.api_rig import settled
from tests.fakes import ScriptedEngine, say


@agentserve.tool(timeout=5)
async def slow(city: str) -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return city


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    made = Machine(ScriptedEngine(), {"slow": slow})
    yield made
    await made.close()


async def undisturbed() -> tuple[list[object], list[list[int]]]:
    machine = Machine(ScriptedEngine())
    agent = await created(machine.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    machine.engine.reply = say("It rains.")
    await agent.give(first, "rain")
    await agent.give(second, "noon")
    await agent.until("idle")
    items, prompts = shown(await agent.items()), _prompts(machine)
    await machine.close()
    return items, prompts


def _prompts(machine: Machine) -> list[list[int]]:
    return [list(unpack_tokens(submit.tokens)) for submit in machine.engine.submits]


async def test_a_session_that_waits_for_tools_goes_on(machine: Machine) -> None:
    """With one result taken before the end, and the other brought after it."""
    agent = await created(machine.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    await agent.give(first, "rain")
    before = await agent.items()
    agent = await machine.kill(agent)
    after = await agent.until("requires_action")
    assert after["required_actions"] == [second]
    assert await agent.items() == before
    await agent.give(first, "rain")  # a repeat
    assert (await agent.give(first, "sun", status=409))["code"] == "result_conflict"
    machine.engine.reply = say("It rains.")
    await agent.give(second, "noon")
    await agent.until("idle")
    assert (shown(await agent.items()), _prompts(machine)) == await undisturbed()
    machine.rig.check_rest()


async def test_a_reply_that_was_cut_within_a_call_is_that_after_a_kill_and_stops_nothing(
    machine: Machine,
) -> None:
    """Its session has it, and the agent's records had not yet."""
    told = []
    for lost in (False, True):
        script = say("Hm. " + TWO[:-20], hold_at=9)
        agent = await created(machine.rig, script, input=f"Weather? {lost}")
        await settled(lambda: machine.engine.live)
        early = dict(machine.book.records)
        script.release.set()
        await agent.until("idle")
        if lost:
            machine.book = MemoryBook(early)
        agent = await machine.kill(agent)
        assert (await agent.until("idle"))["required_actions"] == []
        turns = (await agent.get("/turns"))["data"]
        told.append(([turn["status"] for turn in turns], shown(await agent.items())[1:]))
        await agent.say("And now?", says="Nothing.")
        await agent.until("idle")
        one, two = _prompts(machine)[-2:]
        assert two[: len(one)] == one
    assert told[0] == told[1]
    assert told[0][0] == ["failed"]


async def test_a_turn_that_was_being_made_is_made_again(machine: Machine) -> None:
    agent = await created(machine.rig, say("Hello!", hold_at=3), input="Hi")
    await settled(lambda: "turn.output_text.delta" in agent.kinds())
    machine.engine.reply = say("Hello!")
    agent = await machine.kill(agent)
    await agent.until("idle")
    one, two = _prompts(machine)
    assert one == two
    assert [item["type"] for item in await agent.items()] == ["message", "message"]
    assert (await agent.get("/turns"))["data"][0]["status"] == "completed"


async def test_a_second_model_call_is_made_again(machine: Machine) -> None:
    agent = await created(machine.rig, CALL, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    machine.engine.reply = say("It rains.", hold_at=2)
    await agent.give(call)
    await settled(lambda: len(machine.engine.submits) == 2 and machine.engine.live)
    machine.engine.reply = say("It rains.")
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert _prompts(machine)[1] == _prompts(machine)[2]
    items = await agent.items()
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output", "message"]
    machine.rig.check_rest()


async def test_a_reply_whose_items_were_not_written_yet(machine: Machine) -> None:
    """The session's turn was on disk, the agent's record of it was not."""
    agent = await created(machine.rig, TWO, input="Weather?")
    await agent.until("requires_action")
    before = shown(await agent.items())
    records = machine.book.records
    del records[f"i:{agent.id}:2"]
    name = f"t:{agent.id}:1"
    records[name] = records[name].replace(b'"waiting"', b'"in_progress"')
    agent = await machine.kill(agent)
    first, second = (await agent.until("requires_action"))["required_actions"]
    assert shown(await agent.items()) == before
    machine.engine.reply = say("It rains.")
    await agent.give(second, "noon")
    await agent.give(first, "rain")
    await agent.until("idle")
    assert _prompts(machine) == (await undisturbed())[1]


async def test_a_result_that_only_the_session_has(machine: Machine) -> None:
    """Its post was answered when the session had it."""
    agent = await created(machine.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    await agent.send({**result(first), "success": False, "error": "no network"})
    del machine.book.records[f"i:{agent.id}:3"]
    agent = await machine.kill(agent)
    await settled(lambda: len(agent.history.outputs()) == 1)
    output = (await agent.items())[-1]
    assert (output["call_id"], output["status"], output["error"]) == (
        first["call_id"],
        "failed",
        "no network",
    )
    machine.engine.reply = say("It rains.")
    await agent.give(second, "noon")
    await agent.until("idle")


async def test_a_result_that_only_the_record_of_the_agent_has(machine: Machine) -> None:
    agent = await created(machine.rig, TWO, input="Weather?")
    first, second = (await agent.until("requires_action"))["required_actions"]
    before = dict(machine.store.records)
    await agent.give(first, "rain")
    machine.store.records = before
    agent = await machine.kill(agent)
    machine.engine.reply = say("It rains.")
    await agent.give(second, "noon")
    await agent.until("idle")
    assert (shown(await agent.items()), _prompts(machine)) == await undisturbed()


async def test_an_answer_whose_end_was_not_written_yet(machine: Machine) -> None:
    agent = await created(machine.rig, "Hello!", input="Hi")
    await agent.until("idle")
    name = f"t:{agent.id}:1"
    machine.book.records[name] = machine.book.records[name].replace(b'"completed"', b'"in_progress"', 1)
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert len(machine.engine.submits) == 1
    assert len(await agent.items()) == 2


async def test_a_background_call_outlives_the_server(machine: Machine) -> None:
    left = [say(CALL), say("I wait."), say("It rains."), say("Bye.")]
    machine.engine.reply = lambda command: left.pop(0)
    agent = await created(machine.rig, agent={"tools": [{**WEATHER, "async": True}]}, input="?")
    await agent.until("idle")
    agent = await machine.kill(agent)
    call = next(item for item in await agent.items() if item["type"] == "function_call")
    await agent.give(call, "rain")
    agent = await machine.kill(agent)
    await agent.give(call, "rain")
    assert (await agent.give(call, "sun", status=409))["code"] == "result_conflict"
    for text in ("So?", "Thanks."):
        await agent.say(text)
        await agent.until("idle")
        agent = await machine.kill(agent)
    assert agent.prompt().count("weather)]\nrain") == 1


async def test_a_python_tool_that_ran_is_not_run_again(machine: Machine) -> None:
    tools = [{"type": "python", "name": "slow"}]
    text = CALL.replace("weather", "slow")
    agent = await created(machine.rig, text, agent={"tools": tools}, input="?")
    await settled(lambda: agent.history.open_calls(agent.history.active))
    machine.engine.reply = say("Hm.")
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert "started again while it ran" in agent.prompt()


async def test_time_passes_while_the_server_is_away(machine: Machine) -> None:
    tools = [{**WEATHER, "timeout": 30}, NOW]
    agent = await created(machine.rig, CALL, agent={"tools": tools}, input="?")
    await agent.until("requires_action")
    machine.engine.reply = say("Hm.")
    machine.time.pass_(31 - 1e-3)  # while nobody looks: the sleepers of the old server are gone with it
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert "did not answer within 30 s" in agent.prompt()


async def test_a_cancelled_turn_stays_cancelled(machine: Machine) -> None:
    agent = await created(machine.rig, TWO, input="?")
    first, _ = (await agent.until("requires_action"))["required_actions"]
    await agent.give(first, "rain")
    await agent.send(CANCEL)
    agent = await machine.kill(agent)
    assert (await agent.get())["status"] == "idle"
    await agent.say("So?", says="Well.")
    await agent.until("idle")
    said = ("rain", "No result: the call was cancelled.", "So?")
    prompt = agent.prompt()
    assert sorted(map(prompt.index, said)) == list(map(prompt.index, said))


async def test_sessions_agents_and_what_was_deleted(machine: Machine) -> None:
    rig = machine.rig
    saved = (await rig.post("/v1/agents", {"model": "tiny", "name": "\u00e9"})).json()
    kept = await created(rig, metadata={"a": "b"}, prompt_cache_options={"ttl": "12h"})
    gone = await created(rig, "Hello!", input="Hi")
    await gone.until("idle")
    before = await kept.get()
    await rig.client.delete(gone.path)
    kept = await machine.kill(kept)
    assert await kept.get() == before
    assert (await machine.rig.client.get(f"/v1/agents/{saved['id']}")).json() == saved
    assert (await machine.rig.client.get(gone.path)).status_code == 404
    assert not [name for name in machine.book.records if gone.id in name]


async def test_while_the_disk_fails_turns_are_refused(machine: Machine) -> None:
    agent = await created(machine.rig)
    machine.book.error = StorageError("No space left on device")
    assert (await agent.say("Hi", status=503))["code"] == "storage_failed"
    health = (await machine.rig.client.get("/health")).json()
    assert (health["status"], health["degraded"][0]["part"]) == ("degraded", "agents_disk")
    assert not machine.engine.live
    assert (await agent.get())["status"] == "idle"
    machine.book.error = None
    await agent.say("Hi", says="Hello!")
    await agent.until("idle")
    assert [item["role"] for item in await agent.items()] == ["user", "assistant"]
