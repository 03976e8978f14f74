"""What other servers' parsers of calls and reasoning got wrong, each failure with where it was reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reply_forms import NAMES, TOOLS, WRITERS, form, pieces
from tests.reply_rig import read
from tools_bridge.deltas import ArgumentsDelta, Parsed
from tools_bridge.json_value import parse_arguments
from tools_bridge.types import ToolSpec

JSON_FORMS = {  # what stands before and behind a call's arguments, where these are raw JSON
    "gpt-oss": ("<|channel|>commentary to=functions.f<|message|>", ""),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral": ("[TOOL_CALLS]f[ARGS]", ""),
    "mistral-v3": ('[TOOL_CALLS] [{"name": "f", "arguments": ', "}]"),
    "hermes": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    "llama4": ('{"name": "f", "parameters": ', "}"),
    "llama3": ('{"name": "f", "parameters": ', "}"),
}
LISTS = ("llama3", "llama4", "mistral-v3")  # several calls have something between them, or are no calls
WHOLE = ("gpt-oss", "kimi-k3")  # the form covers reasoning and content too
PARSED_REASONING = [name for name in NAMES if name not in WHOLE and form(name).think is not None]


def parse(name: str, text: str, tools: list[ToolSpec] = TOOLS, **how: Any) -> Parsed:
    """What it is at every cut."""
    whole = read(form(name).parser(tools, **how), [text])
    for size in (1, 2, 3, 7):
        assert read(form(name).parser(tools, **how), pieces(text, size)) == whole
    return whole


def calls(parsed: Parsed) -> list[tuple[str, object, str]]:
    return [(c.name, json.loads(c.arguments) if c.complete else None, c.error) for c in parsed.calls]


@pytest.mark.parametrize("blank", ["\n", " ", "\n\n", " \n "])
def test_blanks_before_the_arguments_lose_no_call(blank: str) -> None:
    """vllm#55082 and its like: a newline token of its own behind the name."""
    for name, (before, behind) in JSON_FORMS.items():
        parsed = parse(name, f'{before}{blank}{{"a": "b"}}{behind}')
        assert calls(parsed) == [("f", {"a": "b"}, "")], name
        assert parsed.content == ""


@pytest.mark.parametrize("name", ["deepseek-v31", "deepseek-v3"])
def test_a_fence_where_none_belongs_and_none_where_one_belongs(name: str) -> None:
    for kind in ("", "function<｜tool▁sep｜>"):
        for fence in ('```json\n{"a": "b"}\n```', '\n{"a": "b"}\n', '{"a": "b"}'):
            if kind and fence.startswith("```"):
                continue  # the name ends with its line
            sep = "" if kind else "<｜tool▁sep｜>"
            before, behind = JSON_FORMS["deepseek-v31"]
            text = before.removesuffix("f<｜tool▁sep｜>") + f"{kind}f{sep}{fence}{behind}"
            assert calls(parse(name, text)) == [("f", {"a": "b"}, "")], text


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_nobody_asked_for_tell_no_half_of_themselves(name: str) -> None:
    """vllm#42747: `tool_choice: "none"`. Text as it is, or nothing where calls are addressed to tools."""
    text = WRITERS[name]("f", {"a": "secret", "n": 1})
    if name in WHOLE:
        assert parse(name, text, calls=False) == Parsed("", ())
        return
    content = parse(name, text, calls=False).content
    marks = form(name).markers
    for mark in marks:  # control tokens of the form say nothing
        text = text.replace(mark, "")
    assert content.strip() == text.strip()


@pytest.mark.parametrize("name", PARSED_REASONING)
def test_a_call_within_reasoning_is_a_thought_or_ends_it(name: str) -> None:
    """vllm PR 28330, vllm-mlx#163: `<tool_call>` in reasoning."""
    reply = form(name)
    assert reply.think
    call = WRITERS[name]("f", {"a": "b"})
    parsed = parse(name, f"I could say {call} now.{reply.think.close}Well.", inside=True)
    if reply.family.calls and reply.family.calls.ends_thinking:
        assert calls(parsed) == [("f", {"a": "b"}, "")]
        assert parsed.reasoning == "I could say"
    else:
        assert not parsed.calls
        assert parsed.content == "Well."
        assert parsed.reasoning.startswith("I could say")
        assert parsed.reasoning.endswith("now.")


@pytest.mark.parametrize("name", PARSED_REASONING)
def test_reasoning_that_never_closes_is_reasoning(name: str) -> None:
    """dynamo#8636 and others: the text must not come twice, nor as content in the end."""
    reply = form(name)
    assert reply.think
    assert parse(name, "hm, hm", inside=True) == Parsed("", (), reasoning="hm, hm")
    assert parse(name, f"{reply.think.open}hm, hm") == Parsed("", (), reasoning="hm, hm")


@pytest.mark.parametrize("name", PARSED_REASONING)
def test_reasoning_that_the_prompt_has_closed_already(name: str) -> None:
    """dynamo#8636: with `enable_thinking: false` the prompt has `<think></think>`: all of it is content."""
    reply = form(name)
    assert reply.think
    assert not reply.inside(f"{reply.think.open}\n\n{reply.think.close}\n\n")
    assert parse(name, f"{reply.think.close}\nyes").content == "yes"  # said again
    said = parse(name, f"yes, and {reply.think.open} is a mark")
    assert (said.content.split()[0], said.reasoning) == ("yes,", "")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_then_a_call(name: str) -> None:
    reply = form(name)
    call = WRITERS[name]("f", {"a": "b"})
    if name == "gpt-oss":
        text = f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{call}"
        parsed = parse(name, text)
    elif reply.think:
        parsed = parse(name, f"why{reply.think.close}\n\n{call}", inside=True)
    assert (parsed.reasoning, parsed.content, calls(parsed)) == ("why", "", [("f", {"a": "b"}, "")])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WHOLE and n not in ("llama3", "llama4")])
def test_a_call_in_a_code_fence_is_a_call(name: str) -> None:
    parsed = parse(name, f"```\n{WRITERS[name]('f', {'a': 'b'})}\n```")
    assert calls(parsed) == [("f", {"a": "b"}, "")]
    assert parsed.content.replace("\n", "") == "``````"


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*WHOLE, *LISTS, "llama4")])
def test_text_before_between_and_behind_calls(name: str) -> None:
    """Also `index: 0` for all (lmdeploy#3412) and names joined (vllm#14951): `read` counts them."""
    one, two = WRITERS[name]("f", {"a": "b"}), WRITERS[name]("g.h-2", {})
    parsed = parse(name, f"One. {one} Two. {two} Three.")
    assert calls(parsed) == [("f", {"a": "b"}, ""), ("g.h-2", {}, "")]
    assert parsed.content.split() == ["One.", "Two.", "Three."]
    assert calls(parse(name, one + two + one)) == [
        ("f", {"a": "b"}, ""),
        ("g.h-2", {}, ""),
        ("f", {"a": "b"}, ""),
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    ['{"a": {"b": "}}"}}', "[TOOL_CALLS]", "</tool_call>", "\\", '"', "<|im_end|>", "]", "\n\n", "é😀\u2028"],
)
def test_what_stands_in_a_string_is_the_string_s(name: str, value: str) -> None:
    """vllm#45167: braces, quotes and marks in arguments."""
    parsed = parse(name, WRITERS[name]("f", {"a": f"x{value}y"}))
    assert calls(parsed) == [("f", {"a": f"x{value}y"}, "")]


@pytest.mark.parametrize("name", JSON_FORMS)
def test_escapes_are_told_as_they_were_written(name: str) -> None:
    """A surrogate pair in two escapes, at every cut (vllm#48020)."""
    before, behind = JSON_FORMS[name]
    raw = r'{"a": "\ud83d\ude00\u00e9\\\"\n", "\u0062": "\\u00e9"}'
    [call] = parse(name, before + raw + behind).calls
    assert call.complete
    assert json.loads(call.arguments) == {"a": '😀é\\"\n', "b": "\\u00e9"}
    assert call.arguments == raw


@pytest.mark.parametrize("name", JSON_FORMS)
@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ("{}", ""),
        ('{"n": -0}', ""),
        ('{"n": 1E5, "m": 123456789012345678901234567890}', ""),
        ('{"n": 1e400}', "malformed"),
        ('{"n": -1e400}', "malformed"),
        ('{"n": NaN}', "malformed"),
        ('{"n": -Infinity}', "malformed"),
        ('{"n": 01}', "malformed"),
        ('{"a": 1, "a": 2}', "malformed"),
        ('{"o": {"a": 1, "\\u0061": 2}}', "malformed"),
        ('{"a": "\\ud800"}', "malformed"),
        ("{'a': 1}", "malformed"),
        ('{"a": tru}', "malformed"),
        ('{"a" 1}', "malformed"),
        ('{"a": 1,}', "malformed"),
        ('{"a": "line\nend"}', "malformed"),
        ('{"a": 1]}', "malformed"),
    ],
)
def test_only_json_is_a_call_s_arguments(name: str, raw: str, error: str) -> None:
    before, behind = JSON_FORMS[name]
    parsed = parse(name, before + raw + behind)
    assert [(c.name, c.error) for c in parsed.calls] == [("f", error)]
    assert parsed.content == ""  # and nothing of it is text
    assert raw.startswith(parsed.calls[0].arguments) or not error


@pytest.mark.parametrize("name", NAMES)
def test_no_arguments_are_an_empty_object_once(name: str) -> None:
    """vllm#19419, openai-agents-js#664: `""` for no arguments."""
    [call] = parse(name, WRITERS[name]("f", {})).calls
    assert (call.arguments, call.complete) == ("{}", True)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_begin_like_others_and_names_of_no_tool(name: str) -> None:
    tools = [ToolSpec(n, {}) for n in ("get", "get_weather", "get_weather_now")]
    for tool in tools:
        assert calls(parse(name, WRITERS[name](tool.name, {}), tools)) == [(tool.name, {}, "")]
    parsed = parse(name, WRITERS[name]("get_we", {}), tools)
    if name in ("llama3", "llama4"):  # nothing but the name tells a call from any other JSON there
        assert parsed == Parsed(WRITERS[name]("get_we", {}), ())
    else:
        assert calls(parsed) == [("get_we", {}, "")]


@pytest.mark.parametrize(
    ("form_name", "text"),
    [
        ("hermes", '{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'),
        ("gpt-oss", 'commentary to=functions.f{"a": "b"}'),
        ("deepseek-v31", 'f{"a": "b"}'),
        ("kimi-k2", 'functions.f:0{"a": "b"}'),
        ("mistral", 'f{"a": "b"}'),
        ("qwen3-xml", "<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"),
        ("gemma4", "call:f{a:b}"),
    ],
)
def test_without_the_marks_that_a_detokeniser_skipped_it_is_text_whole(form_name: str, text: str) -> None:
    assert parse(form_name, text) == Parsed(text, ())
    assert set(form(form_name).markers) <= form(form_name).inner  # so they are shown, and end no reply


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        # "required" ignored (vllm#44216): the recipient before or behind the channel.
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", ["f"]),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "", ["f"]),
        ("<|channel|>commentary to=f<|message|>{}", "", ["f"]),
        ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", "", ["f"]),
        # Preambles are content, built-in tools are nobody's.
        (
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.f<|message|>{}",
            "I will look.",
            ["f"],
        ),
        ("<|channel|>final<|message|>yes", "yes", []),
        (
            "<|channel|>commentary to=browser.open<|message|>{}<|end|><|start|><|channel|>final<|message|>x",
            "x",
            [],
        ),
        ("no channel at all", "no channel at all", []),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "ab", []),
    ],
)
def test_channels_of_harmony(text: str, content: str, found: list[str]) -> None:
    parsed = parse("gpt-oss", text)
    assert [call.name for call in parsed.calls] == found
    assert all(call.complete for call in parsed.calls)
    assert parsed.content == content


@pytest.mark.parametrize("name", JSON_FORMS)
def test_arguments_are_told_as_they_are_written(name: str) -> None:
    """Whatever raw JSON has come has been told: nothing waits for the call's end, nothing is taken back."""
    before, behind = JSON_FORMS[name]
    raw = '{"a": "' + "some text, " * 20 + '", "o": {"k": [1, 2, 3]}}'
    parser, told = form(name).parser(TOOLS), ""
    for at, char in enumerate(before + raw + behind):
        told += "".join(d.text for d in parser.feed(char) if isinstance(d, ArgumentsDelta))
        known = raw[: max(0, at + 1 - len(before))]
        assert raw.startswith(told)
        assert len(known) - len(told) <= 1
    parser.finish()
    assert told == raw


XML = [n for n in NAMES if n not in JSON_FORMS]


@pytest.mark.parametrize("name", XML)
def test_typed_values_are_told_as_early_as_their_type_is_sure(name: str) -> None:
    """A text while it is written, but for what may be its closing mark; any other value with that mark."""
    word = "abcdefghij"
    text = WRITERS[name]("f", {"n": 12345, "a": word * 20})
    parser, told = form(name).parser(TOOLS), ""
    for at, char in enumerate(text):
        told += "".join(d.text for d in parser.feed(char) if isinstance(d, ArgumentsDelta))
        assert text[: at + 1].count(word) - told.count(word) <= 1
        if word in text[:at]:
            assert "12345" in told
    parser.finish()
    assert json.loads(told) == {"n": 12345, "a": word * 20}


@pytest.mark.parametrize("raw", ["", " ", "null", "{}"])
def test_forms_of_nothing_are_no_arguments(raw: str) -> None:
    assert parse_arguments(raw) == {}


def test_arguments_in_python_come_one_by_one() -> None:
    parser = form("llama4").parser(TOOLS)
    told = [
        "".join(delta.text for delta in parser.feed(piece) if isinstance(delta, ArgumentsDelta))
        for piece in ('[f(a="x, y)"', ", n=[1, ", "2],", " o={'k': None}", ")", "]")
    ]
    assert told == ["", '{"a": "x, y)"', ', "n": [1, 2]', "", ', "o": {"k": null}}', ""]


@pytest.mark.parametrize("bad", ["a=1 b=2", "a=", "a=1,,b=2", ",a=1", "1", "**a", "a=b", "a=1, a=2", "a=(1"])
def test_what_is_no_call_in_python_is_malformed(bad: str) -> None:
    [call, *_] = parse("llama4", f"[f({bad})] and so on").calls
    assert not call.complete


@settings(max_examples=100, deadline=None)
@given(
    value=st.dictionaries(
        st.text("abß _-\n", min_size=1).map(str.strip),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=4,
    ),
    size=st.integers(1, 9),
)
def test_gemma_s_notation_is_read_as_the_json_that_it_stands_for(value: dict[str, Any], size: int) -> None:
    text = WRITERS["gemma4"]("f", value)
    [call] = read(form("gemma4").parser(TOOLS), pieces(text, size)).calls
    assert (json.loads(call.arguments), call.complete) == (value, True)


@pytest.mark.parametrize("said", ["{}", "[]", "5", "null", "true", '"\\ud800"', '""'])
@pytest.mark.parametrize("name", ["hermes", "llama3", "llama4", "mistral-v3"])
def test_a_name_that_is_none_makes_it_text(name: str, said: str) -> None:
    before = {"hermes": "<tool_call>", "mistral-v3": "[TOOL_CALLS] ["}.get(name, "")
    text = f'{before}{{"name": {said}}}'
    assert parse(name, text) == Parsed(text, ())
