"""The mends against what xgrammar really prints: each is still needed, and still finds its place."""

import itertools
import json
import re

import pytest
import xgrammar

from tools_bridge.json_schema import MARKS, exact_schema
from tools_bridge.json_schema.ebnf import MENDS, mended, rules_of

SCHEMAS = {
    "names": ("json", {"a": {"type": "null"}}),
    "values": ("qwen_xml", {"a": {"enum": ["x"]}}),
    "exponents": ("json", {"a": {"type": "number"}}),
    "characters": ("json", {"a": {"type": "string", "maxLength": 2}}),
    "escapes": ("json", {"a": {"type": "string"}}),
    "escapes apart": ("glm_xml", {"a": {"type": "string"}}),
}


def source(style, properties, **more):
    schema = exact_schema({"type": "object", "properties": properties, "required": ["a"], **more}, "x")
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    if style != "json":
        form["style"] = style
        if style != "gemma":
            form["excludes"] = list(MARKS[style])
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)


def xgrammars(tag):
    return str(xgrammar.Grammar.from_structural_tag(tag))


@pytest.mark.parametrize("name", MENDS)
def test_each_mend_changes_what_xgrammar_prints(name):
    style, properties = SCHEMAS[name]
    rest = {"type": "null"} if name == "names" else False
    rules = xgrammars(source(style, properties, additionalProperties=rest))
    assert MENDS[name](rules) != rules
    assert xgrammar.Grammar.from_ebnf(mended(rules))


@pytest.mark.parametrize("style", ["json", "gemma", "qwen_xml"])
@pytest.mark.parametrize(
    "pattern", ["(x{2}y*)?", "(y*xx)?", "z(y*x(yz*)?)?z", "(x|(y{2}z*)?){1,2}", "((xy*)?z)*", "(xy*){0,2}"]
)
def test_patterns_with_optional_parts(style, pattern):
    info = xgrammar.TokenizerInfo([bytes([n]) for n in range(128)] + [b""], stop_token_ids=[128])
    part = {"type": "string", "pattern": f"^{pattern}$"}
    rules = rules_of(source(style, {"a": part}), xgrammars)
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(
        xgrammar.Grammar.from_ebnf(rules)
    )
    around = {"json": '{"a": "%s"}', "gemma": '{a:<|"|>%s<|"|>}', "qwen_xml": "<parameter=a>%s</parameter>"}
    for count in range(5):
        for word in map("".join, itertools.product("xyz", repeat=count)):
            taken = xgrammar.GrammarMatcher(compiled).accept_string(around[style] % word)
            assert taken == bool(re.fullmatch(pattern, word)), word


STYLES = ["json", "gemma", "qwen_xml", "glm_xml", "deepseek_xml", "deepseek_v4_1_xml", "kimi_k3_xml"]
AROUND = {
    "json": '{"a": %s}',
    "gemma": "{a:%s}",
    "qwen_xml": "<parameter=a>%s</parameter>",
    "glm_xml": "<arg_key>a</arg_key><arg_value>%s</arg_value>",
    "deepseek_xml": '<｜DSML｜parameter name="a" string="{text}">%s</｜DSML｜parameter>',
    "deepseek_v4_1_xml": '<｜DSML｜ parameter name="a" string="{text}">%s</｜DSML｜ parameter>',
    "kimi_k3_xml": '<|open|>argument key="a" type="{kind}"<|sep|>%s<|close|>argument<|sep|>',
}


def written(value):
    return json.dumps(value, ensure_ascii=False)


def taken(style, part, *values):
    """Which of `values`, as they are written, argument `a` may have."""
    info = xgrammar.TokenizerInfo([bytes([n]) for n in range(256)] + [b""], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info, cache_enabled=False).compile_grammar(
        xgrammar.Grammar.from_ebnf(rules_of(source(style, {"a": part}), xgrammars))
    )
    kind = part.get("type", "string")
    around = AROUND[style].replace("{text}", str(kind == "string").lower()).replace("{kind}", kind)
    return [xgrammar.GrammarMatcher(compiled).accept_string(around % value) for value in values]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        ('"x"', '"x"', "x"),
        (r"a\\b", r"a\b", "a\b"),
        (r"C:\\temp", r"C:\temp", "C:\temp"),
        (r"\\u0041", r"\u0041", "A"),
        ("[\"']+", "\"'", "'x"),
        ("é😀?", "é", "è"),
    ],
)
def test_what_a_pattern_matches_is_written_as_the_style_has_it(style, pattern, text, other):
    part = {"type": "string", "pattern": f"^{pattern}$"}
    bare = {"json": written, "gemma": '<|"|>{}<|"|>'.format}.get(style, str)
    wrong = f'"{text}"' if style == "json" and text[0] in '"aC\\' else bare(other)
    assert taken(style, part, bare(text), bare(other), wrong) == [True, False, False]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "gemma"])
def test_patterns_of_names_and_within_values_are_escaped(style):
    names = {
        "type": "object",
        "patternProperties": {'^"x"$': {"type": "array", "items": {"pattern": r"^a\\b$", "type": "string"}}},
    }
    good, bad = r'{"\"x\"":["a\\b"]}', [r'{""x"":[]}', r'{"\"x\"":["a\b"]}']
    assert taken(style, names, good, *bad) == [True, False, False]


@pytest.mark.parametrize("style", STYLES)
def test_no_number_is_infinity(style):
    assert taken(style, {"type": "number"}, "1e99", "-2.5E-07", "1e999") == [True, True, False]
    assert taken(style, {"type": "array", "items": {"type": "number"}}, "[1e9]", "[1e999]") == [True, False]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "gemma"])
def test_no_escape_is_half_a_character(style):
    texts = [r"\u00e9", r"\uD7ff", r"\ud83d\ude00", r"\ud800", r"\ud83dx", r"\ude00\ud83d", r"\ud83d\u0041"]
    part = {"type": "array", "items": {"type": "string"}}
    good, bad = [True] * 3, [False] * 4
    assert taken(style, part, *(f'["{text}"]' for text in texts)) == good + bad
    free = {"type": "object", "additionalProperties": {"type": "null"}}
    assert taken(style, free, *(f'{{"{text}":null}}' for text in texts)) == good + bad


def test_what_a_client_lists_is_not_mended():
    texts = ["[eE] basic_number_4 basic_number_digits{1, -1}", '[^"\\\r\n]', "\U000f0000", r"\U000f0001"]
    assert taken("json", {"enum": texts}, *map(written, texts)) == [True] * 4
    assert taken("glm_xml", {"enum": texts}, *texts) == [True] * 4
    both = {"type": "array", "items": {"anyOf": [{"enum": texts}, {"type": "string", "pattern": "^a$"}]}}
    assert taken("json", both, '["\U000f0000","a"]', '["\U000f0002"]') == [True, False]
    keyword = {"type": "object", "properties": {"pattern": {"enum": [{"pattern": "a"}]}}}
    assert taken("json", keyword, '{"pattern":{"pattern":"a"}}') == [True]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "gemma"])
def test_no_other_name_spells_a_known_one(style):
    known = {"kind": {"type": "integer"}}
    part = {"type": "object", "properties": known, "additionalProperties": {"type": "string"}}
    assert taken(style, part, '{"kind":1,"kin":"x","kinds":"y"}', '{"<":"x"}', '{"":"x"}') == [True] * 3
    bad = ['{"kind":"x"}', r'{"\u006bind":"x"}', r'{"kin\u0064":"x"}', r'{"ki\u006ed":"x"}']
    assert taken(style, part, *bad) == [False] * 4


def test_any_object_may_be_referred_to():
    schema = {"$ref": "#/properties/a/$defs/m", "$defs": {"m": {"type": "object", "properties": {}}}}
    schema["$defs"]["m"]["additionalProperties"] = True
    assert taken("json", schema, '{"b":1}', "{}", "[]") == [True, True, False]


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"pattern": "^[^A-Z]*$"}, [r'"a\n\"\\b"', '""'], ['"A"', '"\n"', r'"\x"']),
        ({"minLength": 2}, [r'"\"\n"', '"ab"'], [r'"\n"', '"a"']),
        ({"pattern": r"^\s*(\d*\.?\d+)\s*(\w+)?"}, ['"1.5 GB"', '" .5"'], ['"GB"', '"."']),
    ],
)
def test_strings_are_written_with_escapes(part, good, bad):
    whole = [True] * len(good) + [False] * len(bad)
    assert taken("json", {"type": "string", **part}, *good, *bad) == whole
