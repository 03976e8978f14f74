"""Who leaves while servers are asked for their tools leaves no request, place or connection behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentserve.server.agents.places import Places
from agentserve.server.agents.records import McpServer
from agentserve.server.agents.remote import TENANT_LISTINGS, McpTools
from tests.api_rig import Rig, served, settled
from tests.mcp_rig import ADD, URL, FakeMcp, server
from tools_bridge.mcp.types import ListedTool, Place


class Hanging(FakeMcp):
    """Listings never come, and take their time to be left."""

    def __init__(self) -> None:
        super().__init__(ADD)
        self.open = self.begun = 0
        self.let_go, self.over = asyncio.Event(), asyncio.Event()

    async def list_tools(self, place: Place, seconds: float) -> list[ListedTool]:
        self.open += 1
        self.begun += 1
        try:
            await self.over.wait()
        finally:
            await self.let_go.wait()
            self.open -= 1
        return []


async def left(base: str, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    host, _, port = base.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return writer


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
async def test_requests_whose_clients_left_end(path: str, more: dict[str, Any]) -> None:
    mcp = Hanging()
    mcp.let_go.set()
    rig = Rig(mcp=mcp)
    body = {"model": "tiny", "input": "Hi", "tools": [server()], **more}
    async with served(rig.app) as base:
        before = len(asyncio.all_tasks())
        writers = [await left(base, path, body) for _ in range(2 * TENANT_LISTINGS)]
        await settled(lambda: mcp.open == TENANT_LISTINGS)
        for writer in writers:
            writer.close()
        try:
            await settled(lambda: not mcp.open and len(asyncio.all_tasks()) <= before)
        finally:
            mcp.over.set()
        assert not rig.context.responses.lives.running
    rig.check_rest()


async def test_a_place_is_taken_until_its_server_was_left() -> None:
    """Goodbyes hold connections: who begins and leaves again and again would take every descriptor."""
    mcp = Hanging()
    tools = McpTools(mcp)
    remote = McpServer("calc", URL)
    for _ in range(3 * TENANT_LISTINGS):
        task = asyncio.create_task(tools.ask([remote], "a"))
        for _ in range(9):
            await asyncio.sleep(0)
        task.cancel()
        await settled(task.cancelled)  # who leaves does not wait for the server
    assert mcp.open == mcp.begun == TENANT_LISTINGS
    mcp.let_go.set()
    await settled(lambda: not mcp.open)
    task = asyncio.create_task(tools.ask([remote], "a"))
    await settled(lambda: mcp.begun == TENANT_LISTINGS + 1)
    task.cancel()
    await settled(lambda: not mcp.open)


async def test_a_few_owners_do_not_take_all() -> None:
    """However many want all they can get, somebody who has nothing has a place at once."""
    places, go = Places(32, 128), asyncio.Event()
    running: list[str] = []

    async def work(owner: str) -> None:
        async with places.one(owner):
            running.append(owner)
            await go.wait()

    tasks = [asyncio.create_task(work(f"greedy {n}")) for n in range(6) for _ in range(100)]
    for _ in range(9):
        await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("modest")))
    for _ in range(9):
        await asyncio.sleep(0)
    assert "modest" in running
    assert running.count("greedy 0") == 32
    go.set()
    await asyncio.gather(*tasks)
    assert len(running) == 601
