"""Schemas that were let through wrongly, refused wrongly, or took too long."""

import json

import pytest

from tests.grammar_rig import sources_of_bytes
from tests.schema_rig import validator
from tools_bridge.grammar import ToolChoice, reply_grammar
from tools_bridge.json_schema import exact_schema, pruning
from tools_bridge.json_schema.patterns import read_pattern
from tools_bridge.registry import reply_form
from tools_bridge.schemas import GrammarError
from tools_bridge.types import ToolSpec

OBJECT = {"type": "object"}


def exact(schema):
    return exact_schema(schema, "schema")


def allows(schema, value):
    """Whether the written schema does."""
    return validator(exact(schema)).is_valid(value)


@pytest.mark.parametrize("items", [False, True])
def test_nested_objects_are_each_looked_at_once(monkeypatch, items):
    schema = {"type": "string"}
    for _ in range(30):
        schema = {**OBJECT, "properties": {"a": schema}, "required": ["a"]}
        if items:
            schema = {"type": "array", "items": schema, "minItems": 1}
    looked = []
    kept = pruning.Living._looked
    monkeypatch.setattr(pruning.Living, "_looked", lambda self, part: looked.append(1) or kept(self, part))
    assert validator(exact(schema)) is not None
    assert len(looked) < 500


@pytest.mark.parametrize("inner", ["a", "a?", "a{0,1000}", "a|b", "(a|)"])
@pytest.mark.parametrize("text", ["b", "a" * 40, "a" * 40 + "c"])
def test_counted_repetitions_nest(inner, text):
    pattern = read_pattern(f"^(((({inner}){{1000}}){{1000}}){{1000}})$", "x")
    assert pattern.found_in(text) == (inner != "a" and inner != "a|b" and set(text) == {"a"})


def test_a_merge_costs_what_it_merges():
    branches = [
        {**OBJECT, "properties": {f"p{n}": {"minimum": 0} for n in range(200)}, "required": ["p0"]}
        for _ in range(16)
    ]
    with pytest.raises(GrammarError, match=r"overlap|complex"):
        exact({"oneOf": branches})
    wide = {**OBJECT, "properties": {f"p{n}": {"minLength": n} for n in range(400)}}
    with pytest.raises(GrammarError, match="complex"):
        exact({"allOf": [{"anyOf": [{"required": [n]} for n in "abcdefghijk"]}, *[wide] * 30]})


def test_a_property_may_be_called_enum():
    node = {**OBJECT, "properties": {"next": {"$ref": "#/$defs/x"}}}
    written = exact(
        {**OBJECT, "properties": {"enum": {"$ref": "#/$defs/x"}}, "required": ["enum"], "$defs": {"x": node}}
    )
    assert "s0" in written["$defs"]


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "properties": {"a": {**OBJECT, "dependentSchemas": {"x": {"$ref": "#"}}}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            **OBJECT,
            "properties": {"a": {**OBJECT, "dependencies": {"x": {"$ref": "#"}}}},
        },
    ],
)
def test_a_dependency_may_be_recursive(schema):
    assert allows(schema, {"a": {}})


def test_no_schema_is_too_deep_for_a_message(monkeypatch):
    def deep(self):
        raise RecursionError

    monkeypatch.setattr("tools_bridge.json_schema.exact._Writer._all", deep)
    with pytest.raises(GrammarError, match="schema: the schema is too deep"):
        exact({})


def test_names_that_a_property_may_not_have():
    def takes(names, name):
        (written,) = exact({**OBJECT, "propertyNames": names})["patternProperties"]
        return read_pattern(f"^({written})$", "x", ours=True).found_in(name)

    assert not takes({"not": {"enum": [""]}}, "")
    assert takes({"not": {"enum": [""]}}, "a")
    assert takes({"pattern": "^b", "not": {"const": "a"}}, "ba")
    with pytest.raises(GrammarError, match="'propertyNames'"):
        exact({**OBJECT, "propertyNames": {"not": {"const": "a"}}})


def test_a_oneof_in_a_oneof_counts_by_all_that_it_allows():
    def branch(value, *required):
        properties = {"k": {"const": value}} | {name: {"type": "integer"} for name in required if name != "k"}
        return {**OBJECT, "properties": properties, "required": list(required)}

    inner = {"oneOf": [{**OBJECT, "properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]}
    schema = {"oneOf": [branch(1, "k", "z"), inner]}
    with pytest.raises(GrammarError, match="overlap"):
        exact(schema)
    apart = {"oneOf": [branch(3, "k", "z"), inner]}
    assert allows(apart, {"k": 3, "z": 62})


def test_contains_counts_by_all_that_is_allowed():
    schema = {"enum": [[1, 1], []], "contains": {"oneOf": [{"type": "integer"}, {"const": "a"}]}}
    assert not allows({**schema, "minContains": 0, "maxContains": 1}, [1, 1])
    told = {
        "oneOf": [
            {"properties": {"k": {"const": 1}}, **OBJECT},
            {"properties": {"k": {"const": 2}}, **OBJECT},
        ]
    }
    listed = {"enum": [[{"k": 1, "x": 1}, {"k": 1, "x": 2}], []]}
    assert not allows({**listed, "contains": told, "minContains": 0, "maxContains": 1}, listed["enum"][0])


def test_patterns_of_names_are_no_proof():
    schema = {
        "oneOf": [
            {**OBJECT, "patternProperties": {"^a": {"type": "integer"}}, "required": ["a"]},
            {
                **OBJECT,
                "patternProperties": {"a$": {"type": "integer"}},
                "additionalProperties": False,
                "required": ["a"],
            },
        ]
    }
    with pytest.raises(GrammarError, match="overlap"):
        exact(schema)


COMMON = {
    **OBJECT,
    "properties": {"id": {"type": "string"}, "kind": {"enum": ["a", "b"]}},
    "required": ["id", "kind"],
}
A = {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["x"]}
B = {"properties": {"kind": {"const": "b"}, "y": {"type": "integer"}}, "required": ["y"]}


@pytest.mark.parametrize("typed", [{}, OBJECT])
@pytest.mark.parametrize("around", ["beside", "allOf", "ref"])
def test_branches_beside_what_they_have_in_common(typed, around):
    one = {"oneOf": [{**typed, **A}, {**typed, **B}]}
    schema = {
        "beside": {**COMMON, **one},
        "allOf": {"allOf": [one, COMMON]},
        "ref": {"allOf": [{"$ref": "#/$defs/one"}], **COMMON, "$defs": {"one": one}},
    }[around]
    for value in ({"id": "i", "kind": "a", "x": 1}, {"id": "i", "kind": "b", "y": 1}):
        assert allows(schema, value)
    for value in ({"id": "i", "kind": "a", "y": 1}, {"kind": "a", "x": 1}, {"id": "i", "kind": "a"}):
        assert not allows(schema, value)


def test_exactly_one_of_two_names():
    schema = {
        **OBJECT,
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    assert allows(schema, {"a": ""})
    assert allows(schema, {"b": ""})
    assert not allows(schema, {"a": "", "b": ""})
    assert not allows(schema, {})


def test_a_hundred_branches_that_a_word_tells_apart():
    branches = [
        {**OBJECT, "properties": {"kind": {"const": f"k{n}"}, **{f"p{m}": {} for m in range(9)}}}
        for n in range(120)
    ]
    assert len(exact({"oneOf": branches})["anyOf"]) == 120


def test_names_are_matched_with_every_character():
    for name, pattern in (("x\ny", "y"), ("é", r"^\W$"), ("\ufeff", r"\s")):
        written = exact(
            {
                **OBJECT,
                "properties": {name: {"type": "string"}},
                "patternProperties": {pattern: {"type": "integer"}},
            }
        )
        assert not validator(written).is_valid({name: "a"}), name
    assert "\\u{0}" not in exact({"type": "string", "pattern": "a"})["pattern"]


def test_listed_values_beside_a_format():
    assert exact({"format": "date", "enum": ["abc", "2024-02-29", 5]}) == {"enum": ["2024-02-29", 5]}
    with pytest.raises(GrammarError, match="no value is valid"):
        exact({"type": "string", "format": "date", "enum": ["abc"]})
    assert exact({"format": "uri", "enum": ["http://a/"]}) == {"enum": ["http://a/"]}
    for form, value in (("uri", "http://a:12345/"), ("regex", "a")):
        with pytest.raises(GrammarError, match="'format'"):
            exact({"format": form, "enum": [value]})


def test_written_schemas_are_json():
    assert json.loads(json.dumps(exact({**COMMON, "oneOf": [A, B]})))


def test_branches_without_a_type():
    branches = [{"properties": {"k": {"const": value}}, "required": ["k"]} for value in "ab"]
    assert allows({"oneOf": branches}, {"k": "a"})
    assert not allows({"oneOf": branches}, "a")


def test_const_is_no_keyword_of_draft_4():
    branches = [{"type": "object", "properties": {"k": {"const": value}}} for value in "ab"]
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": branches}
    with pytest.raises(GrammarError, match="overlap"):
        exact(schema)


def test_a_oneof_that_is_its_own_branch():
    schema = {"$ref": "#/$defs/x", "$defs": {"x": {"oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}}
    with pytest.raises(GrammarError, match="refers to itself"):
        exact(schema)


def test_patterns_made_to_be_slow_come_to_an_end():
    schema = {"enum": ["a" * 4000 + "b" + str(n) for n in range(100)], "pattern": "^(a*b?a*)*(a|aa)*$"}
    with pytest.raises(GrammarError, match=r"^schema: a pattern takes too long"):
        exact(schema)


@pytest.mark.parametrize(
    "part", [{"format": "uri"}, {"format": "email"}, {"pattern": "^([a-z]{0,60}x){0,3}$"}]
)
def test_gemma_has_large_patterns(part):
    schema = {**OBJECT, "properties": {"a": {"type": "string", **part}}, "required": ["a"]}
    syntax = reply_form("", "gemma4").syntax
    made = reply_grammar([ToolSpec("f", schema, strict=True)], ToolChoice("required"), syntax=syntax)
    assert '"pattern"' in made.text
    assert sources_of_bytes().compile(made)
