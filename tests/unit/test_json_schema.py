"""Schemas rewritten into what xgrammar holds: what becomes of them, and what is refused by name."""

import pytest

from tools_bridge.json_schema import exact_schema
from tools_bridge.json_schema.ebnf import mended
from tools_bridge.json_schema.patterns import read_pattern
from tools_bridge.schemas import GrammarError

OBJECT = {"type": "object", "additionalProperties": False}


def exact(schema):
    return exact_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({}, {}),
        ({"title": "T", "default": 1, "x-unknown": 2}, {}),
        (
            {"type": "integer", "minimum": 1.5, "exclusiveMaximum": 9},
            {"type": "integer", "minimum": 2, "maximum": 8},
        ),
        ({"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 4}, {"enum": [4, 8]}),
        ({"minLength": 2}, {"type": "string", "minLength": 2}),
        ({"type": "string", "format": "int32"}, {"type": "string"}),
        ({"enum": ["a", "bcd", 5], "type": "string", "maxLength": 2}, {"enum": ["a"]}),
        ({"enum": [1, 2, 3], "not": {"const": 2}}, {"enum": [1, 3]}),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}, {"minimum": 5}]}, {"type": "integer", "minimum": 5}),
        ({"anyOf": [{"minLength": 2}, {"maxLength": 1}], "type": "null"}, {"type": "null"}),
        ({"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}),
        ({"oneOf": [{"type": "null"}, {"const": 1}]}, {"anyOf": [{"type": "null"}, {"enum": [1]}]}),
        ({"type": "array", "uniqueItems": True, "maxItems": 0}, {"enum": [[]]}),
        ({"type": "array", "prefixItems": [False]}, {"enum": [[]]}),
        ({"not": {"type": ["object", "array", "number", "boolean", "null"]}}, {"type": "string"}),
        ({"properties": {"a": False}}, {**OBJECT, "properties": {}}),
        (
            {"properties": {"a": {"type": "null"}}, "required": ["a", "b"], "unevaluatedProperties": False},
            None,
        ),
        (
            {"allOf": [{"properties": {"a": {"type": "null"}}}], "unevaluatedProperties": False},
            {**OBJECT, "properties": {"a": {"type": "null"}}},
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
            {**OBJECT, "properties": {"a": {"type": "null"}}},
        ),
    ],
)
def test_what_becomes_of_a_schema(schema, written):
    if written is None:
        with pytest.raises(GrammarError, match="cannot be met"):
            exact(schema)
    else:
        assert exact(schema) == written


def test_a_conditional_becomes_alternatives():
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["n"]},
    }
    met, unmet = exact(schema)["anyOf"]
    assert (met["properties"]["kind"], met["required"]) == ({"enum": ["a"]}, ["kind", "n"])
    assert (unmet["properties"]["kind"], unmet["required"]) == ({"enum": ["b"]}, ["kind"])


def test_branches_of_a_oneof_are_told_apart_by_what_must_be_there():
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}}}
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}}}
    assert [branch["required"] for branch in exact({"oneOf": [cat, dog]})["anyOf"]] == [["kind"], ["kind"]]


def test_a_recursive_schema_keeps_its_references():
    tree = {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#"}}}}
    written = exact(tree)
    assert written["properties"]["below"]["items"] == {"$ref": "#/$defs/s0"}
    assert written["$defs"]["s0"]["properties"]["below"] == written["properties"]["below"]


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"type": "integer", "multipleOf": 7}, "multipleOf"),
        ({"type": "string", "pattern": "^[ab]+c", "allOf": [{"pattern": "^b"}]}, "pattern"),
        ({"type": "string", "format": "idn-hostname"}, "format"),
        ({"not": {"minimum": 3}}, "not"),
        ({"if": {"minLength": 3}, "else": False}, "if"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
        ({"patternProperties": {"a": {"type": "null"}, "b": {}}}, "patternProperties"),
        ({"minProperties": 2}, "minProperties"),
        ({"$dynamicRef": "#x"}, "$dynamicRef"),
        ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "minimum"),
        ({"type": "integer", "minimum": 2**60}, "minimum"),
        ({"properties": {"a": {"$id": "http://x/", "$ref": "#/b"}}}, "$id"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(schema, keyword):
    with pytest.raises(GrammarError) as caught:
        exact(schema)
    assert f"'{keyword}'" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "found", "not_found"),
    [
        ("a", ["a", "xay"], ["", "b"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("^(a+)+$", ["a" * 5000], ["a" * 5000 + "b"]),
        ("^[^a-c]{2,3}$", ["xy", "xyz"], ["xa", "x", "wxyz"]),
        (r"^\d\.\w$", ["1.x"], ["1xx", "1.é"]),
        (r"^\u00e9\u{1f600}\x41$", ["é😀A"], ["e😀A"]),
        ("^(?:ab|c)?$", ["", "ab", "c"], ["a", "abc"]),
        ("^.$", ["é", "😀"], ["\n", ""]),
    ],
)
def test_patterns(pattern, found, not_found):
    read = read_pattern(pattern, "x")
    assert all(map(read.found_in, found))
    assert not any(map(read.found_in, not_found))


@pytest.mark.parametrize(
    "pattern",
    [r"\bx", "(?=a)", "(?!a)", r"(a)\1", "a^b", "a$b", r"\p{Greek}", "a{2000}", "(", "[", "a**", "[]", "*"],
)
def test_patterns_that_cannot_be_held(pattern):
    with pytest.raises(GrammarError, match="pattern"):
        read_pattern(pattern, "x")


def test_a_length_beside_a_pattern():
    def pattern(text, **lengths):
        return exact({"type": "string", "pattern": text, **lengths})["pattern"]

    assert pattern("^[a-z]+$", maxLength=5) == "[a-z]{1,5}"
    assert pattern("^[a-z]{2,4}$", minLength=1, maxLength=9) == "[a-z]{2,4}"
    assert pattern("^[a-z]*x[0-9]*$", maxLength=5) == "[a-z]{0,2}[x][0-9]{0,2}"
    with pytest.raises(GrammarError, match="together"):
        pattern("^(ab)*$", minLength=3, maxLength=3)


def test_rules_are_mended():
    line = r'r_addl_key_1 ::= (("\"") | ("\\" basic_escape basic_string_sub) | ("b" x))'
    assert "basic_escape" not in mended(line)


def test_references_that_multiply_are_refused():
    twice = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)}
    with pytest.raises(GrammarError, match="too complex"):
        exact({"$ref": "#/$defs/d0", "$defs": {**twice, "d25": {"type": "string"}}})
