"""Tools that the agent does not wait for, and calls that its client allows, with and without asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from agentserve.client import ApprovalAsked, AsyncClient, Client, Conflict, Retry, ToolReturned, tool
from tests.api_rig import Rig, served, settled
from tests.client_rig import calling, messages_of, obey
from tests.cutting_proxy import cutting
from tests.fakes import Script, ScriptedEngine, say
from tests.mcp_rig import ADD, FakeMcp, server

RETRY = Retry(first=0.01, longest=0.05, patience=20.0)
pytestmark = pytest.mark.process


def reply(submit: Any) -> Script:
    """Calls what it is asked to; to the word that a call runs it says `Started.`, else what it has read."""
    *_, (role, text), _ = messages_of(submit)
    if role == "tool":
        return say("Started." if "runs in the background" in text else f"Read: {text}")
    if text.startswith("call "):
        return obey(submit)
    return say(f"Read: {text.splitlines()[-1]}")


@pytest.fixture
async def rig() -> Rig:
    return Rig(ScriptedEngine(reply))


@pytest.fixture
async def url(rig: Rig) -> AsyncIterator[str]:
    async with served(rig.app) as base:
        yield base


async def test_the_turn_ends_before_its_tool(rig: Rig, url: str) -> None:
    go = asyncio.Event()

    @tool(background=True)
    async def report(about: str) -> str:
        """Takes its time."""
        await go.wait()
        return f"all of {about}"

    async with (
        AsyncClient(url, retry=RETRY) as client,
        await client.sessions.create("tiny", tools=[report]) as session,
    ):
        first = await session.run(calling(report={"about": "trains"})).result()
        assert first.text == "Started."
        go.set()
        await session.wait_for_background()
        second = await session.run("And?").result()
        assert "all of trains" in messages_of(rig.engine.submits[-1])[-2][1]
        assert second.status == "completed"
        outputs = [item for item in await session.items() if item["type"] == "function_call_output"]
        assert [item["output"] for item in outputs] == ["all of trains"]
        assert not session.refused


async def test_without_asyncio(rig: Rig, url: str) -> None:
    go = threading.Event()

    @tool(background=True)
    def report(about: str) -> Iterator[str]:
        """In pieces: they are sent when all are there."""
        go.wait(20)
        yield "all of "
        yield about

    def work() -> None:
        with (
            Client(url, retry=RETRY) as client,
            client.sessions.create("tiny", tools=[report]) as session,
        ):
            assert session.run(calling(report={"about": "trains"})).result().text == "Started."
            go.set()
            session.wait_for_background()
            session.run("And?").result()
            assert "all of trains" in messages_of(rig.engine.submits[-1])[-2][1]

    await asyncio.to_thread(work)


async def test_it_ends_within_its_turn_and_beside_others(rig: Rig, url: str) -> None:
    """The model reads it in the same turn, with the result of the call that was waited for."""
    brought = asyncio.Event()

    @tool(background=True)
    async def report() -> str:
        return "all"

    @tool
    async def weather() -> str:
        await brought.wait()
        return "rain"

    async with (
        AsyncClient(url, retry=RETRY) as client,
        await client.sessions.create("tiny", tools=[report, weather]) as session,
    ):
        returned = []
        async for event in session.run(calling(report={}, weather={})):
            if isinstance(event, ToolReturned):
                returned.append(event.output)
                brought.set()
        assert returned == ["all", "rain"]
        history = [text for _, text in messages_of(rig.engine.submits[-1])]
        assert any("all" in text for text in history)


@pytest.mark.parametrize("failure", ["raises", "late"])
async def test_what_goes_wrong_is_read_later(rig: Rig, url: str, failure: str) -> None:
    @tool(background=True, timeout=0.05)
    async def report() -> str:
        if failure == "raises":
            raise ValueError("no such report")
        await asyncio.Event().wait()
        return ""

    async with (
        AsyncClient(url, retry=RETRY) as client,
        await client.sessions.create("tiny", tools=[report]) as session,
    ):
        await session.run(calling(report={})).result()
        await session.wait_for_background()
        await session.run("And?").result()
        told = "\n".join(text for _, text in messages_of(rig.engine.submits[-1]))
        assert ("no such report" if failure == "raises" else "longer than 0.05 s") in told


@pytest.mark.parametrize("cut", [0, 3, 6, 9])
async def test_a_stream_that_is_cut_runs_it_once(rig: Rig, url: str, cut: int) -> None:
    runs: list[str] = []

    @tool(background=True)
    async def report() -> str:
        runs.append("once")
        return "all"

    async with (
        cutting(url, [cut, cut]) as (proxy, _),
        AsyncClient(proxy, retry=RETRY) as client,
        await client.sessions.create("tiny", tools=[report]) as session,
    ):
        await session.run(calling(report={})).result()
        await session.wait_for_background()
        await session.run("And?").result()
        assert runs == ["once"]
        assert any("all" in text for _, text in messages_of(rig.engine.submits[-1])[1:])


async def test_a_client_that_leaves_ends_what_runs(rig: Rig, url: str) -> None:
    ended = asyncio.Event()

    @tool(background=True)
    async def report() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    async with AsyncClient(url, retry=RETRY) as client:
        session = await client.sessions.create("tiny", tools=[report])
        await session.run(calling(report={})).result()
        assert not ended.is_set()
    assert ended.is_set()
    await settled(lambda: not rig.engine.live)


@pytest.mark.parametrize("approve", [True, False])
async def test_a_call_that_is_to_be_allowed(approve: bool) -> None:
    mcp = FakeMcp(ADD)
    rig = Rig(ScriptedEngine(reply), mcp=mcp)
    given = server(require_approval="always")

    def work(url: str) -> list[Any]:
        with (
            Client(url, retry=RETRY) as client,
            client.sessions.create("tiny", tools=[given]) as session,
        ):
            asked = []
            for event in session.run(calling(add={"a": 1})):
                if isinstance(event, ApprovalAsked):
                    asked.append(event)
                    session.decide(event.request, approve=approve)
                    session.decide(event.request, approve=approve)
                    with pytest.raises(Conflict):
                        session.decide(event.request, approve=not approve)
            return asked

    async with served(rig.app) as url:
        (asked,) = await asyncio.to_thread(work, url)
        assert (asked.server, asked.name, asked.arguments) == ("calc", "add", {"a": 1})
        async with (
            AsyncClient(url, retry=RETRY) as client,
            await client.sessions.create("tiny", tools=[given]) as session,
        ):
            turn = session.run(calling(add={"a": 1}))
            async for event in turn:
                if isinstance(event, ApprovalAsked):
                    await session.decide(event.request, approve=approve)
            text = (await turn.result()).text
    assert len(mcp.calls) == (2 if approve else 0)
    assert ("3" if approve else "did not allow") in text
