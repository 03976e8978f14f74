r"""`\p{..}` in patterns: Unicode's general categories."""

import json
import random

import pytest

from agentserve.executor.grammars import GrammarStore
from tests.category_patterns import HELD, kind
from tests.grammar_rig import BYTES, EOS, VOCAB, sources_of_bytes
from tools_bridge.compile_messages import MAX_COMPILED_CHARS
from tools_bridge.grammar import GrammarError, ResponseFormat, reply_grammar
from tools_bridge.json_schema.categories import of_category, unassigned
from tools_bridge.json_schema.patterns import read_pattern


@pytest.mark.parametrize(("pattern", "valid", "found", "other"), HELD)
def test_texts_are_told_by_category(pattern, valid, found, other):
    read = read_pattern(pattern, "s")
    assert all(map(read.found_in, found))
    assert all(map(valid, found))
    assert not any(map(read.found_in, other))
    store = _store(pattern)
    assert all(_takes(store, text) for text in found)
    assert not any(_takes(store, text) for text in other)


def _store(pattern):
    store = GrammarStore(BYTES, VOCAB, [EOS])
    source = reply_grammar(response=ResponseFormat("json_schema", {"type": "string", "pattern": pattern}))
    store.define("g", sources_of_bytes().compile(source))
    return store


def _takes(store, text):
    fold = store.start("g")
    return all(fold.push(byte) for byte in json.dumps(text, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "name", ["L", "LC", "Lu", "Letter", "M", "N", "P", "S", "Z", "Zs", "Sc", "Cc", "C", "Co"]
)
def test_a_category_is_what_unicodedata_says(name):
    ranges = of_category(name)
    short = {"Letter": "L", "LC": ("Lu", "Ll", "Lt")}.get(name, name)
    ends = [edge + step for low, high in ranges for edge in (low, high) for step in (-1, 0, 1)]
    codes = [*ends, *random.Random(name).sample(range(0x110000), 3000)]
    for code in codes:
        if 0 <= code < 0x110000 and kind(chr(code)) not in ("Cs", "Cn"):
            assert any(a <= code <= b for a, b in ranges) == kind(chr(code)).startswith(short), code
        else:
            assert not any(a <= code <= b for a, b in ranges)
    assert not read_pattern(r"^\P{L}$", "s").found_in(chr(unassigned()[0][0]))


@pytest.mark.parametrize(
    "name", ["Greek", "Script=Greek", "sc=Grek", "Emoji", "Cs", "Cn", "Extended_Pictographic", "", "Lx"]
)
def test_other_properties_are_refused_by_name(name):
    with pytest.raises(GrammarError, match=rf"names the property '{name}', which cannot be held"):
        read_pattern(rf"^\p{{{name}}}$", "s")
    with pytest.raises(GrammarError, match="names the property '', which"):
        read_pattern(r"\pL", "s")


def test_a_grammar_with_large_categories_is_not_too_large():
    said = {
        "type": ["null", "object"],
        "properties": {"a": {"type": "string", "pattern": r"\P{Ll}$"}},
        "additionalProperties": {"type": ["null", "number"], "exclusiveMinimum": 0},
    }
    grammar = sources_of_bytes().compile(reply_grammar(response=ResponseFormat("json_schema", said)))
    assert len(grammar) < MAX_COMPILED_CHARS
