"""What all families' parsers have in common: the same result at every cut, little kept back, no surprise."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reply_forms import ARGUMENTS, NAMES, TOOLS, WRITERS, alphabet, form, pieces
from tests.reply_rig import read
from tools_bridge.registry import detect


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", [ARGUMENTS, {}])
def test_a_call_comes_out_as_it_was_meant(name, arguments):
    text = WRITERS[name]("f", arguments)
    for size in (len(text), 1, 2, 3, 7):
        parsed = read(form(name).parser(TOOLS), pieces(text, size))
        assert [(call.name, json.loads(call.arguments), call.error) for call in parsed.calls] == [
            ("f", arguments, "")
        ]
        assert (parsed.content, parsed.reasoning, parsed.truncated) == ("", "", False)


@pytest.mark.parametrize("name", NAMES)
def test_no_beginning_of_a_call_is_a_call(name):
    text = WRITERS[name]("f", ARGUMENTS)
    for end in range(1, len(text)):
        parsed = read(form(name).parser(TOOLS), [text[:end]])
        for call in parsed.calls:
            assert call.error == "truncated" or json.loads(call.arguments) == ARGUMENTS, text[:end]


@pytest.mark.parametrize("name", NAMES)
def test_no_calls_are_found_where_none_are_looked_for(name):
    text = "Well. " + WRITERS[name]("f", ARGUMENTS)
    assert not read(form(name).parser(TOOLS, calls=False), pieces(text, 3)).calls


@pytest.mark.parametrize("name", [name for name in NAMES if form(name).think is not None])
def test_reasoning_is_kept_apart(name):
    reply = form(name)
    think = reply.think
    answer = "<|open|>response<|sep|>yes<|close|>response<|sep|>" if name == "kimi-k3" else "\n\nyes"
    inside = f"why \n not?\n{think.close}{answer}"
    for size in (1, 2, 5, 100):
        parsed = read(reply.parser(TOOLS, inside=True), pieces(inside, size))
        assert (parsed.reasoning, parsed.content) == ("why \n not?", "yes")
        parsed = read(reply.parser(TOOLS), pieces(f"\n{think.open}{inside}", size))
        assert (parsed.reasoning, parsed.content) == ("why \n not?", "yes")
    assert reply.inside(f"<user>{think.close}<assistant>{think.open}\n")
    assert not reply.inside(f"<user>{think.open}<assistant>")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_same_result_at_every_cut(name, data):
    parts = data.draw(st.lists(st.sampled_from(alphabet(name)), max_size=12))
    text = "".join(parts)
    reply, inside = form(name), data.draw(st.booleans())
    whole = read(reply.parser(TOOLS, inside=inside), [text])
    for size in (1, 2, 5):
        assert read(reply.parser(TOOLS, inside=inside), pieces(text, size)) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(reply.parser(TOOLS, inside=inside), [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_little_is_kept_back_whatever_comes(name, seed):
    """The work for a piece grows with what is undecided before it: bounded, a reply takes linear time."""
    rng = random.Random(seed)
    parts = rng.choices(alphabet(name), k=3) if seed else [WRITERS[name]("f", {"a": "b"})[:-3]]
    text = ("".join(parts) * 20_000)[:20_000]
    parser = form(name).parser(TOOLS)
    for character in text:
        parser.feed(character)
        assert len(parser._source.text) - parser._source.at <= 64
    parser.finish()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "gpt-oss"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi-k2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json'", "deepseek-v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']", "deepseek-v31"),
        ("'[TOOL_CALLS]' + name + '[ARGS]'", "mistral"),
        ('"[TOOL_CALLS] ["', "mistral-v3"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>", "glm47"),
        ("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3-xml"),
        ("<tool_call>\n{{ '{\"name\": ' }}", "hermes"),
        ("'<|tool_call>call:' + name", "gemma4"),
        ("<|python_tag|>", "llama3"),
        ("<|header_start|>", "llama4"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_a_template_tells_its_family(template, name):
    assert detect(template).name == name
