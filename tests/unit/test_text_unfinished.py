"""Calls that were cut, told as text: only ours, whole ones kept, results moved behind."""

from __future__ import annotations

from typing import Any

from agentserve.text.unfinished import call_ids, told_as_text


def call(id_: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "f", "arguments": arguments}}


def asked(content: Any, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(id_: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


CUT = call("c1", '{"x": "')
SHOWN = '<tool_call>\n{"name": "f", "arguments": {"x": "'


def test_a_cut_call_is_the_text_the_model_wrote() -> None:
    parts = [{"type": "text", "text": "Well."}, {"type": "text", "text": SHOWN}]
    for content in ("Well.", parts[:1]):
        [told] = told_as_text([asked(content, CUT)], {"c1"})
        assert told == {"role": "assistant", "content": parts}
    [told] = told_as_text([asked(None, CUT)], {"c1"})
    assert told["content"] == parts[1:]
    [told] = told_as_text([asked("Well.", CUT)], {"c1"}, shown=False)
    assert told == {"role": "assistant", "content": parts[:1]}


def test_calls_of_others_and_whole_ones_stay() -> None:
    messages = [asked("", CUT), asked("", call("c2", "{}"), call("c3", {}), call("c4", ""))]
    assert told_as_text(messages, {"c2", "c3", "c4"}) == messages


def test_results_of_cut_calls_follow_those_of_whole_ones() -> None:
    whole = call("c2", "{}")
    messages = [
        asked("", CUT, whole),
        result("c1", "bad"),
        result("c2", "r"),
        {"role": "user", "content": "u"},
    ]
    first, *rest = told_as_text(messages, {"c1"})
    assert first["tool_calls"] == [whole]
    assert rest == [messages[2], {"role": "user", "content": "bad"}, messages[3]]


def test_what_is_no_message_is_left_to_the_check() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [None, {"id": ["c1"]}, {"id": "c1"}, call("c1", 7)]},
        result(["c1"], "r"),
    ]
    assert told_as_text(odd, {"c1"}) == odd
    assert [call_ids(message) for message in odd] == [[], [], ["c1", "c1"], []]
