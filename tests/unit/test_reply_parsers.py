"""What all families' parsers have in common: the same result at every cut, little kept back, no surprise."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reply_rig import read
from tools_bridge.registry import FAMILIES, detect, reply_form
from tools_bridge.types import ToolSpec

TOOLS = [
    ToolSpec(
        "f",
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
        },
    ),
    ToolSpec("g.h-2", {}),
]
NAMES = [family.name for family in FAMILIES]
ARGUMENTS = {"a": 'x "y"\n\\ é😀', "n": -3, "o": {"k": [1, None, True, {"z": "}"}]}}


def form(name):
    return reply_form("", name)


def quoted(value):
    """Gemma's notation."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(quoted, value)) + "]"
    return json.dumps(value)


def plain(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dsml(word, blank=""):
    def write(name, arguments):
        tag = f"｜DSML｜{blank}"
        inner = "".join(
            f'<{tag}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{plain(value)}</{tag}parameter>\n"
            for key, value in arguments.items()
        )
        return f'\n\n<{tag}{word}>\n<{tag}invoke name="{name}">\n{inner}</{tag}invoke>\n</{tag}{word}>'

    return write


def glm(line):
    def write(name, arguments):
        pairs = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{plain(value)}</arg_value>{line}"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{line}{pairs}</tool_call>"

    return write


def qwen(name, arguments):
    inner = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def xtml(name, arguments):
    kinds = {str: "string", int: "number", dict: "object", list: "array"}
    tags = ((f'argument key="{k}" type="{kinds[type(v)]}"', plain(v)) for k, v in arguments.items())
    inner = "".join(f"<|open|>{tag}<|sep|>{value}<|close|>argument<|sep|>" for tag, value in tags)
    call = f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{call}<|close|>tools<|sep|>"


WRITERS = {
    "gpt-oss": lambda n, a: f" to=functions.{n}<|channel|>commentary <|constrain|>json<|message|>{plain(a)}",
    "kimi-k3": xtml,
    "kimi-k2": lambda n, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{plain(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek-v3": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{plain(a)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v31": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{plain(a)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v32": dsml("function_calls"),
    "deepseek-v4": dsml("tool_calls"),
    "deepseek-v41": dsml("calls", " "),
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{plain(a)}",
    "mistral-v3": lambda n, a: f"[TOOL_CALLS] [{plain({'name': n, 'arguments': a})}]",
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{quoted(a)}<tool_call|>",
    "glm47": glm(""),
    "glm45": glm("\n"),
    "qwen3-xml": qwen,
    "hermes": lambda n, a: f"<tool_call>\n{plain({'name': n, 'arguments': a})}\n</tool_call>",
    "llama4": lambda n, a: f"[{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})]",
    "llama3": lambda n, a: plain({"name": n, "parameters": a}),
}


def pieces(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)]


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


def alphabet(name):
    """Whatever could confuse a parser: the marks of its family, halves of them, and JSON."""
    call = WRITERS[name]("f", {"a": "b"})
    reply = form(name)
    marks = [*reply.markers, *((reply.think.open, reply.think.close) if reply.think else ())]
    marks += [*(reply.family.calls.triggers if reply.family.calls else ())]
    halves = [mark[: len(mark) // 2] for mark in marks]
    return [*marks, *halves, call, call[: len(call) // 2], call[len(call) // 2 :], *'{}[]",:f \n\\<>|a1']


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
        assert parser.undecided <= 64
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
