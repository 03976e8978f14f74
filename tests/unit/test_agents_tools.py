"""Who runs an agent's calls: Python functions, background calls, time limits, the bound on model calls."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import agentserve
from agentserve.messages import Submit
from agentserve.server.agents.records import CallItem
from agentserve.server.agents.runners import PythonTools, ToolCall, ToolOutcome
from agentserve.tools import BadArguments, load_tools
from tests.agents_machine import Sleeper
from tests.agents_rig import CALL, CANCEL, TWO, WEATHER, check_events, created, message
from tests.api_rig import Rig, hermes, settled
from tests.fakes import Script, ScriptedEngine, say

gate = threading.Event()


@agentserve.tool
def add(a: int, b: int = 1, how: Literal["plus", "minus"] = "plus") -> int:
    """Adds numbers."""
    return a + b if how == "plus" else a - b


@agentserve.tool(name="where", description="Finds it.", timeout=5)
async def place(name: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"found": name}


@agentserve.tool
def broken() -> None:
    raise RuntimeError("no luck")


@agentserve.tool
async def leaves() -> None:
    raise asyncio.CancelledError


@agentserve.tool
def exits() -> None:
    raise SystemExit(1)


@agentserve.tool
def interrupts() -> None:
    raise KeyboardInterrupt("mine")


@agentserve.tool
async def interrupts_here() -> None:
    raise KeyboardInterrupt("mine")


@agentserve.tool
def half() -> str:
    return "\ud800"


@agentserve.tool
def endless() -> str:
    return "x" * (5 << 20)


@agentserve.tool(timeout=5)
def stuck() -> str:
    gate.wait(20)
    return "too late"


HOSTILE = (leaves, exits, interrupts, interrupts_here, half, endless)
TOOLS = {tool.name: tool for tool in (add, place, broken, *HOSTILE, stuck)}
PYTHON = [{"type": "python", "name": name} for name in TOOLS]


def scripted(*texts: str) -> Callable[[Submit], Script]:
    left = list(texts)
    return lambda command: say(left.pop(0))


def made(*texts: str, **options: Any) -> Rig:
    return Rig(ScriptedEngine(scripted(*texts)), tools=TOOLS, **options)


async def test_a_tool_is_a_function_with_a_schema() -> None:
    assert add(2, b=3) == 5
    assert add.parameters["properties"]["how"]["enum"] == ["minus", "plus"]
    assert add.parameters["required"] == ["a"]
    assert (add.description, add.timeout) == ("Adds numbers.", 60)
    assert (place.name, place.description) == ("where", "Finds it.")
    assert add.bound({"a": 1, "how": "minus"})() == 0
    for bad in ({}, {"a": "x"}, {"a": 1, "c": 2}, [1], None):
        with pytest.raises(BadArguments):
            add.bound(bad)
    with pytest.raises(TypeError, match="annotation"):
        agentserve.tool(name="x")(lambda x: x)
    with pytest.raises(TypeError):
        agentserve.tool(timeout=0)(json.dumps)


async def test_modules_of_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_tools.py").write_text(
        "import agentserve\n\n@agentserve.tool\ndef one(x: int) -> int:\n    return x\n"
    )
    (tmp_path / "no_tools.py").write_text("x = 1\n")
    (tmp_path / "bad_tools.py").write_text("raise RuntimeError('oh\\nno')\n")
    assert list(load_tools(["some_tools"])) == ["one"]
    assert list(load_tools(["some_tools", "some_tools"])) == ["one"]
    for name in ("no_tools", "bad_tools", "there_is_none"):
        with pytest.raises(ValueError, match=f"--tools {name}"):
            load_tools([name])


async def test_python_functions_run_in_the_server() -> None:
    calls = hermes("add", '{"a": 2, "b": 40}') + hermes("where", '{"name": "Rome"}') + hermes("broken", "{}")
    rig = made(calls + hermes("add", '{"a": "x"}'), "Done.")
    agent = await created(rig, agent={"tools": PYTHON}, input="?")
    await agent.until("idle")
    outputs = [item for item in await agent.items() if item["type"] == "function_call_output"]
    assert [(item["output"], item["status"]) for item in sorted(outputs, key=lambda i: str(i["output"]))] == [
        ("42", "completed"),
        (None, "failed"),
        (None, "failed"),
        ('{"found":"Rome"}', "completed"),
    ]
    prompt = agent.prompt()
    said = ("42", "Rome", "no luck", "Bad arguments")
    assert sorted(map(prompt.rindex, said)) == list(map(prompt.rindex, said))  # in call order
    assert "requires_action" not in agent.kinds()
    shown = (await agent.get())["agent"]["tools"][0]
    assert (shown["type"], shown["name"], shown["parameters"]) == ("python", "add", add.parameters)
    check_events(agent.events())
    rig.check_rest()


async def test_what_a_function_does_to_leave_ends_its_call_only() -> None:
    names = ("leaves", "exits", "interrupts", "interrupts_here", "endless", "half")
    rig = made("".join(hermes(name, "{}") for name in names), "Done.")
    agent = await created(rig, agent={"tools": PYTHON}, input="?")
    await agent.until("idle")
    errors = {item["error"] for item in await agent.items() if item["type"] == "function_call_output"}
    assert errors == {
        "The tool failed.",
        "The tool failed: SystemExit: 1",
        "The tool failed: KeyboardInterrupt: mine",
        None,  # half of a surrogate pair is no text
        "The tool's output is too long for the context. Ask for less.",
    }
    check_events(agent.events())
    rig.check_rest()


async def test_functions_that_hang_take_a_bounded_number_of_threads() -> None:
    """A place is free when its function has ended, not when nobody waits for it any more."""
    gate.clear()
    runner = PythonTools(TOOLS, threads=1)
    call = ToolCall("s", "t", CallItem("f", "c", "stuck", "{}"))
    hanging = asyncio.create_task(runner.run(call))
    await settled(lambda: any(thread.name == "tool" for thread in threading.enumerate()))
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    second = asyncio.create_task(runner.run(ToolCall("s", "t", CallItem("f", "c", "add", '{"a": 1}'))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    gate.set()
    assert await second == ToolOutcome("2")


async def test_both_kinds_at_once() -> None:
    rig = made(hermes("add", '{"a": 2}') + CALL, "Done.")
    agent = await created(rig, agent={"tools": [*PYTHON, WEATHER]}, input="?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    assert call["name"] == "weather"
    await settled(lambda: len(agent.history.outputs()) == 1)
    added = next(item for item in await agent.items() if item.get("name") == "add")
    assert (await agent.give(added, "7", status=409))["code"] == "result_conflict"
    await agent.give(call)
    await agent.until("idle")
    check_events(agent.events())


async def test_a_tool_that_takes_too_long_is_an_error_that_the_model_reads() -> None:
    gate.clear()
    time = Sleeper()
    rig = made(hermes("stuck", "{}") + CALL, "Done.", sleep=time.sleep, wall=time.wall)
    agent = await created(rig, agent={"tools": [*PYTHON, {**WEATHER, "timeout": 2.5}]}, input="?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    session = rig.context.directory.get("default", agent.id)
    assert session.said.wait.deadline is not None  # the tiers know until when it is waited for
    await settled(lambda: len(time._sleeping) == 2)
    time.pass_(2.5)
    await settled(lambda: len(agent.history.outputs()) == 1)
    assert (await agent.give(call, status=409))["code"] == "result_conflict"
    time.pass_(2.5)
    await agent.until("idle")
    gate.set()
    prompt = agent.prompt()
    assert "Error: The tool did not answer within 5 s." in prompt
    assert "Error: The tool did not answer within 2.5 s." in prompt
    check_events(agent.events())
    rig.check_rest()


async def test_cancel_stops_what_runs() -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    class Endless:
        lasting = True

        def settled(self, call: Any) -> None:
            """Nothing is owed."""

        async def run(self, call: ToolCall) -> ToolOutcome:
            started.set()
            try:
                return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
            finally:
                stopped.set()

    rig = made(hermes("add", '{"a": 2}'), "Fine.")
    rig.context.agents.means.runners["python"] = Endless()  # type: ignore[index]
    agent = await created(rig, agent={"tools": PYTHON}, input="?")
    await started.wait()
    await agent.send(CANCEL, message("Go on."))
    await asyncio.wait_for(stopped.wait(), 5)
    await agent.until("idle")
    assert "No result: the call was cancelled." in agent.prompt()
    check_events(agent.events())
    rig.check_rest()


async def test_a_background_call_is_not_waited_for() -> None:
    hold = say("I wait.", hold_at=3)
    left = [say(CALL), hold, say("It rains now."), say("Bye.")]
    rig = Rig(ScriptedEngine(lambda command: left.pop(0)))
    agent = await created(rig, agent={"tools": [{**WEATHER, "async": True}]}, input="?")
    await settled(lambda: len(rig.engine.submits) == 2)
    assert "runs in the background" in agent.prompt()
    call = next(item for item in await agent.items() if item["type"] == "function_call")
    assert (call["status"], (await agent.get())["required_actions"]) == ("in_progress", [])
    await agent.give(call, "rain")
    await agent.give(call, "rain")
    assert (await agent.give(call, "sun", status=409))["code"] == "result_conflict"
    hold.release.set()
    await agent.until("idle")
    assert len(rig.engine.submits) == 3  # it came while the turn ran, so the model reads it at once
    assert "rain" in agent.prompt()
    await agent.say("Thanks.")
    await agent.until("idle")
    assert agent.prompt().count("[Result of the background call") == 1
    check_events(agent.events())
    rig.check_rest()


async def test_a_background_result_after_its_turn_comes_with_the_next() -> None:
    left = [say(CALL), say("I wait."), say("It rains.")]
    rig = Rig(ScriptedEngine(lambda command: left.pop(0)))
    agent = await created(rig, agent={"tools": [{**WEATHER, "async": True}]}, input="?")
    await agent.until("idle")
    call = next(item for item in await agent.items() if item["type"] == "function_call")
    await agent.give(call, "rain")
    assert len(rig.engine.submits) == 2
    await agent.say("And now?")
    await agent.until("idle")
    assert "weather)]\nrain" in agent.prompt()
    check_events(agent.events())


async def test_a_turn_ends_when_the_model_does_not_stop_calling() -> None:
    rig = Rig(ScriptedEngine(say(hermes("add", '{"a": 1}'))), tools=TOOLS)
    office = rig.context.agents
    office.means = replace(office.means, most_steps=3)
    agent = await created(rig, agent={"tools": PYTHON}, input="?")
    await agent.until("idle")
    (turn,) = (await agent.get("/turns"))["data"]
    assert (turn["status"], len(rig.engine.submits)) == ("failed", 3)
    await agent.say("Stop.", says="Ok.")
    await agent.until("idle")
    check_events(agent.events())
    rig.check_rest()


async def test_settings_of_the_agent_are_those_of_its_model_calls() -> None:
    rig = made(TWO, "Done.")
    settings = {"temperature": 0, "seed": 7, "max_output_tokens": 900, "tool_choice": "required"}
    agent = await created(rig, agent=settings, input="?")
    for call in (await agent.until("requires_action"))["required_actions"]:
        await agent.give(call)
    await agent.until("idle")
    first, second = (submit.sampling for submit in rig.engine.submits)
    assert (first.temperature, first.seed, first.max_tokens) == (0, 7, 900)
    assert first.grammar is not None
    assert second.grammar is None  # a choice that forces a call forces the first one only
    assert {**(await agent.get())["agent"], **settings} == (await agent.get())["agent"]
