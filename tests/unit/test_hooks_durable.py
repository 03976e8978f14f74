"""What a webhook call lets go of, and what is told of it, waits for the disk: it is true after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import agentserve
from agentserve.clock import VirtualClock
from agentserve.server.agents.shelf import Shelf
from agentserve.server.sessions.book import StorageError
from agentserve.server.sessions.chronicle import Chronicle
from agentserve.server.sessions.directory import SessionDirectory
from agentserve.server.sessions.events import EventLogs
from agentserve.server.sessions.identity import new_session_id
from agentserve.server.sessions.journal import Journal
from agentserve.server.sessions.transcript import Transcripts
from tests.agents_machine import Machine
from tests.agents_rig import CALL, CANCEL, TWO, WEATHER, Agent, body, created
from tests.api_rig import settled
from tests.fakes import ScriptedEngine, say
from tests.hooks_rig import LATER, URL, HooksRig, result, webhook_tool
from tests.session_stores import MemoryStore
from tests.webhook_rig import settle

OTHER = "https://other.example/hook"


class DurableHooks(HooksRig):
    """Its sessions are on a disk that a test can hold up."""

    def __init__(self) -> None:
        self.store, clock = MemoryStore(), VirtualClock(50.0)
        self.journal = Journal(self.store, b"text", clock, lambda: 1e9, 1e6)  # type: ignore[arg-type]
        transcripts = Transcripts()
        self.journal.words_of = transcripts.export
        super().__init__(
            directory=SessionDirectory(new_session_id, max_wait=1000.0, book=self.journal),
            journal=self.journal,
            clock=clock,
            chronicle=Chronicle(transcripts, EventLogs(lambda: "epoch")),
            agents=Shelf(),
        )

    async def asks(self) -> None:
        """Until the disk is asked for something that it does not do yet."""
        await asyncio.to_thread(self.store.asked.acquire)

    def quiet(self) -> None:
        while self.store.asked.acquire(blocking=False):
            pass

    async def two_calls(self) -> Agent:
        """One to URL, one to OTHER."""
        tools = [
            webhook_tool(await self.endpoint()),
            webhook_tool(await self.endpoint(OTHER, payload="full"), name="now"),
        ]
        replies = iter([say(TWO)])
        self.rig.engine.reply = lambda command: next(replies, say("It rains."))
        reply = await self.rig.post("/v1/agents/sessions", body({"tools": tools}, input="a"))
        return Agent(self.rig, reply.json())

    async def close(self) -> None:
        self.store.open.set()
        await super().close()
        await self.journal.close()


@pytest.fixture
async def desk() -> AsyncIterator[DurableHooks]:
    made = DurableHooks()
    yield made
    await made.close()


def owed(desk: HooksRig) -> set[str]:
    ledger = desk.hooks.ledger
    return {ledger.endpoint(one.endpoint).url for one in (*ledger.pending(), *ledger.unacknowledged())}


def results_of(agent: Agent) -> list[str]:
    return [
        event["item"]["output"]
        for event in agent.events()
        if event["type"].endswith("item.added") and event["item"]["type"] == "function_call_output"
    ]


async def test_an_outcome_is_acknowledged_after_its_own_write(desk: DurableHooks) -> None:
    """Not when another call's result is there, while its own is on its way to the disk."""
    desk.sender.hold(URL)
    desk.sender.answer(OTHER, LATER)
    desk.sender.answer(URL, result("rain"))
    agent = await desk.two_calls()
    await settled(lambda: len(desk.sender.posts) == 2)
    desk.quiet()
    desk.store.open.clear()
    desk.sender.release(URL)
    await desk.asks()  # the result of URL is being written
    desk.rig.context.agents.heard("default", agent.id)  # as when another result came
    await asyncio.sleep(0.05)
    assert URL in owed(desk)
    assert results_of(agent) == []
    desk.store.open.set()
    await settled(lambda: results_of(agent) == ["rain"])
    await settled(lambda: URL not in owed(desk))


async def test_a_delivery_is_withdrawn_after_the_write_of_what_came_instead(desk: DurableHooks) -> None:
    desk.sender.hold(URL)
    agent = await desk.agent(await desk.endpoint(), timeout=5)
    await settled(lambda: len(desk.sender.posts) == 1)
    desk.quiet()
    desk.store.open.clear()
    passing = asyncio.create_task(desk.clock.pass_by(5))
    await desk.asks()  # that its time is over is being written
    await passing
    assert desk.hooks.counts["withdrawn"] == 0
    desk.store.open.set()
    assert await desk.outcome(agent) == "The tool did not answer within 5 s."
    await settled(lambda: owed(desk) == set())


async def test_a_result_that_the_disk_does_not_take_is_brought_again(desk: DurableHooks) -> None:
    desk.sender.hold(URL)
    desk.sender.answer(URL, result("rain"))
    agent = await desk.agent(await desk.endpoint())
    await desk.sent()
    desk.store.error = "No space left on device"
    desk.sender.release(URL)
    for _ in range(3):
        await desk.clock.pass_by(2)
        await asyncio.sleep(0.02)
    assert results_of(agent) == []
    assert owed(desk) == {URL}
    desk.store.error = ""
    await desk.clock.pass_by(31)
    assert await desk.outcome(agent) == "rain"
    await settled(lambda: owed(desk) == set())


async def test_a_cancel_while_the_disk_does_not_take_a_result(desk: DurableHooks) -> None:
    desk.sender.answer(URL, result("rain"))
    desk.sender.hold(URL)
    agent = await desk.agent(await desk.endpoint())
    await desk.sent()
    desk.store.error = "No space left on device"
    desk.sender.release(URL)
    await desk.clock.pass_by(2)
    await agent.send(CANCEL)
    desk.store.error = ""
    await settled(lambda: owed(desk) == set())
    await agent.say("So?", says="Well.")
    await agent.until("idle")


@agentserve.tool
def broken(city: str) -> str:
    """Half a character."""
    return "\ud800"


async def test_what_a_tool_returns_that_no_model_can_read() -> None:
    machine = Machine(ScriptedEngine(), {"broken": broken})
    replies = iter([say(CALL.replace("weather", "broken"))])
    machine.engine.reply = lambda command: next(replies, say("Hm."))
    agent = await created(machine.rig, agent={"tools": [{"type": "python", "name": "broken"}]}, input="?")
    await agent.until("idle")
    assert "tool\n?\nassistant" in agent.prompt(), "what is no character is replaced"
    await machine.close()


# --- ids ---------------------------------------------------------------------------------


def ids(agent: Agent) -> dict[str, Any]:
    """Of the items that were told as done."""
    done = [event["item"] for event in agent.events() if event["type"].endswith("item.done")]
    added = [event["item"] for event in agent.events() if event["type"].endswith("item.added")]
    return {item["id"]: item["type"] for item in (*added, *done)}


@pytest.mark.parametrize("lost", range(1, 8))
async def test_what_was_told_has_its_id_for_good(lost: int) -> None:
    """However much of the agents' disk nobody had waited for when the server was killed."""
    machine = Machine(ScriptedEngine())
    agent = await created(machine.rig, "Let me see.\n" + TWO, agent={"tools": [WEATHER]}, input="Weather?")
    (first, second) = (await agent.until("requires_action"))["required_actions"]
    await agent.give(first)
    told = ids(agent)
    assert set(told.values()) == {"message", "function_call", "function_call_output"}
    agent = await machine.kill(agent, lost)
    await settled(lambda: len(agent.history.outputs()) == 1)
    assert told.keys() <= {item["id"] for item in await agent.items()}
    machine.engine.reply = say("It rains.")
    await agent.give(second)
    await agent.until("idle")
    told |= ids(agent)
    agent = await machine.kill(agent, lost)
    await agent.until("idle")
    items = [item["id"] for item in await agent.items()]
    assert len(set(items)) == len(items)
    assert told.keys() <= set(items)
    await machine.close()


async def test_a_disk_that_fails_at_the_start_ends_no_turn() -> None:
    machine = Machine(ScriptedEngine())
    agent = await created(machine.rig, CALL, input="Weather?")
    (call,) = (await agent.until("requires_action"))["required_actions"]
    agent = await machine.kill(agent)
    machine.book.error = StorageError("No space left on device")
    await settle()
    assert (await agent.get())["status"] == "requires_action"
    machine.book.error = None
    machine.engine.reply = say("It rains.")
    await agent.give(call)
    await agent.until("idle")
    await machine.close()


async def test_a_message_that_died_with_its_server_is_not_the_one_that_is_said_instead() -> None:
    machine = Machine(ScriptedEngine())
    agent = await created(machine.rig, say("Hello!", hold_at=3), input="Hi")
    await settled(lambda: "turn.output_text.delta" in agent.kinds())
    (void,) = (id_ for id_, kind in ids(agent).items() if kind == "message" and id_ not in kept(agent))
    machine.engine.reply = say("Hello!")
    agent = await machine.kill(agent)
    await agent.until("idle")
    assert void not in {item["id"] for item in await agent.items()}
    await machine.close()


def kept(agent: Agent) -> set[str]:
    return {item.id for item, _ in agent.history.items()}
