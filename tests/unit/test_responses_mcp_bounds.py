"""One response, or one tenant, does not take all there is for calls of MCP servers' tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.server.agents import remote
from agentserve.server.http.responses import rounds
from tests.fakes import ScriptedEngine
from tests.mcp_rig import server
from tests.responses_mcp_rig import approval, client_of, of_kind
from tests.responses_rig import RESPONSES
from tools_bridge.mcp.types import Answer


def approvals(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Requests that nobody made, approved."""
    ids = [f"mcpr_{n:024x}{n:022x}00" for n in range(first, first + count)]
    named = {"type": "mcp_approval_request", "server_label": "calc", "name": "add", "arguments": "{}"}
    return [
        {"role": "user", "content": "go"},
        *({"id": id_, **named} for id_ in ids),
        *(approval({"id": id_}) for id_ in ids),
    ]


class Gate:
    """Calls hang until it opens. It is `full` when there are so many of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now = self.most = 0
        self.go, self.full = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> Answer:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now >= self.count:
            self.full.set()
        try:
            await self.go.wait()
        finally:
            self.now -= 1
        return Answer("3")


async def some_time() -> None:
    for _ in range(300):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_calls_of_one_response_wait_in_line() -> None:
    client, mcp = client_of("Done.")
    mcp.answer = gate = Gate(rounds.MOST_AT_ONCE)
    made = asyncio.create_task(client.create(approvals(20), tools=[server()]))
    await gate.full.wait()
    await some_time()
    assert gate.now == rounds.MOST_AT_ONCE
    gate.go.set()
    response = await made
    assert gate.most == rounds.MOST_AT_ONCE
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [call["status"] for call in calls] == ["completed"] * 20
    client.rig.check_rest()


async def test_one_tenant_has_a_share_and_listings_are_made_all_the_same() -> None:
    client, mcp = client_of("Done.")
    mcp.answer = gate = Gate(remote.TENANT_CALLS)
    ids = []
    for number in range(6):
        made = await client.create(approvals(10, number * 10), tools=[server()], background=True)
        ids.append(made["id"])
    await gate.full.wait()
    await some_time()
    assert gate.now == remote.TENANT_CALLS
    listed = await client.create("Hi", tools=[server()])
    assert of_kind(listed, "mcp_list_tools")["tools"]
    for id_ in ids:
        await client.rig.post(f"{RESPONSES}/{id_}/cancel", {})
    await some_time()
    assert not gate.now
    client.rig.check_rest()


async def test_where_nothing_is_said_there_is_a_bound() -> None:
    client, mcp = client_of("Done.", engine=ScriptedEngine(max_model_len=1 << 17))
    response = await client.create(approvals(rounds.MOST_CALLS + 3), tools=[server()])
    assert len(mcp.calls) == rounds.MOST_CALLS
    assert [item["status"] for item in response["output"][-4:-1]] == ["failed"] * 3


@pytest.mark.parametrize("most", [-1, -(2**40)])
async def test_fewer_than_no_calls_is_a_400(most: int) -> None:
    client, mcp = client_of("Done.")
    error = await client.refused("Hi", tools=[server()], max_tool_calls=most)
    assert error["param"] == "max_tool_calls"
    assert not mcp.places
