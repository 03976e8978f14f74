"""Grammars of every family's form: they take what its models write, and whatever they let through, the
family's parser reads as a whole call."""

import json
import random

import pytest

from agentserve.executor.grammars import GrammarStore
from tests.grammar_rig import BYTES, EOS, VOCAB, sources_of_bytes
from tests.reply_rig import read
from tests.unit.test_reply_parsers import WRITERS
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.json_schema import MARKS
from tools_bridge.registry import FAMILIES, reply_form
from tools_bridge.types import ToolSpec

F = ToolSpec(
    "f",
    {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 5},
            "n": {"type": "integer", "minimum": -5, "maximum": 5},
            "o": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["a", "n", "o"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = ToolSpec("now", {})
ARGUMENTS = {"a": "b", "n": -3, "o": [True]}
NAMES = [family.name for family in FAMILIES if family.name != "llama4"]  # its lists cannot be held: see there
ANSWER = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}


@pytest.fixture(scope="module")
def store():
    compiler = sources_of_bytes()

    def define(source):
        store = GrammarStore(BYTES, VOCAB, [EOS])
        store.define("g", compiler.compile(source))
        return store.start("g")

    return define


def takes(fold, text):
    return all(fold.push(byte) for byte in text.encode()) and (fold.over or EOS in fold.allowed())


def grammar(name, *, choice="required", **more):
    form = reply_form("</think>", name)
    return reply_grammar([F, NOW], ToolChoice(choice), syntax=form.syntax, **more)


def written(name, tool, arguments):
    """As a grammar has it: what it does not hold models to (white space before, Kimi's content) left out."""
    text = WRITERS[name](tool, arguments).lstrip("\n")
    if name == "kimi-k3":
        text = "<|close|>response<|sep|>" + text
    if name == "gpt-oss":
        text = (
            f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{json.dumps(arguments)}"
        )
    return text


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_is_written_as_the_family_does(store, name):
    source = grammar(name)
    assert takes(store(source), written(name, "f", ARGUMENTS))
    assert takes(store(source), written(name, "now", {}))
    assert not takes(store(source), written(name, "g", {}))
    assert not takes(store(source), written(name, "f", {"a": "b", "n": 77, "o": []}))
    assert not takes(store(source), "text")


def walk(fold, rng, most=3000):
    """Text that a model with no idea might write, kept short by taking ends where there are any."""
    text = bytearray()
    while not fold.over and len(text) < most:
        allowed = [token for token in fold.allowed() if token != EOS]
        if EOS in fold.allowed() and (not allowed or rng.random() < 0.7):
            break
        printable = [token for token in allowed if 32 < token < 127] or allowed
        said = [rng.choice(printable if rng.random() < 0.95 else allowed)]
        if text.count(b'<|"|>') % 2 and rng.random() < 0.3:  # nothing else ends a string of Gemma's
            said = list(b'<|"|>')
        for token in said:
            assert fold.push(token)
        text += bytes(said)
    return text.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_whatever_a_forced_call_says_it_is_read_as_one(store, name):
    rng = random.Random(name)
    form = reply_form("", name)
    sources = [grammar(name), grammar(name, parallel=False)]
    for number in range(8):
        text = walk(store(sources[number % 2]), rng)
        parsed = read(form.parser([F, NOW]), [text])
        assert parsed.calls, text
        assert number % 2 == 0 or len(parsed.calls) == 1
        for call in parsed.calls:
            assert call.complete, text
            arguments = json.loads(call.arguments)
            if call.name == "f":
                assert set(arguments) == {"a", "n", "o"}
                assert isinstance(arguments["a"], str)
                assert -5 <= arguments["n"] <= 5
                assert all(isinstance(item, bool) for item in arguments["o"])


@pytest.mark.parametrize("name", NAMES)
def test_strict_arguments_among_text(store, name):
    source = grammar(name, choice="auto")
    opening = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if name == "gpt-oss" else "Well. "
    assert takes(store(source), opening + written(name, "f", ARGUMENTS))
    assert not takes(store(source), opening + written(name, "f", {"a": "b", "n": "x", "o": []}))
    assert takes(store(source), opening)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_or_calls(store, name):
    response = ResponseFormat("json_schema", ANSWER)
    before, after = reply_form("", name).syntax.said
    source = grammar(name, choice="auto", response=response)
    assert takes(store(source), f'{before}{{"x": true}}{after}')
    assert takes(store(source), written(name, "f", ARGUMENTS))
    assert not takes(store(source), f"{before}text{after}")


@pytest.mark.parametrize("name", [name for name in NAMES if reply_form("", name).syntax.think])
def test_reasoning_before_a_forced_call(store, name):
    form = reply_form("</think>", name)
    begin, end = form.syntax.think
    call = (form.syntax.between or "\n\n") + written(name, "f", ARGUMENTS)
    may = grammar(name, thinking="may")
    inside = grammar(name, thinking="inside")
    assert takes(store(may), f"{begin}why? {end}{call}")
    assert takes(store(may), written(name, "f", ARGUMENTS))
    assert not takes(store(may), "why?")
    assert takes(store(inside), f"why? {end}{call}")
    assert not takes(store(inside), "why?")
    begun = (
        [f"{begin}why? {end}{call}"] if name == "gpt-oss" else [f"why? {end}{call}"]
    )  # its prompts begin none
    parsed = read(form.parser([F, NOW], inside=True), begun)
    assert (parsed.reasoning, [call.name for call in parsed.calls]) == ("why?", ["f"])


def test_what_may_come_is_told_by_the_prompt():
    form = reply_form("<think></think>", "hermes")
    assert form.thinking("<|im_start|>assistant\n") == "may"
    assert form.thinking("<|im_start|>assistant\n<think>\n") == "inside"
    assert form.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "no"
    assert reply_form("", "hermes").thinking("<|im_start|>assistant\n") == "no"


def test_patterns_choices_and_grammars(store):
    regex = reply_grammar(response=ResponseFormat("regex", text="[ab]{2}c?"))
    assert takes(store(regex), "abc")
    assert not takes(store(regex), "a")
    choice = reply_grammar(response=ResponseFormat("choice", choices=("yes", "no", "not at all")))
    assert [takes(store(choice), text) for text in ("yes", "not at all", "not", "y")] == [
        True,
        True,
        False,
        False,
    ]
    ebnf = reply_grammar(response=ResponseFormat("ebnf", text='root ::= "a" root "b" | "c"'))
    assert takes(store(ebnf), "aacbb")
    assert not takes(store(ebnf), "aacb")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}
    assert takes(store(reply_grammar(response=ResponseFormat("structural_tag", tag))), "so")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (ResponseFormat("regex"), "empty"),
        (ResponseFormat("regex", text="a" * 10_000), "longer"),
        (ResponseFormat("regex", text="(" * 100 + ")" * 100), "deeper"),
        (ResponseFormat("choice"), "at least one"),
        (ResponseFormat("choice", choices=("a", "")), "empty"),
        (ResponseFormat("choice", choices=tuple(map(str, range(5000)))), "more than"),
        (ResponseFormat("ebnf", text=" "), "characters"),
        (ResponseFormat("ebnf", text="a" * 100_000), "characters"),
        (ResponseFormat("structural_tag", {}), "format"),
    ],
)
def test_forms_that_cannot_be_asked_for(response, problem):
    with pytest.raises(GrammarError, match=problem):
        reply_grammar(response=response)


@pytest.mark.parametrize(
    "response", [ResponseFormat("regex", text="(a"), ResponseFormat("ebnf", text="root = ")]
)
def test_a_broken_pattern_is_the_clients(store, response):
    with pytest.raises(GrammarError):
        store(reply_grammar(response=response))


@pytest.mark.parametrize("lengths", [{"maxLength": 5}, {"minLength": 1}, {"minLength": 1, "maxLength": 300}])
def test_a_string_of_a_bounded_length_is_json_too(store, lengths):
    schema = {"type": "object", "properties": {"a": {"type": "string", **lengths}}, "required": ["a"]}
    source = reply_grammar(response=ResponseFormat("json_schema", schema))
    assert takes(store(source), '{"a": "x\u00e9y"}')
    assert not takes(store(source), '{"a": "x\ty"}')
    assert not takes(store(source), '{"a": "x\x01y"}')
    assert takes(store(source), '{"a": ""}') == ("minLength" not in lengths)


IN_XML = [name for name in NAMES if reply_form("", name).syntax.calls.style in MARKS and "gemma" not in name]


@pytest.mark.parametrize("name", IN_XML)
def test_names_that_match_a_pattern_have_no_mark_in_them(store, name):
    said = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"c": said}, "required": ["c"]}
    tool, form = ToolSpec("f", parameters, strict=True), reply_form("", name)
    source = reply_grammar([tool], ToolChoice("required"), syntax=form.syntax)
    assert takes(store(source), written(name, "f", {"c": {"xyz": 1}}))
    for mark in MARKS[form.syntax.calls.style]:
        assert not takes(store(source), written(name, "f", {"c": {f"x{mark}": 1}}))


@pytest.mark.parametrize("name", [name for name in NAMES if "gemma" not in name])
def test_what_no_parser_takes_for_a_value_is_not_written(store, name):
    """Numbers that are infinity, and halves of characters."""
    parts = {"a": {"type": "array", "items": {"type": "string"}}, "n": {"type": "number"}}
    tool = ToolSpec("f", {"type": "object", "properties": parts, "required": ["a", "n"]}, strict=True)
    source = reply_grammar([tool], ToolChoice("required"), syntax=reply_form("", name).syntax)
    text = written(name, "f", {"a": ["here"], "n": 77})
    assert takes(store(source), text.replace("here", r"\ud83d\ude00").replace("77", "1e99"))
    assert not takes(store(source), text.replace("77", "1e999"))
    assert not takes(store(source), text.replace("here", r"\ud83d"))


@pytest.mark.parametrize("name", NAMES)
def test_of_many_tools_with_the_same_parameters_each_is_called_by_its_name_and_no_other(store, name):
    form = reply_form("", name)
    names = ["get", "get_all", "list", "et", "forget"]
    tools = [ToolSpec(each, F.parameters, strict=True) for each in names] + [NOW]
    for mode in ("required", "auto"):
        source = reply_grammar(tools, ToolChoice(mode), syntax=form.syntax)
        for each in names:
            assert takes(store(source), written(name, each, ARGUMENTS)), each
        assert takes(store(source), written(name, "now", {}))
        if mode == "required":
            for other in ("ge", "get_", "gets", "forge", "forget_all"):
                assert not takes(store(source), written(name, other, ARGUMENTS)), other


def test_many_plain_tools_are_hardly_more_than_one():
    compiler = sources_of_bytes()
    any_object = {"type": "object"}
    sizes = [
        len(
            compiler.compile(reply_grammar([ToolSpec(f"tool_{n}", any_object) for n in range(count)], forced))
        )
        for forced in (ToolChoice("required"),)
        for count in (2, 256)
    ]
    assert sizes[1] < 2 * sizes[0]
