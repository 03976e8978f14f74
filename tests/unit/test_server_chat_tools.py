"""Tool calls in chat completions, and what is forced: calls and formats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from tests.api_rig import CHAT, TOOLS, Rig, hermes, joined, user
from tests.fakes import ScriptedEngine, say
from tools_bridge.registry import DEFAULT_FORM, ReplyForm, reply_form


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls(stream: bool) -> None:
    text = "Let me see. " + hermes("weather", '{"city": "Oslo </tool_call> }"}') + "\n" + hermes("now", "{}")
    rig = Rig(ScriptedEngine(say(text)))
    fields = {"tools": TOOLS, "tool_choice": "auto"}
    if stream:
        message = joined(await rig.chat_stream([user("a")], **fields))
        reason = message["finish_reason"]
    else:
        choice = (await rig.chat([user("a")], **fields))["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    assert reason == "tool_calls"
    assert message["content"] == "Let me see."
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo </tool_call> }"}
    assert calls[1]["function"]["arguments"] == "{}"
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    [(_, _, waiting)] = rig.engine.parked
    assert waiting


async def test_a_call_without_text_has_null_content() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    message = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_cut_off_by_max_tokens_ends_with_length(stream: bool) -> None:
    text = hermes("weather", '{"city": "Oslo"}')
    rig = Rig(ScriptedEngine(say(text)))
    fields = {"tools": TOOLS, "max_tokens": len(text) - 19}
    if stream:
        message = joined(await rig.chat_stream([user("a")], **fields))
        assert message["finish_reason"] == "length"
    else:
        choice = (await rig.chat([user("a")], **fields))["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "length"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "O'
    assert rig.engine.parked[-1][2] is False


async def test_tool_choice_none_leaves_text_alone() -> None:
    text = hermes("now", "{}")
    rig = Rig(ScriptedEngine(say(text)))
    choice = (await rig.chat([user("a")], tools=TOOLS, tool_choice="none"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]


async def test_forced_calls_get_a_grammar() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    choice = (await rig.chat([user("a")], tools=TOOLS, tool_choice="required"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "now"}}
    choice = (await rig.chat([user("b")], tools=TOOLS, tool_choice=named, parallel_tool_calls=False))[
        "choices"
    ][0]
    assert choice["finish_reason"] == "stop"  # as OpenAI has it for a call forced by name
    assert rig.engine.parked[-1][2] is True
    required, by_name = rig.grammars.asked
    assert (required.choice, by_name.choice, by_name.named) == ("required", "named", "now")
    assert (required.parallel, by_name.parallel) == (True, False)
    assert [submit.sampling.grammar for submit in rig.engine.submits] == ["g1", "g2"]
    assert set(rig.engine.grammars) == {"g1", "g2"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", ["<", "<tool", '<tool_call>\n{"na', hermes("now", "{}") + "\n<tool"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_forced_call_that_is_cut_shows_no_text(stream: bool, shown: str, choice: Any) -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}") + "\n" + hermes("now", "{}"))))
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": len(shown)}
    if stream:
        chunks = await rig.chat_stream([user("a")], **fields)
        texts = [c["delta"].get("content") for chunk in chunks[:-1] for c in chunk["choices"]]
        assert texts == [None] * len(texts)
        message = joined(chunks)
        assert message["finish_reason"] == "length"
    else:
        message = (await rig.chat([user("a")], **fields))["choices"][0]["message"]
        assert message["content"] is None
    assert len(message.get("tool_calls", ())) == ("{}" in shown)


async def test_a_response_format_gets_a_grammar() -> None:
    rig = Rig(ScriptedEngine(say("{}")))
    await rig.chat([user("a")], response_format={"type": "json_object"})
    schema = {"type": "object", "properties": {}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    await rig.chat([user("a")], response_format=wanted)
    await rig.chat([user("a")], response_format={"type": "text"})
    assert [form.schema for form in rig.grammars.asked] == [None, schema]
    assert rig.grammars.asked[1].strict_schema
    assert [submit.sampling.grammar for submit in rig.engine.submits] == ["g1", "g2", None]


@pytest.mark.parametrize(("said", "held"), [({}, True), ({"strict": True}, True), ({"strict": False}, False)])
async def test_a_schema_holds_to_the_letter_unless_its_client_says_otherwise(
    said: dict[str, bool], held: bool
) -> None:
    rig = Rig(ScriptedEngine(say("{}")))
    asked = {"name": "x", "schema": {"type": "object"}, **said}
    await rig.chat([user("a")], response_format={"type": "json_schema", "json_schema": asked})
    [form] = rig.grammars.asked
    assert form.strict_schema is held


async def test_a_bad_schema_is_refused_before_anything_runs() -> None:
    rig = Rig()
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    reply = await rig.post(CHAT, {"messages": [user("a")], "response_format": wanted})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_schema"
    assert "nonsense" in reply.json()["error"]["message"]
    assert not rig.engine.submits
    rig.check_rest()


async def test_the_beginning_of_a_call_at_the_end_of_a_reply_is_shown() -> None:
    text = 'Let me see. <tool_call>{"na'
    rig = Rig(ScriptedEngine(say(text)))
    choice = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    message = joined(await rig.chat_stream([user("b")], tools=TOOLS))
    assert (message["content"], message["tool_calls"]) == (text, [])


async def test_a_deferred_tool_may_be_called_but_is_not_listed() -> None:
    rig = Rig(ScriptedEngine(say(hermes("now", "{}"))))
    late = TOOLS[1] | {"defer_loading": True}
    reply = await rig.chat([user("a")], tools=[TOOLS[0], late], tool_choice="required")
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    [form] = rig.grammars.asked
    assert [tool["function"]["name"] for tool in form.tools] == ["weather", "now"]
    prompt = rig.context.tokenizer.decode(unpack_tokens(rig.engine.submits[0].tokens))
    assert "weather" in prompt
    assert '"now"' not in prompt


BROKEN = [
    (
        DEFAULT_FORM,
        '<tool_call>{"name": "weather", "arguments": {"city": nope}}</tool_call>',
        '{"city": nope}',
    ),
    (reply_form("", "llama3"), '{"name": "weather", "parameters": {"city": (}}', '{"city": (}'),
    (
        reply_form("", "deepseek-v31"),
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": (}',
        '{"city": ',
    ),
    (
        reply_form("", "qwen3-xml"),
        "<tool_call>\n<function=weather>\n<parameter=city\nOslo\n</function></tool_call>",
        "",
    ),
    (reply_form("", "glm47"), "<tool_call>weather<arg_key>city<arg_key>Oslo</tool_call>", ""),
]


@pytest.mark.parametrize(("form", "said", "arguments"), BROKEN)
async def test_a_malformed_call_is_told_the_same_streamed_and_whole(
    form: ReplyForm, said: str, arguments: str
) -> None:
    """Its name and what there was of its arguments, no text of it, and nothing that says: run it."""
    rig = Rig(ScriptedEngine(say(said)), reply_form=form)
    choice = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": arguments}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    message = joined(await rig.chat_stream([user("b")], tools=TOOLS))
    assert (message["content"], message["finish_reason"]) == ("", "stop")
    assert [c["function"] for c in message["tool_calls"]] == [call["function"]]
    assert all(not waiting for _, _, waiting in rig.engine.parked)
