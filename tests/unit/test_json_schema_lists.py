"""`uniqueItems` over items whose values are few."""

import itertools
import json

import jsonschema
import pytest

from agentserve.executor.grammars import GrammarStore
from tests.grammar_rig import BYTES, EOS, VOCAB, sources_of_bytes
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.json_schema import exact_schema, held_schema

COLOURS = {"enum": ["red", "green", "blue"]}
VALUES = [*COLOURS["enum"], "", True, False, None, 1, 2, 2.5, 7]


def unique(**said):
    return {"type": "array", "uniqueItems": True, **said}


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        (unique(items=COLOURS), 16),
        (unique(items={"type": "boolean"}), 5),
        (unique(items={"type": ["boolean", "null"]}), 16),
        (unique(items={"const": 1}), 2),
        (unique(items={"enum": [1, 1.0, 2]}), 5),
        (unique(items={"type": "integer", "minimum": 1, "exclusiveMaximum": 3}), 5),
        (unique(items={"anyOf": [COLOURS, {"type": "null"}]}, maxItems=2), 1 + 4 + 12),
        (unique(items=COLOURS, minItems=2), 12),
        (unique(items=COLOURS, minItems=1, maxItems=2), 9),
        (unique(items={"$ref": "#/$defs/c"}, minItems=3) | {"$defs": {"c": COLOURS}}, 6),
        (unique(items=COLOURS | {"not": {"const": "red"}}), 5),
        (unique(prefixItems=[COLOURS, {"type": "boolean"}], items=False), 1 + 3 + 6),
        (unique(prefixItems=[{"const": "red"}], items=COLOURS, minItems=2), 4),
        (unique(prefixItems=[{"enum": ["red", 7]}], items={"enum": ["red", 7]}), 5),
        (unique(items={"enum": list(range(6))}), 1957),
        (unique(items={"enum": [f"v{n}" for n in range(44)]}, maxItems=2), 1 + 44 + 44 * 43),
    ],
)
def test_all_lists_without_equal_items(schema, count):
    lists = exact_schema(schema, "s")["enum"]
    judge = jsonschema.Draft202012Validator(schema)
    assert len(lists) == count == len({json.dumps(said) for said in lists})
    assert all(map(judge.is_valid, lists))
    if count < 50:
        short = [list(said) for n in range(4) for said in itertools.product(VALUES, repeat=n)]
        assert sum(map(judge.is_valid, short)) == sum(len(said) < 4 for said in lists)


@pytest.mark.parametrize(
    "schema",
    [
        unique(),
        unique(items={"type": "string"}),
        unique(items={"type": "integer"}),
        unique(items={"type": "integer", "minimum": 0, "maximum": 10**6}),
        unique(items={"enum": list(range(7))}),
        unique(items={"enum": list(range(60))}, minItems=30, maxItems=30),
        unique(prefixItems=[COLOURS], minItems=2),
        unique(prefixItems=[{"type": "string"}], items=COLOURS),
        unique(items=unique(items={"type": "boolean"})),
    ],
)
def test_many_lists_are_refused(schema):
    with pytest.raises(GrammarError, match=r"^s: 'uniqueItems' cannot be held"):
        exact_schema(schema, "s")
    assert held_schema(schema, "s")[1] == ["s: 'uniqueItems'"]


def test_where_too_many_must_be_unlike_nothing_is_valid():
    with pytest.raises(GrammarError, match="no value is valid"):
        exact_schema(unique(items={"type": "boolean"}, minItems=3), "s")


def test_the_grammar_takes_them_and_no_others():
    store = GrammarStore(BYTES, VOCAB, [EOS])
    source = reply_grammar(
        response=ResponseFormat("json_schema", {"properties": {"a": unique(items=COLOURS)}})
    )
    store.define("g", sources_of_bytes().compile(source))

    def taken(value):
        fold = store.start("g")
        listed = json.dumps(value, separators=(",", ":"))  # as all values that are listed
        text = f'{{"a": {listed}}}'
        return all(fold.push(byte) for byte in text.encode())

    assert taken([])
    assert taken(["blue", "red", "green"])
    assert not taken(["blue", "blue"])
