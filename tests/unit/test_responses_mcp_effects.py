"""Calls that were approved have effects: they are made once, and for no request that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mcp_rig import server
from tests.responses_mcp_rig import client_of
from tests.responses_rig import text_of
from tests.unit.test_responses_mcp_bounds import approvals


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
