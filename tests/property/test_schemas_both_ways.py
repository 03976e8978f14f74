"""Schemas as frameworks write them: what is drawn under a grammar is valid, and what is valid may be written.

What the README says is narrower is left out: properties come in order, strings of a bounded length have no
escapes, formats and numbers are plain ones.
"""

import json
import random
from collections import Counter

import jsonschema
import numpy as np
import pytest

from agentserve.executor.grammars import GrammarStore
from tests.framework_maker import Maker
from tests.grammar_rig import BYTES, EOS, VOCAB, sources_of_bytes
from tests.schema_rig import Drawer
from tools_bridge.grammar import ResponseFormat, reply_grammar
from tools_bridge.source_compiler import Uncompilable

SEPARATORS = [(", ", ": "), (",", ":"), (" , ", " : ")]


@pytest.fixture(scope="module")
def world():
    return sources_of_bytes(), Drawer([*BYTES, *[b""] * (VOCAB - len(BYTES))], EOS)


def _check(world, seed, counts):
    compiler, drawer = world
    schema, make = Maker(seed).document()
    validator = jsonschema.Draft202012Validator
    judge = validator(schema, format_checker=validator.FORMAT_CHECKER)
    store = GrammarStore(BYTES, VOCAB, [EOS])
    try:
        grammar = compiler.compile(reply_grammar(response=ResponseFormat("json_schema", schema)))
    except Uncompilable:  # of more than 8 million characters
        counts["too large"] += 1
        return
    store.define("g", grammar)
    for draw in range(2):
        text = drawer.text(store.start("g"), np.random.default_rng(10 * seed + draw))
        if text is not None:
            assert not list(judge.iter_errors(json.loads(text))), (seed, schema, text)
            counts["drawn"] += 1
    rng = random.Random(seed)
    for _ in range(4):
        value = make(0)
        if not judge.is_valid(value):  # two of its parts speak of one name
            counts["of no use"] += 1
            continue
        text = json.dumps(value, ensure_ascii=False, separators=rng.choice(SEPARATORS))
        fold = store.start("g")
        taken = all(fold.push(byte) for byte in text.encode())
        assert taken, (seed, schema, text)
        assert fold.over or EOS in fold.allowed(), (seed, schema, text)
        counts["taken"] += 1


def test_what_frameworks_write_is_held_and_no_more(world):
    counts = Counter()
    for seed in range(60):
        _check(world, seed, counts)
    assert counts["taken"] > 180
    assert counts["drawn"] > 70
    assert counts["of no use"] < 10
    assert counts["too large"] < 5


@pytest.mark.prove
def test_much_that_frameworks_write_is_held_and_no_more(world):
    counts = Counter()
    for seed in range(10_000, 12_000):
        _check(world, seed, counts)
    assert counts["taken"] > 7000
