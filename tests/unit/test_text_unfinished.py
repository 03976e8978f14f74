"""Calls that were cut, told as text: whole ones kept, results moved behind."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_whole_calls_stay() -> None:
    messages = [asked("", call("c2", "{}"), call("c3", {}), call("c4", ""))]
    assert told_as_text(messages, {"c2", "c3", "c4"}) == messages


def test_a_half_call_that_its_client_closed_is_text_unless_it_was_answered() -> None:
    closed, more = asked("", call("c1", '{"x": ""}')), {"role": "user", "content": "u"}
    first, second = told_as_text([closed, more], {"c1"})
    assert "tool_calls" not in first
    assert second == more
    for messages in ([closed, result("c1", "r"), more], [closed]):
        assert told_as_text(messages, {"c1"}) == messages
    assert told_as_text([closed, more], {"c2"}) == [closed, more]


@pytest.mark.parametrize("id_", ["c1", None])
def test_calls_that_others_handed_out_are_text_too_whether_shown_or_not(id_: Any) -> None:
    answer = {"role": "tool", "content": "bad"} | ({"tool_call_id": id_} if id_ else {})
    for shown in (True, False):
        first, second = told_as_text([asked(None, call(id_, '{"x": "')), answer], set(), shown=shown)
        assert first == {"role": "assistant", "content": [{"type": "text", "text": SHOWN}]}
        assert second == {"role": "user", "content": "bad"}


def test_of_a_reply_that_was_cut_no_call_is_to_be_run_the_whole_ones_neither() -> None:
    more = {"role": "user", "content": "u"}
    for arguments in ("{}", "", None, {}, '{"a": 1, "a": 2}', '{"x": "'):
        first, second = told_as_text([asked("Well.", call("c1", arguments)), more], {"c1"})
        assert [part["text"].partition("{")[0] for part in first["content"]] == ["Well.", "<tool_call>\n"]
        assert second == more


@pytest.mark.parametrize("arguments", ["{}", "", None, {}, '{"a": 1, "a": 2}', '{"x": "'])
def test_what_names_a_history_has_none_of_them_whatever_its_client_made_of_them(arguments: Any) -> None:
    alone = [asked("Well."), {"role": "user", "content": "r"}]
    del alone[0]["tool_calls"]
    alone[0]["content"] = [{"type": "text", "text": "Well."}]
    for history in ([asked("Well.", call("c1", arguments)), result("c1", "r")], alone):
        assert told_as_text(history, {"c1"}, shown=False) == alone


def test_no_other_role_calls_anything() -> None:
    messages = [{"role": "user", "content": "u", "tool_calls": [CUT]}]
    assert told_as_text(messages, {"c1"}) == messages


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
