"""Calls that were approved have effects: they are made once, and for no request that is refused."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from agentserve.server.http.responses.desk import Desk
from agentserve.server.http.responses.records import Records
from agentserve.server.http.responses.rounds import NOT_KEPT, ONCE
from agentserve.server.http.responses.spent import Spent
from agentserve.server.sessions.book import StorageError
from tests.mcp_rig import FakeMcp, server
from tests.responses_mcp_rig import SUM, approval, client_of, of_kind
from tests.responses_rig import Client, text_of
from tests.unit.test_responses_mcp_bounds import approvals
from tools_bridge.mcp.types import Answer


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "nope"},
        {"temperature": 99},
        {"top_logprobs": 999},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "odd"}}},
        {"reasoning": {"effort": "huge"}},
        {"chat_template_kwargs": {"x": "y" * 2_000_000}},
        {"instructions": "word " * 5000},
        {"tool_choice": {"type": "function", "name": "nope"}},
    ],
)
@pytest.mark.parametrize("more", [{}, {"background": True}])
async def test_no_call_is_made_for_a_request_that_is_refused(
    wrong: dict[str, Any], more: dict[str, Any]
) -> None:
    client, mcp = client_of("Done.")
    body = {"model": "tiny", "input": approvals(1), "tools": [server()], **wrong, **more}
    reply = await client.rig.post("/v1/responses", body)
    assert 400 <= reply.status_code < 500, reply.text
    assert not mcp.calls
    client.rig.check_rest()


async def test_a_call_of_the_clients_that_has_no_result() -> None:
    client, mcp = client_of("Done.")
    unanswered = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    error = await client.refused([unanswered, *approvals(1)], tools=[server()])
    assert error["code"] == "missing_tool_result"
    assert not mcp.calls


async def test_a_history_that_is_shortened_has_its_calls_made() -> None:
    client, mcp = client_of("Done.")
    long = [{"role": "user", "content": "word " * 300}] * 5
    response = await client.create([*long, *approvals(1)], tools=[server()], truncation="auto")
    assert text_of(response) == "Done."
    assert len(mcp.calls) == 1


ALWAYS = server(require_approval="always")


async def asked() -> tuple[Client, FakeMcp, Any]:
    client, mcp = client_of(SUM, "Done.")
    first = await client.create("1 + 2?", tools=[ALWAYS])
    return client, mcp, first


async def test_an_approval_that_is_sent_again_or_raced_has_one_effect() -> None:
    client, mcp, first = await asked()
    body: dict[str, Any] = {"tools": [ALWAYS], "previous_response_id": first["id"]}
    said = [approval(of_kind(first, "mcp_approval_request"))]
    found = await asyncio.gather(*(client.create(said, **body) for _ in range(4)))
    found.append(await client.create(said, **body))
    assert len(mcp.calls) == 1
    calls = [of_kind(response, "mcp_call") for response in found]
    assert sorted(call["status"] for call in calls) == ["completed", *["failed"] * 4]
    assert ONCE in {call["error"]["content"][0]["text"] for call in calls if call["error"]}
    client.rig.check_rest()


async def test_another_request_with_its_id_is_another_one() -> None:
    client, mcp = client_of("Done.")
    items = approvals(1)
    await client.create(items, tools=[ALWAYS])
    items[1]["arguments"] = '{"a": 2}'
    await client.create(items, tools=[ALWAYS])
    await client.create(items, tools=[ALWAYS], store=False)
    assert [arguments for _, arguments in mcp.calls] == [{}, {"a": 2}]


async def test_it_is_spent_on_disk_before_its_call_is_made(tmp_path: Path) -> None:
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    client, mcp = client_of("Done.", responses=Desk(lambda: 0.0, records=records))
    there: list[int] = []

    def call() -> Answer:
        there.append(sum(name.startswith(b"spent_") for name in records._store.read()))
        return Answer("3")

    mcp.answer = call
    await client.create(approvals(1), tools=[ALWAYS])
    assert there == [1]
    await client.rig.context.responses.close()
    records = Records(tmp_path / "r", lambda: 0.0, 10.0)
    client, mcp = client_of("Done.", responses=Desk(lambda: 0.0, records=records))
    response = await client.create(approvals(1), tools=[ALWAYS])
    assert not mcp.calls
    assert of_kind(response, "mcp_call")["status"] == "failed"
    await client.rig.context.responses.close()


class Full:
    """A disk that takes nothing."""

    def put(self, name: str, content: bytes) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StorageError("full"))
        return failed

    def drop(self, name: str) -> Future[None]:
        return self.put(name, b"")

    def write(self, records: Any) -> Future[None]:
        return self.put("", b"")


async def test_what_the_disk_does_not_take_is_not_spent() -> None:
    client, mcp = client_of("Done.")
    desk = client.rig.context.responses
    desk.spent._book = Full()
    response = await client.create(approvals(1), tools=[ALWAYS])
    assert of_kind(response, "mcp_call")["error"]["content"][0]["text"] == NOT_KEPT
    assert not mcp.calls
    assert len(desk.spent) == 0
    desk.spent._book = None
    await client.create(approvals(1), tools=[ALWAYS])
    assert len(mcp.calls) == 1


async def test_spent_approvals_are_bounded() -> None:
    now = 0.0
    spent = Spent(lambda: now, ttl=10.0, most=3)

    def call(number: int) -> dict[str, Any]:
        named = {"server_label": "s", "name": "\ud800", "arguments": "{}"}
        return {"approval_request_id": str(number), **named}

    for number in range(5):
        assert await spent.take("a", call(number))
    assert await spent.take("b", call(4))
    assert len(spent) == 4
    assert [await spent.take("a", call(number)) for number in (2, 3, 4)] == [False] * 3
    now = 20.0
    assert await spent.take("a", call(5))
    assert len(spent) == 2
