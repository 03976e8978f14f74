"""Responses with scripted MCP servers, and what must hold of their events."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from agentserve.messages import Submit, unpack_tokens
from tests.api_rig import Rig, hermes
from tests.fakes import Script, say
from tests.mcp_rig import ADD, SUB, FakeMcp
from tests.responses_rig import Client

SUM = hermes("add", '{"a": 1, "b": 2}')


def after(*texts: str) -> Callable[[Submit], Script]:
    """What the model says, one turn after the other; the last again and again."""
    left = list(texts)
    return lambda submit: say(left.pop(0) if left[1:] else left[0])


def client_of(*says: str, **options: Any) -> tuple[Client, FakeMcp]:
    mcp = FakeMcp(SUB, ADD)
    rig = Rig(mcp=mcp, **options)
    rig.engine.reply = after(*says)
    return Client(rig), mcp


def prompts(client: Client) -> list[str]:
    found = [bytes(i for i in unpack_tokens(s.tokens) if i < 256) for s in client.rig.engine.submits]
    return [prompt.decode("utf-8", "replace") for prompt in found]


def begins_with_all_before(client: Client) -> bool:
    """Each prompt begins with the one before and its reply."""
    said = prompts(client)
    return all(later.startswith(before) for before, later in itertools.pairwise(said))


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


def of_kind(response: Any, kind: str) -> Any:
    return next(item for item in response["output"] if item["type"] == kind)


def approval(request: Any, approve: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "type": "mcp_approval_response",
        "approval_request_id": request["id"],
        "approve": approve,
        **more,
    }


def checked_mcp(events: list[Any]) -> dict[str, Any]:
    """Items open once, in their order, and close once; what they are at their end is in the response."""
    *events, done = events
    assert done == "[DONE]"
    numbers = [event["sequence_number"] for event in events]
    assert numbers[:-1] == list(range(len(events) - 1))
    assert numbers[-1] >= len(events) - 1  # of one that is told again: what its end had
    opened: list[str] = []
    closed: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(opened)
            opened.append(event["item"]["id"])
        elif event["type"] == "response.output_item.done":
            assert opened[event["output_index"]] == event["item"]["id"] not in closed
            closed[event["item"]["id"]] = event["item"]
        elif "item_id" in event:
            assert opened[event["output_index"]] == event["item_id"] not in closed
            if event["type"] == "response.mcp_call_arguments.delta":
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
            elif event["type"] == "response.mcp_call_arguments.done":
                assert texts.get(event["item_id"], event["arguments"]) == event["arguments"]
    final: dict[str, Any] = events[-1]["response"]
    assert final["output"] == [closed[id_] for id_ in opened]
    return final
