"""JSON schemas in structural tags of clients: held like those of other forms, or refused by name."""

import json

import pytest

from tests.grammar_rig import CITY, REQUIRED
from tests.schema_maker import made
from tests.schema_rig import SUITE, suite
from tools_bridge.call_syntax import GLM, KIMI_K3, QWEN_XML, ReplySyntax
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.types import ToolSpec


def content(schema, **fields):
    return {"type": "json_schema", "json_schema": schema, **fields}


def tagged(form):
    return reply_grammar(
        response=ResponseFormat("structural_tag", {"type": "structural_tag", "format": form})
    )


def written(form):
    return json.loads(tagged(form).text)["format"]


def answered(schema):
    return json.loads(reply_grammar(response=ResponseFormat("json_schema", schema)).text)["format"]


def outcome(make, schema, place):
    """What is held, or why not, without the place."""
    try:
        return make(schema)
    except GrammarError as error:
        return str(error).replace(place, "<place>").partition(": drop it")[0]


def test_a_schema_in_a_tag_is_held_like_an_answers():
    found = list(suite().values()) if SUITE.exists() else []
    schemas = [*found[::2], *made(200).values()]
    refused = []
    for schema in schemas:
        wanted = schema if isinstance(schema, dict) else {"allOf": [schema]}
        inside = outcome(lambda s: written(content(s)), wanted, "structural_tag.format.json_schema")
        alone = outcome(answered, wanted, "response_format.json_schema.schema")
        if isinstance(inside, dict):
            assert inside.pop("style") == "json"
        else:
            refused.append(inside)
        assert inside == alone, schema
    assert 20 < len(refused) < len(schemas) / 2
    assert all(told.startswith("<place>") for told in refused)


ODD = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "integer"}}}}
TAG = {"type": "tag", "begin": "<f>", "content": content(ODD), "end": "</f>"}


@pytest.mark.parametrize(
    ("form", "place"),
    [
        (content(ODD), ""),
        ({"json_schema": ODD}, ""),
        ({"type": "sequence", "elements": [{"type": "any_text"}, content(ODD)]}, ".elements[1]"),
        ({"type": "or", "elements": [TAG]}, ".elements[0].content"),
        ({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}, ".tags[0].content"),
        ({"type": "tags_with_separator", "tags": [TAG, TAG], "separator": ","}, ".tags[0].content"),
        ({"type": "token_triggered_tags", "trigger_tokens": [60], "tags": [TAG]}, ".tags[0].content"),
        ({"type": "dispatch", "rules": [["<f>", content(ODD)]]}, ".rules[0][1]"),
        ({"type": "plus", "content": {"type": "star", "content": content(ODD)}}, ".content.content"),
    ],
)
def test_a_schema_that_cannot_be_held_is_refused_with_its_place(form, place):
    with pytest.raises(GrammarError) as caught:
        tagged(form)
    why = "properties.a: 'contains' cannot be held: drop it from the schema"
    assert str(caught.value) == f"structural_tag.format{place}.json_schema.{why}"


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (content({"type": "object"}, style="cohere_xml"), r"format\.style: .*'cohere_xml' cannot be held"),
        (content({"type": "object"}, style=["json"]), r"format\.style: "),
        (content({"type": "object"}, any_order=True), r"format\.any_order: "),
        (content({"type": "string", "maxLength": 3}, excludes=["b"]), r"format\.excludes: .*'maxLength'"),
        (
            content({"properties": {"enum": {"pattern": "^a"}}}, excludes=["b"]),
            r"format\.excludes: .*'pattern'",
        ),
        (content(False), r"format\.json_schema: .*cannot be met"),
        (content("integer"), r"format\.json_schema: a JSON schema must be an object"),
        (content(ODD, style="qwen_xml"), r"format\.json_schema\.properties\.a: 'contains'"),
        (
            {"type": "qwen_xml_parameter", "json_schema": ODD},
            r"format\.json_schema\.properties\.a: 'contains'",
        ),
        (content({"type": "string"}, style="glm_xml"), r"format\.json_schema: alternatives"),
    ],
)
def test_what_would_make_a_schema_say_less_is_refused(form, why):
    with pytest.raises(GrammarError, match=rf"^structural_tag\.{why}"):
        tagged(form)


@pytest.mark.parametrize("calls", [QWEN_XML, GLM, KIMI_K3])
def test_other_styles_are_held_like_a_tools_arguments(calls):
    schema = {
        "properties": {"n": {"type": "integer"}, "t": {"type": "string", "maxLength": 9}},
        "required": ["t"],
    }
    tool = ToolSpec("f", {"type": "object"} | schema, strict=True)
    call = json.loads(reply_grammar([tool], REQUIRED, syntax=ReplySyntax(calls)).text)
    assert written(content(schema, style=calls.style)) in _contents(call["format"])


def _contents(form):
    if isinstance(form, list):
        return [found for part in form for found in _contents(part)]
    if not isinstance(form, dict):
        return []
    return [form] if form.get("type") == "json_schema" else _contents(list(form.values()))


def test_what_the_client_says_beside_a_schema_is_kept():
    held = written(content({"type": "string"}, max_whitespace_cnt=0, excludes=["\n"]))
    assert held["max_whitespace_cnt"] == 0
    assert held["excludes"] == ["\n"]
    assert written({"type": "const_string", "value": "a", "json_schema": ODD}) == {
        "type": "const_string",
        "value": "a",
    }
    assert written(content(True)) == written(content({}))


def test_each_schema_of_a_tag_is_tried_by_itself_under_its_place():
    form = {"type": "sequence", "elements": [content(CITY), {"type": "or", "elements": [content(True)]}]}
    parts = tagged(form).parts
    place = "structural_tag.format.elements"
    assert [where for where, _ in parts] == [
        f"{place}[0].json_schema",
        f"{place}[1].elements[0].json_schema",
        "structural_tag",
    ]
    assert json.loads(parts[0][1])["format"] == answered(CITY) | {"style": "json"}
