"""Ids of calls in Kimi K2's histories."""

from __future__ import annotations

from agentserve.text.conversation import Message, parse_messages
from agentserve.text.kimi_ids import numbered


def calling(*ids: str) -> dict[str, object]:
    calls = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def results(*ids: str) -> list[dict[str, object]]:
    return [{"role": "tool", "tool_call_id": id_, "content": "1"} for id_ in ids]


def ids_of(messages: list[Message]) -> list[str]:
    return [call.id for message in messages for call in message.calls]


def test_numbers_go_on_behind_those_that_were_cut_away() -> None:
    user: dict[str, object] = {"role": "user", "content": "x"}
    told = [user, calling("functions.f:1"), *results("functions.f:1"), calling("call_9"), *results("call_9")]
    out = numbered(parse_messages(told))
    assert ids_of(out) == ["functions.f:1", "functions.f:2"]
    assert [message.call_id for message in out if message.call_id] == ids_of(out)


def test_calls_of_one_message_have_numbers_of_their_own() -> None:
    mixed = ("functions.f:0", "call_a", "call_b")
    told = [{"role": "user", "content": "x"}, calling(*mixed), *results(*mixed)]
    assert ids_of(numbered(parse_messages(told))) == ["functions.f:0", "functions.f:1", "functions.f:2"]
