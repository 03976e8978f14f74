"""Places: how many run at once, of one owner and of all."""

from __future__ import annotations

import asyncio

from agentserve.server.agents.places import Places
from agentserve.server.agents.records import MOST_MCP_SECONDS, CallItem, McpServer
from agentserve.server.agents.remote import McpTools
from agentserve.server.agents.runners import ToolCall
from tests.mcp_rig import URL, FakeMcp


async def test_one_owner_has_his_share_and_others_theirs() -> None:
    places, go = Places(2, 4), asyncio.Event()
    running: list[str] = []

    async def work(owner: str) -> None:
        async with places.one(owner):
            running.append(owner)
            await go.wait()

    tasks = [asyncio.create_task(work(owner)) for owner in "aaaaabb"]
    for _ in range(9):
        await asyncio.sleep(0)
    assert running == ["a", "a", "b"]
    tasks[0].cancel()
    tasks[3].cancel()  # one that waits
    for _ in range(9):
        await asyncio.sleep(0)
    assert sorted(running) in (["a", "a", "a", "b"], ["a", "a", "b", "b"])
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(running) == ["a"] * 4 + ["b"] * 2
    assert not places._held
    assert not places._waiting
    assert not places._all


async def test_an_old_agents_call_takes_no_longer_than_any() -> None:
    mcp = FakeMcp()
    item = CallItem("i", "c", "add", "{}", "mcp", server="calc", remote="add")
    await McpTools(mcp).run(ToolCall("s", "t", item, server=McpServer("calc", URL, timeout=3600.0)))
    assert mcp.seconds == MOST_MCP_SECONDS
