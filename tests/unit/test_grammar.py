"""Grammar sources, their compilation, and what compiled grammars take, over a vocabulary of bytes."""

import json

import pytest
import xgrammar

from agentserve.executor.grammars import GrammarStore
from agentserve.executor.sampler import Sampler
from tests.grammar_rig import BYTES, CITY, EOS, NOW, REQUIRED, VOCAB, WEATHER, call, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.schemas import MAX_BRANCHES, MAX_ENUM, MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from tools_bridge.types import ToolSpec
from tools_bridge.vocabulary import GrammarVocabulary


@pytest.fixture(scope="module")
def compiler():
    return sources_of_bytes()


@pytest.fixture(scope="module")
def accepts(compiler):
    def accepts(source, text):
        """Whether the grammar takes the whole text, and whether nothing could follow."""
        store = GrammarStore(BYTES, VOCAB, [EOS])
        store.define("g", compiler.compile(source))
        fold = store.start("g")
        if not all(fold.push(byte) for byte in text.encode()):
            return False
        return "over" if fold.over else EOS in fold.allowed()

    return accepts


def test_required_calls(accepts):
    many = reply_grammar([WEATHER, NOW], REQUIRED)
    assert accepts(many, call()) is True
    assert accepts(many, call() + "\n" + call("now", "{}")) is True
    assert accepts(many, "") is False
    assert accepts(many, "text") is False
    assert accepts(many, call("now", '{"a": 1}')) is False
    assert accepts(many, call(arguments="{}")) is False
    assert accepts(many, call(arguments='{"city": 5}')) is False
    assert accepts(many, call("other")) is False
    one = reply_grammar([WEATHER, NOW], REQUIRED, parallel=False)
    assert accepts(one, call()) == "over"
    assert accepts(one, call() + "\n") is False


def test_a_named_tool_and_allowed_tools(accepts):
    named = reply_grammar([WEATHER, NOW], ToolChoice.named("now"))
    assert accepts(named, call("now", "{}")) == "over"
    assert accepts(named, call()) is False
    allowed = reply_grammar([WEATHER, NOW], ToolChoice("required", ("weather",)))
    assert accepts(allowed, call()) is True
    assert accepts(allowed, call("now", "{}")) is False


def test_auto_is_free_unless_something_is_asked(accepts):
    assert reply_grammar([WEATHER]) is None
    assert reply_grammar([WEATHER], ToolChoice("none"), parallel=False) is None
    assert reply_grammar() is None
    strict = reply_grammar([ToolSpec("weather", CITY, strict=True), NOW])
    for text in ("", "hello", "hi " + call() + " and " + call(), call("now", '{"any": 1}')):
        assert accepts(strict, text) is True
    assert accepts(strict, call(arguments="{}")) is False
    assert accepts(strict, "<tool_call>no") is False
    single = reply_grammar([WEATHER], parallel=False)
    assert accepts(single, "hi " + call(arguments='{"any": 1}')) == "over"
    assert accepts(single, "hi") is True


def test_response_formats(accepts):
    schema = ResponseFormat("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    alone = reply_grammar(response=schema)
    assert accepts(alone, '{"a": 12}') == "over"
    assert accepts(alone, '{"a": "x"}') is False
    assert accepts(reply_grammar(response=ResponseFormat("json_object")), '{"b": [1, {}]}') == "over"
    assert accepts(reply_grammar(response=ResponseFormat("json_object")), "[1]") is False
    both = reply_grammar([WEATHER], response=schema)  # either a call or such a value
    assert accepts(both, '{"a": 12}') == "over"
    assert accepts(both, call()) is True
    assert accepts(both, "text") is False
    assert accepts(reply_grammar([WEATHER], REQUIRED, response=schema), '{"a": 12}') is False
    none = reply_grammar([WEATHER], ToolChoice("none"), response=schema)
    assert accepts(none, call()) is False


def test_blanks_are_bounded(accepts):
    source = reply_grammar(response=ResponseFormat("json_object"))
    assert accepts(source, '{"a":  1}') == "over"
    assert accepts(source, " " * 3) is False
    blanks = " \n\n"
    gaps = [
        "{%s}",
        '{%s"a": 1}',
        '{"a"%s: 1}',
        '{"a":%s1}',
        '{"a": 1%s}',
        '{"a": 1,%s"b": 2}',
        '{"a": [1,%s2]}',
    ]
    for gap in gaps:
        assert accepts(source, gap % blanks) is False, gap
        assert accepts(source, gap % "\n") == "over", gap
        arguments = reply_grammar([ToolSpec("f", {"type": "object"})], REQUIRED)
        begin = '<tool_call>\n{"name": "f", "arguments": '
        assert accepts(arguments, begin + gap % blanks) is False, gap
        assert accepts(arguments, begin + gap % "\n" + "}\n</tool_call>") is True, gap


@pytest.mark.parametrize("name", ['a"b', "a\\b", "näme", "</tool_call>", "a.b-c", "{}"])
def test_any_tool_name_can_be_called(accepts, name):
    source = reply_grammar([ToolSpec(name)], REQUIRED)
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{}}}}\n</tool_call>'
    assert accepts(source, text) is True


def test_ids_are_digests_of_the_meaning():
    one, two = reply_grammar([WEATHER], REQUIRED), reply_grammar([WEATHER], REQUIRED)
    assert one == two
    assert one.id == two.id
    others = [
        reply_grammar([NOW], REQUIRED),
        reply_grammar([WEATHER], REQUIRED, parallel=False),
        reply_grammar([ToolSpec("weather", {**CITY, "required": []})], REQUIRED),
    ]
    assert len({one.id, *(source.id for source in others)}) == 4
    flipped = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert (  # the order of properties is the order they are written in
        reply_grammar(response=ResponseFormat("json_schema", flipped)).id
        != reply_grammar(
            response=ResponseFormat("json_schema", {"type": "object", "properties": {"a": {}, "b": {}}})
        ).id
    )


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "must be an object"),
        ([], "must be an object"),
        ({"type": "strnig"}, "Unsupported type"),
        ({"$ref": "http://x/y"}, "must point into the same schema"),
        ({"$ref": 7}, "must point into the same schema"),
        ({"$ref": "#/nope"}, "points at nothing"),
        ({"$ref": "#"}, "cannot be met"),
        ({"allOf": [{"$ref": "#"}]}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "cannot be met"),
        ({"type": "string", "pattern": "(" * 30000 + "a" + ")" * 30000}, "longer than 2048"),
        ({"type": "string", "pattern": "(" * 65 + "a" + ")" * 65}, "deeper than 64"),
        ({"patternProperties": {"(" * 65 + "a" + ")" * 65: {}}}, "deeper than 64"),
        ({"$ref": "#/x", "x": {"type": "string", "pattern": "a" * 2049}}, "longer than 2048"),
        ({"type": "string", "format": []}, "format"),
        ({"properties": {}, "required": [[]]}, "'required' must be"),
        ({"type": "string", "pattern": "(?<a"}, "ends too early"),
        ({"type": "string", "pattern": "(?=a)b"}, "looks around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be met"),
        (deep(MAX_SCHEMA_DEPTH), "nested deeper"),
        ({"description": "x" * MAX_SCHEMA_CHARS}, "longer than"),
        ({"anyOf": [{"const": i} for i in range(MAX_BRANCHES + 1)]}, "branches"),
        ({"enum": list(range(MAX_ENUM + 1))}, "enum has"),
        ({"const": float("inf")}, "not JSON"),
        ({"const": b"x"}, "not JSON"),
        ({3: 4}, "no string"),
        (
            {"properties": {"a": {"type": "string", "not": {"pattern": "a"}}}},
            "schema.properties.a: 'not' with",
        ),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "schema.items: 'uniqueItems'"),
        ({"type": "string", "format": "idn-email"}, "format"),
        ({"type": "string", "pattern": "^(ab)*$", "minLength": 3, "maxLength": 3}, "together"),
        ({"allOf": [{"pattern": "^a+$"}, {"pattern": "^(b|a)"}]}, "'pattern' beside this other"),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "'oneOf' cannot be held"),
        ({"type": "number", "multipleOf": 0.1}, "'multipleOf'"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "'.schema' names"),
        ({"type": "string", "enum": [1]}, "cannot be met"),
    ],
)
def test_bad_schemas_are_refused_in_one_line(compiler, schema, message):
    with pytest.raises(GrammarError, match=message) as caught:
        compiler.compile(reply_grammar(response=ResponseFormat("json_schema", schema)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_names_of_properties_are_not_keywords(compiler):
    schema = {"type": "object", "properties": {k: {"type": "string"} for k in ("not", "if", "$ref", "allOf")}}
    compiler.compile(reply_grammar(response=ResponseFormat("json_schema", schema, strict=True)))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], REQUIRED, "no tools"),
        ([WEATHER], ToolChoice.named("nope"), "no tool called 'nope'"),
        ([WEATHER, WEATHER], REQUIRED, "two tools"),
        ([ToolSpec("")], REQUIRED, "no name"),
        ([ToolSpec("f", {"type": "array"})], REQUIRED, "must be of type 'object'"),
    ],
)
def test_impossible_choices_are_refused(tools, choice, message):
    with pytest.raises(GrammarError, match=message):
        reply_grammar(tools, choice)


def test_a_compiled_grammar_is_for_one_vocabulary(compiler):
    compiled = compiler.compile(reply_grammar([WEATHER], REQUIRED))
    for other in (
        GrammarVocabulary([*BYTES[:-1], b"zz"], VOCAB, [EOS]),  # same size, other bytes
        GrammarVocabulary(BYTES, VOCAB + 1, [EOS]),
        GrammarVocabulary(BYTES, VOCAB, [EOS + 1]),
    ):
        with pytest.raises(ValueError, match="another vocabulary"):
            other.unseal(compiled)
    same = GrammarVocabulary(BYTES, VOCAB, [EOS])
    with pytest.raises(ValueError, match="cannot be read"):
        same.unseal(compiled[:-20])
    with pytest.raises(ValueError, match="no compiled grammar"):
        Sampler(VOCAB, BYTES, [EOS]).define_grammar("g", "{}")
    assert isinstance(same.unseal(compiled), xgrammar.CompiledGrammar)


def test_vocabularies_are_checked():
    for arguments, message in (
        ((BYTES, VOCAB, []), "at least one stop"),
        ((BYTES, 255, [1]), "do not fit"),
        ((BYTES, VOCAB, [VOCAB]), "outside"),
    ):
        with pytest.raises(ValueError, match=message):
            GrammarVocabulary(*arguments)


def test_schemas_that_are_not_held_are_not_looked_at(accepts):
    odd = ToolSpec("f", {"type": "array", "anyOf": [{}] * 1000})
    single = reply_grammar([odd], parallel=False)
    assert accepts(single, "hi " + call("f", '{"any": 1}')) == "over"
    beside = reply_grammar([odd], response=ResponseFormat("json_object"))
    assert accepts(beside, call("f", '{"any": 1}')) is True
    with pytest.raises(GrammarError):
        reply_grammar([odd], REQUIRED)


def test_text_with_triggered_tags(accepts):
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tags = [{"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}]
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    tag = ResponseFormat("structural_tag", {"type": "structural_tag", "format": form})
    assert accepts(reply_grammar(response=tag), 'so <f>{"a": 1}</f> on') is True
    assert accepts(reply_grammar(response=tag), "so <f>1") is False


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" | "b"',  # Lark
        'start: begin_patch hunk+\nbegin_patch: "*** Begin Patch" LF\n%import common.LF',
        "root := 'a'",
    ],
)
def test_grammars_in_other_notations_are_refused(compiler, grammar):
    with pytest.raises(GrammarError) as caught:
        compiler.compile(reply_grammar(response=ResponseFormat("ebnf", text=grammar)))
    assert "\n" not in str(caught.value)


def test_a_grammar_is_in_the_notation_of_gbnf(accepts):
    text = 'root ::= word (" " word)* "."  # a sentence\nword ::= [a-z]+'
    source = reply_grammar(response=ResponseFormat("ebnf", text=text))
    assert accepts(source, "so it is.") == "over"
    assert accepts(source, "So") is False
