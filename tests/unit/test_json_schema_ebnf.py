"""The mends against what xgrammar really prints: each is still needed, and still finds its place."""

import itertools
import json
import re

import pytest
import xgrammar

from tools_bridge.json_schema import exact_schema
from tools_bridge.json_schema.ebnf import MENDS, mended

SCHEMAS = {
    "patterns": ("json", {"a": {"type": "string", "pattern": "^(xxy*)?$"}}),
    "names": ("json", {"a": {"type": "null"}}),
    "values": ("qwen_xml", {"a": {"enum": ["x"]}}),
    "exponents": ("json", {"a": {"type": "number"}}),
    "characters": ("json", {"a": {"type": "string", "maxLength": 2}}),
}


def printed(style, properties, **more):
    schema = exact_schema({"type": "object", "properties": properties, "required": ["a"], **more}, "x")
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    if style != "json":
        form["style"] = style
    tag = {"type": "structural_tag", "format": form}
    return str(xgrammar.Grammar.from_structural_tag(json.dumps(tag)))


@pytest.mark.parametrize("name", MENDS)
def test_each_mend_changes_what_xgrammar_prints(name):
    style, properties = SCHEMAS[name]
    rules = printed(style, properties, additionalProperties={"type": "null"} if name == "names" else False)
    assert MENDS[name](rules) != rules
    assert xgrammar.Grammar.from_ebnf(mended(rules))


@pytest.mark.parametrize("style", ["json", "gemma"])
@pytest.mark.parametrize(
    "pattern", ["(x{2}y*)?", "(y*xx)?", "z(y*x(yz*)?)?z", "(x|(y{2}z*)?){1,2}", "((xy*)?z)*", "(xy*){0,2}"]
)
def test_patterns_with_optional_parts(style, pattern):
    info = xgrammar.TokenizerInfo([bytes([n]) for n in range(128)] + [b""], stop_token_ids=[128])
    rules = mended(printed(style, {"a": {"type": "string", "pattern": f"^{pattern}$"}}))
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(
        xgrammar.Grammar.from_ebnf(rules)
    )
    around = '{"a": "%s"}' if style == "json" else '{a:<|"|>%s<|"|>}'
    for count in range(5):
        for word in map("".join, itertools.product("xyz", repeat=count)):
            taken = xgrammar.GrammarMatcher(compiled).accept_string(around % word)
            assert taken == bool(re.fullmatch(pattern, word)), word
