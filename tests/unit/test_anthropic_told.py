"""Pieces of a turn as Anthropic's events and messages, and back again as the history they become."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.messages import TurnUsage
from agentserve.server.http.anthropic.asked import asked
from agentserve.server.http.anthropic.schemas import CountRequest
from agentserve.server.http.anthropic.told import Asking, Telling, stop_reason, whole
from agentserve.server.sessions.answer import Call, CallDelta, Delta, Outcome
from agentserve.server.sessions.seats import reply_message
from agentserve.types import FinishReason
from tests.anthropic_client import put_together

ASKING = Asking("msg_1", "tiny", 100)
USAGE = TurnUsage(100, 60, 12, 52, 0, 0.0, 0.5, 1.0, 2.0)


def outcome(
    text: str = "",
    calls: tuple[Call, ...] = (),
    reasoning: str = "",
    reason: FinishReason = FinishReason.STOP,
    **more: Any,
) -> Outcome:
    return Outcome(reason, text, calls, False, (), (), array("i"), USAGE, reasoning, **more)


def told(deltas: list[Delta], end: Outcome, asking: Asking = ASKING) -> list[Any]:
    telling = Telling(asking)
    events = telling.begin()
    for delta in deltas:
        events += telling.push(delta)
    return events + telling.finish(end)


def call(index: int, arguments: str = "", name: str = "f") -> CallDelta:
    return CallDelta(index, arguments, f"c{index}", name)


def test_text() -> None:
    events = told([Delta("Hel"), Delta(), Delta("lo")], outcome("Hello"))
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = put_together(events)
    assert message["content"] == [{"type": "text", "text": "Hello", "citations": None}]
    assert (message["id"], message["model"], message["role"]) == ("msg_1", "tiny", "assistant")
    assert message["stop_reason"] == "end_turn"
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (40, 60, 12)
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens_details"] == {"thinking_tokens": 0}


def test_thinking_text_and_calls_each_in_blocks_of_their_own() -> None:
    calls = (Call("c0", "f", '{"a": 1}', True), Call("c1", "g", "{}", True))
    deltas = [
        Delta(reasoning="Let"),
        Delta(reasoning=" me."),
        Delta("I look.", (call(0, '{"a"'),)),
        Delta(calls=(CallDelta(0, ": 1}"), call(1, "{}", "g"))),
    ]
    events = told(deltas, outcome("I look.", calls, "Let me.", reasoning_tokens=5))
    content = put_together(events)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0]["thinking"] == "Let me."
    assert [block["partial"] for block in content[2:]] == ['{"a": 1}', "{}"]
    message = whole(events, outcome("I look.", calls, "Let me."))
    assert [block["input"] for block in message["content"][2:]] == [{"a": 1}, {}]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}


def test_what_goes_on_with_the_open_call_comes_before_what_follows_it() -> None:
    calls = (Call("c0", "f", '{"a": 1}', True), Call("c1", "f", "{}", True))
    deltas = [
        Delta(calls=(call(0, '{"a"'),)),
        Delta("and", (CallDelta(0, ": 1}"), call(1), CallDelta(1, "{}"))),
    ]
    content = put_together(told(deltas, outcome("and", calls)))["content"]
    assert [block.get("partial", block.get("text")) for block in content] == ['{"a": 1}', "and", "{}"]


def test_thinking_that_was_not_to_be_shown_is_in_its_signature_alone() -> None:
    asking = replace(ASKING, shows_thinking=False)
    end = outcome("Yes.", reasoning="A secret.", reasoning_tokens=3)
    events = told([Delta(reasoning="A secret."), Delta("Yes.")], end, asking)
    message = whole(events, end)
    assert "secret" not in json.dumps(message)
    assert put_together(events)["content"] == message["content"]
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": message["content"]}]
    assert back(history)[1]["reasoning_content"] == "A secret."


def test_a_cut_call_is_streamed_and_is_no_part_of_a_whole_message() -> None:
    cut = outcome("", (Call("c0", "f", '{"a": ', False),), reason=FinishReason.LENGTH)
    events = told([Delta(calls=(call(0, '{"a": '),))], replace(cut, truncated=True))
    assert put_together(events)["content"][0]["partial"] == '{"a": '
    message = whole(events, cut)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")


WHOLE_CALL = (Call("c", "f", "{}", True),)


@pytest.mark.parametrize(
    ("end", "clamped", "reason"),
    [
        (outcome("x"), False, ("end_turn", None)),
        (outcome("x"), True, ("end_turn", None)),
        (outcome("x", stop="END"), False, ("stop_sequence", "END")),
        (outcome("", WHOLE_CALL), False, ("tool_use", None)),
        (outcome("", WHOLE_CALL, stop="END"), False, ("tool_use", None)),
        (outcome("", (Call("c", "f", "[", False),)), False, ("end_turn", None)),
        (outcome("", WHOLE_CALL, reason=FinishReason.LENGTH), False, ("max_tokens", None)),
        (outcome("x", reason=FinishReason.LENGTH), True, ("model_context_window_exceeded", None)),
    ],
)
def test_why_it_ended(end: Outcome, clamped: bool, reason: tuple[str, str | None]) -> None:
    assert stop_reason(end, clamped=clamped) == reason


def back(messages: list[Any]) -> list[Any]:
    """Chat messages of a history in Anthropic's shape."""
    body = json.dumps({"model": "tiny", "messages": messages})
    return asked(msgspec.json.decode(body, type=CountRequest)).chat.messages


# --- any turn, in any pieces ------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
PARTS = st.one_of(
    st.tuples(st.just("reasoning"), TEXTS),
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.just("call"), st.dictionaries(TEXTS, VALUES, max_size=3)),
)


def pieces(kind: str, value: Any, index: int, cut: int) -> list[Delta]:
    """One part of a turn as two deltas."""
    if kind == "reasoning":
        return [Delta(reasoning=value[:cut]), Delta(reasoning=value[cut:])]
    if kind == "text":
        return [Delta(value[:cut]), Delta(value[cut:])]
    text = json.dumps(value)
    return [Delta(calls=(call(index, text[:cut]),)), Delta(calls=(CallDelta(index, text[cut:]),))]


def merged(left: Delta, right: Delta) -> Delta:
    return Delta(left.text + right.text, left.calls + right.calls, reasoning=left.reasoning + right.reasoning)


@given(st.lists(st.tuples(PARTS, st.integers(0, 20)), max_size=6), st.data())
def test_any_turn_comes_back_as_it_was_told(parts: list[Any], data: st.DataObject) -> None:
    deltas: list[Delta] = []
    calls: list[Call] = []
    said = {"reasoning": "", "text": ""}
    for (kind, value), cut in parts:
        deltas += [delta for delta in pieces(kind, value, len(calls), cut) if delta]
        if kind == "call":
            calls.append(Call(f"c{len(calls)}", "f", json.dumps(value), True))
        else:
            said[kind] += value
    grouped: list[Delta] = []
    for delta in deltas:  # tokens in one step share a delta
        if grouped and data.draw(st.booleans()):
            grouped[-1] = merged(grouped[-1], delta)
        else:
            grouped.append(delta)
    end = outcome(said["text"], tuple(calls), said["reasoning"])
    shown = data.draw(st.booleans())
    events = told(grouped, end, replace(ASKING, shows_thinking=shown))
    message = whole(events, end)
    for streamed, block in zip(put_together(events)["content"], message["content"], strict=True):
        streamed = dict(streamed)
        if block["type"] == "tool_use":
            streamed["input"] = json.loads(streamed.pop("partial", "{}"))
        assert streamed == block
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": message["content"]}]
    again = back([*history, {"role": "user", "content": "!"}])[1]
    sent = reply_message(end)
    assert again["content"] == sent["content"]
    assert again.get("reasoning_content", "") == said["reasoning"]
    assert [(c["id"], c["function"]["name"]) for c in again.get("tool_calls", [])] == [
        (c.id, c.name) for c in calls
    ]
    for ours, theirs in zip(again.get("tool_calls", []), calls, strict=True):
        assert json.loads(ours["function"]["arguments"]) == json.loads(theirs.arguments)
