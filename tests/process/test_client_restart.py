"""`kill -9` of the server under a client that is in the middle of a turn: the client goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentserve.client import (
    AsyncClient,
    Client,
    Message,
    Resynced,
    Retry,
    TextDelta,
    ToolCalled,
    ToolReturned,
    TurnEnded,
    TurnResult,
    tool,
)
from tests.api_rig import Rig, hermes, served
from tests.client_rig import calling, messages_of, obey
from tests.fakes import Script, ScriptedEngine, say
from tests.process.serving import url_of
from tests.process.test_proc_launch import until

pytestmark = pytest.mark.process

SERVER = Path(__file__).with_name("scripted_server.py")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "client_agent.py"
RETRY = Retry(first=0.05, longest=0.2, patience=120.0)


class Server:
    def __init__(self, data: Path) -> None:
        self._data = data
        self.url = self.start("0")

    def start(self, port: str) -> str:
        command = [sys.executable, str(SERVER), port, str(self._data)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return url_of(self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def restart(self) -> None:
        """No farewell."""
        self.kill()
        assert self.start(self.url.rpartition(":")[2]) == self.url


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


async def both(server: Server, text: str, tools: list[Any]) -> tuple[list[Any], TurnResult]:
    async with AsyncClient(server.url, retry=RETRY) as client:
        session = await client.sessions.create("tiny", tools=tools)
        async with session.run(text) as turn:
            return [event async for event in turn], await turn.result()


def check(events: list[Any], result: TurnResult, outputs: list[str]) -> None:
    assert result.raise_for_status().text == "Results: " + ", ".join(outputs)
    assert len([event for event in events if isinstance(event, ToolCalled)]) == len(outputs)
    assert sorted(e.output for e in events if isinstance(e, ToolReturned)) == sorted(outputs)
    assert [event.final for event in events if isinstance(event, Message)] == [False, True]
    assert isinstance(events[-1], TurnEnded)
    assert any(isinstance(event, Resynced) for event in events)


async def test_the_server_dies_while_the_client_has_a_result_for_it(server: Server) -> None:
    """One result is there before, one comes after, one is uploaded across the kill."""
    ran: list[str] = []
    early, restarted = asyncio.Event(), asyncio.Event()

    @tool
    async def first() -> str:
        ran.append("first")
        return "one"

    @tool
    async def second() -> str:
        ran.append("second")
        await early.wait()
        await asyncio.to_thread(server.restart)
        restarted.set()
        return "two"

    @tool
    async def third() -> AsyncIterator[str]:
        ran.append("third")
        yield "th"
        early.set()
        await restarted.wait()
        yield "ree"

    events, result = await both(server, calling(first={}, second={}, third={}), [first, second, third])
    check(events, result, ["one", "two", "three"])
    assert sorted(ran) == ["first", "second", "third"]  # nothing runs twice


def test_the_same_without_asyncio_and_a_client_that_died_as_well(server: Server) -> None:
    ran: list[int] = []

    @tool
    def restarts(n: int) -> str:
        ran.append(n)
        server.restart()
        return f"{n}"

    with Client(server.url, retry=RETRY) as client:
        session = client.sessions.create("tiny", tools=[restarts])
        with session.run(calling(restarts={"n": 1})) as turn:
            events = list(turn)
        check(events, turn.result(), ["1"])
        assert ran == [1]

        left = session.run(calling(restarts={"n": 2}))
        while not isinstance(next(left), Message):
            pass
        left.close()  # before it has run anything
    with Client(server.url, retry=RETRY) as client:
        again = client.sessions.get(session.id, tools=[restarts])
        until(lambda: again.refresh().status == "requires_action")
        result = again.resume().result()
        assert result.text == "Results: 2"
        assert [turn["status"] for turn in again.turns()] == ["completed", "completed"]


async def test_the_server_dies_in_the_middle_of_a_word(server: Server) -> None:
    """What it had said of the item is void, and said anew by the next one."""
    async with AsyncClient(server.url, retry=RETRY) as client:
        session = await client.sessions.create("tiny")
        turn, said, dropped = session.run("hang Hello from here."), {}, ()
        async for event in turn:
            if isinstance(event, TextDelta):
                said[event.item] = said.get(event.item, "") + event.text
                if list(said.values()) == ["Hello "]:
                    await asyncio.to_thread(server.restart)
            elif isinstance(event, Resynced):
                dropped = event.dropped
        assert list(said.values()) == ["Hello ", "Hello from here."]
        assert list(dropped) == list(said)[:1]
        assert (await turn.result()).text == "Hello from here."


async def test_the_example() -> None:
    def reply(submit: Any) -> Script:
        role, text = messages_of(submit)[-2]
        if role == "tool":
            return obey(submit)
        assert text == "What are the weather and the time in Oslo?"
        return say(hermes("weather", '{"city": "Oslo"}') + hermes("clock", '{"zone": "CET"}'))

    rig = Rig(ScriptedEngine(reply))
    async with served(rig.app) as url:
        run = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), url, "tiny", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await run.communicate()
    assert run.returncode == 0
    assert out.decode().splitlines() == [
        "call: weather({'city': 'Oslo'})",
        "call: clock({'zone': 'CET'})",
        'Results: sunny, 24 degrees in Oslo, {"zone":"CET","time":"12:34"}',
        "completed: every result was taken",
    ]
    assert len(EXAMPLE.read_text().splitlines()) < 45
