"""One response, or one tenant, does not take all there is for calls of MCP servers' tools."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response

from agentserve.server.agents import remote
from agentserve.server.agents.runners import ToolOutcome
from agentserve.server.http.responses import rounds
from agentserve.server.http.responses.mcp_events import McpEvents
from tests.fakes import ScriptedEngine
from tests.mcp_rig import server
from tests.responses_mcp_rig import (
    SUM,
    approval,
    begins_with_all_before,
    checked_mcp,
    client_of,
    of_kind,
)
from tests.responses_rig import RESPONSES, parsed, text_of
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


async def test_cancelled_while_calls_run_shows_them_and_goes_on() -> None:
    client, mcp = client_of(SUM, "Never.")
    mcp.answer = gate = Gate(1)
    made = await client.create("1 + 2?", tools=[server()], background=True)
    await gate.full.wait()
    await client.rig.post(f"{RESPONSES}/{made['id']}/cancel", {})
    cancelled = await client.get(f"{RESPONSES}/{made['id']}")
    assert [(item["type"], item.get("status")) for item in cancelled["output"]] == [
        ("mcp_list_tools", None),
        ("mcp_call", "incomplete"),
    ]
    assert cancelled["status"] == "cancelled"
    Response.model_validate(cancelled)
    events = parsed((await client.rig.client.get(f"{RESPONSES}/{made['id']}?stream=true")).content)
    assert checked_mcp(events)["output"] == cancelled["output"]
    assert text_of(await client.create("And?", tools=[server()], previous_response_id=made["id"])) == "Never."
    assert begins_with_all_before(client)
    client.rig.check_rest()


async def test_an_approved_call_that_was_cancelled_is_shown_and_not_made_again() -> None:
    client, mcp = client_of("Done.")
    mcp.answer = gate = Gate(2)
    made = await client.create(approvals(2), tools=[server()], background=True)
    await gate.full.wait()
    await client.rig.post(f"{RESPONSES}/{made['id']}/cancel", {})
    cancelled = await client.get(f"{RESPONSES}/{made['id']}")
    calls = [item["status"] for item in cancelled["output"] if item["type"] == "mcp_call"]
    assert calls == ["incomplete"] * 2
    await client.create("Well?", tools=[server()], previous_response_id=made["id"])
    assert len(mcp.calls) == 2
    client.rig.check_rest()


def test_items_are_placed_in_as_many_steps_as_there_are() -> None:
    class Counted(list[Any]):
        steps = 0

        def __getitem__(self, index: Any) -> Any:
            type(self).steps += 1
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Any]:
            type(self).steps += len(self)
            return super().__iter__()

    output, fresh = Counted(), itertools.count()
    made = McpEvents(lambda kind, **fields: fields, output, lambda prefix: f"{prefix}_{next(fresh)}")
    request = {"id": "r", "server_label": "s", "name": "n", "arguments": "{}"}
    for number in range(2000):
        assert {event["output_index"] for event in made.approved(request)} == {number}
    ids = [item["id"] for item in made.open]
    for id_ in ids:
        made.put(id_, ToolOutcome("3"))
    assert [made.ran(id_)[0]["output_index"] for id_ in ids] == list(range(2000))
    assert Counted.steps < 10 * 2000
