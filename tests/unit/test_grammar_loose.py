"""What is held of schemas that are not strict, over a vocabulary of bytes."""

import pytest

from agentserve.executor.grammars import GrammarStore
from tests.grammar_rig import BYTES, EOS, REQUIRED, VOCAB, call, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.registry import reply_form
from tools_bridge.types import ToolSpec


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
