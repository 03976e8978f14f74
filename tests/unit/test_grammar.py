"""Grammar sources, their compilation, and what compiled grammars take, over a vocabulary of bytes."""

import json

import pytest
import xgrammar

from agentserve.executor.grammars import GrammarStore
from agentserve.executor.sampler import Sampler
from tests.grammar_rig import BYTES, CITY, EOS, NOW, REQUIRED, VOCAB, WEATHER, call, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.registry import reply_form
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


NOT_HELD = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "price": {"type": "number", "multipleOf": 0.01},
        "not": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    },
    "required": ["tags", "price"],
    "additionalProperties": False,
}


def test_without_strict_as_much_is_held_as_can_be(accepts):
    valid = '{"tags": ["a", "a"], "price": 0.5, "not": 1}'
    wrong = '{"tags": "a", "price": 0.5}'
    loose = reply_grammar(response=ResponseFormat("json_schema", NOT_HELD, strict=False))
    assert accepts(loose, valid)
    assert not accepts(loose, wrong)
    called = reply_grammar([ToolSpec("f", NOT_HELD)], REQUIRED)
    assert accepts(called, call("f", valid))
    assert not accepts(called, call("f", wrong))
    assert called.left_out == (
        "tools.f.parameters.properties.tags: 'uniqueItems'",
        "tools.f.parameters.properties.price: 'multipleOf'",
        "tools.f.parameters.properties.not: 'oneOf'",
    )
    with pytest.raises(
        GrammarError, match=r"'uniqueItems' .* drop it from the schema, or leave out 'strict'"
    ):
        reply_grammar([ToolSpec("f", NOT_HELD, strict=True)], REQUIRED)
    with pytest.raises(GrammarError, match='drop it from the schema, or say "strict": false'):
        reply_grammar(response=ResponseFormat("json_schema", NOT_HELD))


CODE = {"type": "string", "pattern": "^[A-Z]{3}$"}


@pytest.mark.parametrize(
    ("part", "valid", "wrong", "left_out"),
    [
        ({"type": "string", "pattern": "(?=a)b", "minLength": 2}, '"ab"', '"a"', ".properties.x: 'pattern'"),
        ({"$dynamicRef": "#a"}, "[1]", "]", ".properties.x: '$dynamicRef'"),
        ({"type": "array", "items": CODE, "contains": CODE}, '["ABC"]', '["A"]', ".properties.x: 'contains'"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]},
            "4",
            '"4"',
            ".properties.x: 'oneOf'",
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"\b"}]},
            '"x"',
            "true",
            ".properties.x.anyOf[1]: 'pattern'",
        ),
        (
            {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "(?!a)"}]},
            '"ab"',
            '"a"',
            ".properties.x: what is hard to hold",
        ),
        ({"$ref": "#/$defs/none"}, "1", "]", ".properties.x: what it refers to, and its alternatives"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "1", '"1"', ".properties.x: all but its type"),
        ({"type": "array", "minItems": 20_000}, "[]", "1", ".properties.x: 'minItems'"),
        ({"type": "string", "not": {"const": "a"}}, '"a"', "1", ".properties.x: 'not'"),
    ],
)
def test_without_strict_only_the_part_that_cannot_be_held_says_less(accepts, part, valid, wrong, left_out):
    schema = {
        "type": "object",
        "properties": {"code": CODE, "kind": {"enum": ["a", "b"]}, "x": part},
        "required": ["code", "kind", "x"],
        "additionalProperties": False,
    }

    def text(code='"ABC"', kind='"a"', x=valid, more=""):
        return f'{{"code": {code}, "kind": {kind}, "x": {x}{more}}}'

    source = reply_grammar(response=ResponseFormat("json_schema", schema, strict=False))
    assert source.left_out == (f"response_format.json_schema.schema{left_out}",)
    assert accepts(source, text())
    for other in (
        text(x=wrong),
        text(code='"AB"'),
        text(kind='"c"'),
        text(more=', "y": 1'),
        '{"code": "ABC"}',
    ):
        assert not accepts(source, other), other


def test_without_strict_arguments_that_a_form_cannot_hold_leave_the_others(accepts):
    syntax = reply_form("", "qwen3-xml").syntax
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        },
        "required": ["kind", "either"],
    }
    source = reply_grammar([ToolSpec("f", schema)], REQUIRED, syntax=syntax)
    assert source.left_out == ("tools.f.parameters.properties.either: all but its type",)

    def text(kind, either):
        arguments = "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n"
            for name, value in (("kind", kind), ("either", either))
        )
        return f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"

    assert accepts(source, text("a", "1"))
    assert accepts(source, text("b", "text"))
    assert not accepts(source, text("c", "1"))


def test_without_strict_a_schema_that_cannot_be_held_at_all_leaves_its_type(accepts):
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)}
    moving = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": twice | {"d25": {}}}
    called = reply_grammar([ToolSpec("f", moving)], REQUIRED)
    assert accepts(called, call("f", '{"any": [1]}'))
    assert not accepts(called, call("f", "[1]"))
    assert called.left_out == ("tools.f.parameters: all but its type",)


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({"$schema": "http://json-schema.org/schema#"}, "'$schema'"),
        (
            {"$defs": {"a": {"$ref": "http://example.com/"}}},
            "references out of the schema, and lists beyond the bounds",
        ),
    ],
)
def test_without_strict_what_is_out_of_bounds_leaves_the_rest(accepts, more, left_out):
    schema = {"type": "object", "properties": {"code": CODE}, "required": ["code"], **more}
    source = reply_grammar(response=ResponseFormat("json_schema", schema, strict=False))
    assert source.left_out == (f"response_format.json_schema.schema: {left_out}",)
    assert accepts(source, '{"code": "ABC"}')
    assert not accepts(source, '{"code": "AB"}')


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


@pytest.mark.parametrize(
    "part",
    [
        {"$ref": "https://example.com/a.json"},
        {"anyOf": [{"const": n} for n in range(200)]},
        {"oneOf": [{"const": n} for n in range(200)]},
        {"enum": list(range(3000))},
    ],
)
def test_without_strict_what_is_out_of_bounds_is_left_out(accepts, part):
    schema = {"type": "object", "properties": {"a": part, "b": {"type": "integer"}}, "required": ["b"]}
    tool = reply_grammar([ToolSpec("f", schema)], REQUIRED)
    answer = reply_grammar(response=ResponseFormat("json_schema", schema, strict=False))
    assert accepts(answer, '{"a": "x", "b": 1}')
    assert not accepts(answer, '{"a": "x", "b": "x"}')
    assert accepts(tool, call("f", '{"b": 1}'))
    assert reply_grammar([ToolSpec("f", schema), ToolSpec("g", {}, strict=True)]) is not None
    for strict in (
        lambda: reply_grammar([ToolSpec("f", schema, strict=True)], REQUIRED),
        lambda: reply_grammar(response=ResponseFormat("json_schema", schema)),
    ):
        with pytest.raises(GrammarError):
            strict()


def test_without_strict_a_list_of_types_is_kept(accepts):
    schema = {"type": ["array", "null"], "items": {"$dynamicRef": "#x"}}
    loose = reply_grammar(response=ResponseFormat("json_schema", schema, strict=False))
    assert accepts(loose, "null")
    assert accepts(loose, "[1]")
    assert not accepts(loose, "{}")


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
