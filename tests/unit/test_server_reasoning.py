"""Reasoning in chat completions: kept apart, and the same session whether a client sends it back or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentserve.messages import unpack_tokens
from agentserve.server.http.answer_form import Form
from agentserve.server.http.reply_parsers import ReplyGrammars
from tests.api_rig import CHAT, TOOLS, Rig, hermes, user
from tests.fakes import ByteTemplate, ScriptedEngine, say
from tools_bridge.grammar import ResponseFormat, reply_grammar
from tools_bridge.registry import DEFAULT_FORM, ReplyForm, reply_form
from tools_bridge.reply_request import GrammarRequest, source_of


class Compiler:
    """Makes the source, and nothing of it."""

    def cached(self, wanted: GrammarRequest) -> str | None:
        return None

    def compile(self, wanted: GrammarRequest) -> str:
        source = source_of(wanted.data, {})
        return source.text if source else ""


class Thinks(ByteTemplate):
    """Its prompts end within the reasoning."""

    def render(self, messages: Any, **kwargs: Any) -> Any:
        ids = super().render(messages, **kwargs)
        if not kwargs.get("continue_final_message"):
            ids.extend(b"<think>\n")
        return ids


async def test_the_answer_has_no_reasoning_in_it() -> None:
    rig = Rig(ScriptedEngine(say("<think>\nhm</think>\n\nyes")))
    message = (await rig.chat([user("a")]))["choices"][0]["message"]
    assert message["content"] == "yes"


async def test_events_of_a_session_tell_of_no_reasoning() -> None:
    rig = Rig(ScriptedEngine(say("<think>\nhm and more</think>\n\nyes")))
    reply = await rig.chat([user("a")])
    session = rig.context.directory.get("default", reply["session_id"])
    assert session is not None
    told = rig.context.chronicle.log_of(session)
    deltas, number = [], 0
    while (event := told.since(number)[1]) is not None:
        number = event.number
        deltas += [json.loads(event.data)] if event.kind == "delta" else []
    assert "".join(delta["content"] for delta in deltas) == "yes"


async def test_a_prompt_that_ends_in_reasoning() -> None:
    rig = Rig(ScriptedEngine(say("hm</think>\n\n" + hermes("now", "{}"))), template=Thinks())
    choice = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


async def test_what_a_user_writes_begins_no_reasoning() -> None:
    rig = Rig(ScriptedEngine(say("yes")))
    message = (await rig.chat([user("say <think>")]))["choices"][0]["message"]
    assert message["content"] == "yes"


@pytest.mark.parametrize("said", ["<think>\nhm", "<think>hm</think>\n\nwell"])
async def test_a_continued_message_goes_on_where_it_was(said: str) -> None:
    rig = Rig(ScriptedEngine(say(" more")))
    messages = [user("a"), {"role": "assistant", "content": said}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    message = (await rig.chat(messages, **fields))["choices"][0]["message"]
    assert (message["content"] == " more") == ("</think>" in said)


@pytest.mark.parametrize("key", [None, "reasoning", "reasoning_content"])
async def test_the_session_goes_on_with_and_without_the_reasoning(key: str | None) -> None:
    rig = Rig(ScriptedEngine(say("<think>hm</think>yes")))
    first = await rig.chat([user("a")])
    reply = {"role": "assistant", "content": "yes"} | ({key: "hm"} if key else {})
    await rig.chat([user("a"), reply, user("b")])
    one, two = rig.engine.submits
    assert one.session == two.session
    said = b"<think>hm</think>yes"
    assert said in bytes(
        id_ for id_ in unpack_tokens(two.tokens) if id_ < 256
    )  # as generated, reasoning and all
    assert first["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (reply_form("", "mistral"), "[TOOL_CALLS]now[ARGS]{}"),
        (reply_form("", "qwen3-xml"), "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        (reply_form("", "gpt-oss"), "<|channel|>commentary to=functions.now<|message|>{}"),
        (reply_form("", "llama3"), '{"name": "now", "parameters": {}}'),
        (DEFAULT_FORM, hermes("now", "{}")),
    ],
)
async def test_calls_of_every_form(form: ReplyForm, said: str) -> None:
    rig = Rig(ScriptedEngine(say(said)), reply_form=form)
    choice = (await rig.chat([user("a")], tools=TOOLS))["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("template", "thinking"), [(ByteTemplate(), "may"), (Thinks(), "inside")])
async def test_a_form_of_the_answer_leaves_room_for_reasoning(template: Any, thinking: str) -> None:
    rig = Rig(template=template)
    maker = ReplyGrammars(Compiler(), reply_form("<think></think>"))  # type: ignore[arg-type]
    rig.context.grammars._maker = maker
    await rig.chat([user("a")], response_format={"type": "json_object"})
    [source] = rig.engine.grammars.values()
    wanted = reply_grammar(response=ResponseFormat("json_object"), thinking=thinking)  # type: ignore[arg-type]
    assert source == (wanted.text if wanted else None)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (Form(regex="a+"), "regex"),
        (Form(choices=("a", "b")), "or"),
        (Form(ebnf='root ::= "a"'), "grammar"),
        (Form(structural_tag={"format": {"type": "any_text"}}), "any_text"),
    ],
)
def test_forms_of_text(form: Form, kind: str) -> None:
    assert form.constrained
    source = source_of(ReplyGrammars(Compiler(), DEFAULT_FORM).source(form, "").data, {})  # type: ignore[arg-type]
    assert source is not None
    assert json.loads(source.text)["format"]["type"] == kind


CUT_CALLS = [
    (reply_form("", "mistral"), '[TOOL_CALLS]now[ARGS]{"a": "x'),
    (reply_form("", "qwen3-xml"), "<tool_call><function=now>\n\n<parameter=a>\nx"),
    (reply_form("", "gpt-oss"), '<|channel|>commentary  to=functions.now <|message|>{"a" :"x'),
    (reply_form("", "llama3"), '{"name":"now", "parameters": {"a": "x'),
    (
        reply_form("", "deepseek-v31"),
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>\n{"a": "x',
    ),
    (DEFAULT_FORM, '<tool_call>{"name":"now","arguments":{"a": "x'),
]


@pytest.mark.parametrize(("form", "said"), CUT_CALLS)
@pytest.mark.parametrize("told", [True, False])
async def test_a_call_that_was_cut_goes_back_as_the_ids_that_it_was_generated_as(
    form: ReplyForm, said: str, told: bool
) -> None:
    """Blanks and all, whether the client sends the half call back or not: so the prefix is kept."""
    rig = Rig(
        ScriptedEngine(say("Well. " * (form.family.name not in ("llama3", "gpt-oss")) + said)),
        reply_form=form,
    )
    first = await rig.chat([user("a")], tools=TOOLS, max_tokens=1000)
    message = first["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert first["choices"][0]["finish_reason"] != "tool_calls"
    content = message["content"] or ""
    back = {"role": "assistant", "content": content} | ({"tool_calls": [call]} if told else {})
    second = await rig.chat([user("a"), back, user("b")], tools=TOOLS)
    assert second["session_id"] == first["session_id"]
    one, two = (unpack_tokens(submit.tokens) for submit in rig.engine.submits)
    assert two[: len(one)] == one
    assert bytes(id_ for id_ in two[len(one) :] if id_ < 256).startswith(
        (content + " " * bool(content) + said).encode()
    )


@pytest.mark.parametrize(("form", "said"), CUT_CALLS)
async def test_elsewhere_it_is_text_in_the_form_of_its_family(form: ReplyForm, said: str) -> None:
    rig = Rig(ScriptedEngine(say(said)), reply_form=form)
    first = await rig.chat([user("a")], tools=TOOLS, max_tokens=1000)
    message = first["choices"][0]["message"]
    await rig.chat([user("another"), {"role": "assistant", **message}, user("b")], tools=TOOLS)
    prompt = bytes(id_ for id_ in unpack_tokens(rig.engine.submits[1].tokens) if id_ < 256)
    begun = form.family.syntax.calls
    assert (begun.opening + begun.begin("now")).encode() in prompt


@pytest.mark.parametrize("schema", [{"const": 10**22}, {"type": "integer", "minimum": 10**22}])
async def test_a_whole_number_of_any_length_is_held_or_refused(schema: dict[str, Any]) -> None:
    rig = Rig()
    rig.context.grammars._maker = ReplyGrammars(Compiler(), DEFAULT_FORM)  # type: ignore[arg-type]
    wanted = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    reply = await rig.post(CHAT, {"messages": [user("x")], "response_format": wanted})
    assert reply.status_code in (200, 400), reply.text
    strict = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    reply = await rig.post(CHAT, {"messages": [user("x")], "tools": strict})
    assert reply.status_code in (200, 400), reply.text
