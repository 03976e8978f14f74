"""What clients send beyond the plain: forms by other names, tools of other kinds, reasoning."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.sessions.answer import Answer, Delta, Outcome
from agentserve.types import FinishReason
from tests.api_rig import CHAT, TOOLS, Rig, hermes, joined, user
from tests.fakes import ByteTemplate, ScriptedEngine, say

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {
            "structured_outputs": {
                "json": '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}',
                "regex": None,
            }
        },
        {"guided_json": SCHEMA},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_schema_by_any_name_is_the_response_format(path: str, fields: dict[str, Any]) -> None:
    rig = Rig()
    body: dict[str, Any] = {"messages": [user("a")]} if path == CHAT else {"prompt": "a"}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for more in (fields, {"response_format": asked}):
        assert (await rig.post(path, body | more)).status_code == 200
    ours, theirs = rig.grammars.asked
    assert ours == theirs
    assert ours.schema == SCHEMA


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choices": ("a", "b")}),
        ({"guided_choice": ["a", "b"]}, {"choices": ("a", "b")}),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"ebnf": "root ::= 'a'"}),
        ({"guided_grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"structured_outputs": {"structural_tag": TAG}}, {"structural_tag": TAG}),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, {"structural_tag": TAG}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_other_forms_are_grammars(path: str, fields: dict[str, Any], seen: dict[str, Any]) -> None:
    rig = Rig()
    body: dict[str, Any] = {"messages": [user("a")]} if path == CHAT else {"prompt": "a"}
    assert (await rig.post(path, body | fields)).status_code == 200
    [form] = rig.grammars.asked
    assert {name: getattr(form, name) for name in seen} == seen
    assert form.held
    assert rig.engine.submits[0].sampling.grammar is not None


async def test_any_object_by_its_other_name() -> None:
    rig = Rig()
    await rig.chat([user("a")], structured_outputs={"json_object": True})
    [form] = rig.grammars.asked
    assert form.json
    assert form.schema is None
    await rig.chat([user("a")], structured_outputs={"json_object": False})
    assert len(rig.grammars.asked) == 1


async def test_the_session_s_next_turn_keeps_the_form() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    first = await rig.chat([user("a")], tools=TOOLS, guided_json=SCHEMA)
    [call] = first["choices"][0]["message"]["tool_calls"]
    rig.engine.reply = say('{"n": 1}')
    path = f"/agentserve/sessions/{first['session_id']}/tool_results"
    reply = await rig.post(path, {"call_id": call["id"], "content": "noon"})
    assert reply.status_code == 200, reply.text
    assert [form.schema for form in rig.grammars.asked] == [SCHEMA, SCHEMA]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "custom", "custom": {"name": "x", "format": {"type": "text"}}},
        {"type": "namespace", "name": "mcp", "tools": [TOOLS[0]]},
        {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    ],
)
async def test_tools_that_vendors_run_are_left_out(tool: dict[str, Any], caplog: Any) -> None:
    rig, plain = Rig(), Rig()
    with caplog.at_level(logging.WARNING):
        await rig.chat([user("a")], tools=[tool, *TOOLS])
    assert "unsupported_tool" in caplog.text
    await plain.chat([user("a")], tools=TOOLS)
    assert rig.engine.submits[0].tokens == plain.engine.submits[0].tokens
    await rig.chat([user("a")], tools=[tool])
    assert rig.grammars.asked == []


def choice(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_a_grammar_and_no_other_prompt(mode: str) -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    reply = await rig.chat([user("a")], tools=TOOLS, tool_choice=choice("now", mode=mode))
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    [form] = rig.grammars.asked
    assert (form.choice, form.allowed) == (mode, ("now",))
    assert [tool["function"]["name"] for tool in form.tools] == ["weather", "now"]
    assert unpack_tokens(rig.engine.submits[0].tokens) == ByteTemplate().render(
        [user("a")], tools=shown(TOOLS)
    )


async def test_no_allowed_tool_is_no_call() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    reply = await rig.chat([user("a")], tools=TOOLS, tool_choice=choice())
    assert "tool_calls" not in reply["choices"][0]["message"]


def shown(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the template gets them."""
    empty = {"type": "object", "properties": {}}
    return [
        tool | {"function": {**tool["function"], "parameters": tool["function"].get("parameters", empty)}}
        for tool in tools
    ]


async def test_long_and_dotted_names_of_tools_are_taken() -> None:
    rig = Rig()
    for name in ("server.tool", "x" * 128):
        await rig.chat([user("a")], tools=[{"type": "function", "function": {"name": name}}])


@pytest.mark.parametrize(
    ("effort", "given", "seen"),
    [
        ("high", None, {"reasoning_effort": "high"}),
        ("none", None, {"enable_thinking": False, "thinking": False}),
        ("none", {"enable_thinking": True}, {"enable_thinking": True, "thinking": False}),
        (None, {"a": 1}, {"a": 1}),
        (None, None, None),
    ],
)
async def test_the_template_learns_of_reasoning_effort(effort: Any, given: Any, seen: Any) -> None:
    asked: list[Any] = []

    class Spy(ByteTemplate):
        def render(self, messages: Any, *, kwargs: Any = None, **more: Any) -> Any:
            asked.append(kwargs)
            return super().render(messages, kwargs=kwargs, **more)

    await Rig(template=Spy()).chat([user("a")], reasoning_effort=effort, chat_template_kwargs=given)
    assert asked == [seen]


async def test_a_model_must_be_named() -> None:
    rig = Rig()
    reply = await rig.post(CHAT, {"model": None, "messages": [user("a")]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "model"


class _Thinks(Answer):
    """Everything up to "|" is reasoning."""

    def _cut(self, piece: Delta) -> Delta:
        self.thought = getattr(self, "thought", "")
        done = getattr(self, "done", False)
        if done or not piece.text:
            return piece
        reasoning, bar, text = piece.text.partition("|")
        self.thought += reasoning
        self.done = bool(bar)
        return replace(piece, text=text, reasoning=reasoning)

    def push(self, token: Any) -> Delta:
        return self._cut(super().push(token))

    def finish(self, reason: FinishReason, usage: Any) -> tuple[Delta, Outcome]:
        delta, outcome = super().finish(reason, usage)
        text = outcome.text.partition("|")[2]
        return self._cut(delta), replace(
            outcome, text=text, reasoning=self.thought, reasoning_tokens=len(self.thought)
        )


@pytest.mark.parametrize(
    "names", [("reasoning", "reasoning_content"), ("reasoning",), ("reasoning_content",)]
)
async def test_reasoning_is_shown_by_every_name(names: tuple[str, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr("agentserve.server.http.turn_parts.Answer", _Thinks)
    rig = Rig(ScriptedEngine(say("hmm|Yes.")), reasoning_fields=names)
    whole = await rig.chat([user("a")])
    message = whole["choices"][0]["message"]
    assert message["content"] == "Yes."
    found = {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}
    assert found == dict.fromkeys(names, "hmm")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    chunks = await rig.chat_stream([user("b")], stream_options={"include_usage": True})
    deltas = [choice["delta"] for chunk in chunks[:-1] for choice in chunk["choices"]]
    for name in ("reasoning", "reasoning_content"):
        told = "".join(delta.get(name, "") for delta in deltas)
        assert told == ("hmm" if name in names else "")
    message = joined(chunks)
    assert message["content"] == "Yes."
    assert message["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_in_a_history_is_taken_by_both_names(name: str) -> None:
    rig = Rig()
    await rig.chat([user("a"), {"role": "assistant", "content": "b", name: "hmm"}, user("c")])


async def test_system_messages_of_every_kind_are_taken() -> None:
    rig = Rig()
    parts = [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]
    await rig.chat(
        [
            {"role": "system", "content": "one"},
            {"role": "developer", "content": "two"},
            {"role": "system", "content": parts},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "refusal": None, "annotations": []},
            {"role": "user", "content": "b", "tool_calls": None},
        ]
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_result_that_overflows_the_context_is_refused_and_a_shorter_one_taken(stream: bool) -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}")), max_model_len=900))
    first = await rig.chat([user("a")], tools=TOOLS)
    message = {"role": "assistant", **first["choices"][0]["message"]}
    [call] = message["tool_calls"]

    def body(content: str) -> dict[str, Any]:
        result = {"role": "tool", "tool_call_id": call["id"], "content": content}
        return {"messages": [user("a"), message, result], "tools": TOOLS, "stream": stream}

    reply = await rig.post(CHAT, body("x" * 1000))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.headers["x-should-retry"] == "false"
    shown = await rig.session(first["session_id"])
    assert shown["state"] == "WAITING_TOOL"
    assert [pending["id"] for pending in shown["pending_tool_calls"]] == [call["id"]]
    assert (shown["turns"], len(rig.engine.submits)) == (1, 1)
    path = f"/agentserve/sessions/{first['session_id']}/tool_results"
    reply = await rig.post(path, {"call_id": call["id"], "content": "x" * 1000})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    rig.engine.reply = say("Noon.")
    reply = await rig.post(CHAT, body("12:00"))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-session-id"] == first["session_id"]
    assert (await rig.session(first["session_id"]))["turns"] == 2
    rig.check_rest()


OLD_TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"structural_tag": OLD_TAG}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag"} | OLD_TAG)}},
        {"response_format": {"type": "structural_tag"} | OLD_TAG},
    ],
)
async def test_the_older_structural_tag_is_the_newer_one(fields: dict[str, Any]) -> None:
    rig = Rig()
    await rig.chat([user("a")], **fields)
    [form] = rig.grammars.asked
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    assert form.structural_tag["format"] == {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}],
    }
