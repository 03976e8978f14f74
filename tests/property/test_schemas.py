"""JSON schemas, a thousand and more: what is drawn under a schema's grammar is valid for it, or the schema is
refused by name. And tool calls in every family's form, whole and cut anywhere."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from agentserve.executor.grammars import GrammarStore
from tests.category_patterns import HELD
from tests.grammar_rig import BYTES, EOS, VOCAB
from tests.reply_rig import read
from tests.schema_maker import Maker, made
from tests.schema_rig import SUITE, Drawer, suite, validator
from tests.smollm2_vocabulary import smollm2_vocabulary
from tools_bridge.grammar import GrammarError, ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.registry import FAMILIES, reply_form
from tools_bridge.source_compiler import SourceCompiler
from tools_bridge.types import ToolSpec

NEEDS_SUITE = pytest.mark.skipif(not SUITE.exists(), reason=f"no {SUITE}; `make setup` fetches it")
NAMES = [family.name for family in FAMILIES if family.name != "llama4"]  # its lists cannot be held
MARKS = [
    "</parameter>\n",
    "</parameter>",
    "</arg_value>",
    "</tool_call>",
    "</function>\n",
    '<|"|>',
    "<tool_call|>",
]
MARKS += ["</｜DSML｜parameter>", "</｜DSML｜ parameter>", "</｜DSML｜invoke>\n", "<|close|>argument<|sep|>"]


class World:
    """A vocabulary, and grammars over it."""

    def __init__(self, data, eos, size, marks=()):
        self._compiler = SourceCompiler(data, size, [eos])
        self._store = GrammarStore(data, size, [eos])
        padded = [*data, *[b""] * (size - len(data))]
        self.drawer = Drawer(padded, eos, [token for token, piece in enumerate(padded) if piece in marks])

    def define(self, source):
        self._store.define("g", self._compiler.compile(source))

    def start(self):
        return self._store.start("g")


def check(world, schemas, draws):
    """How many were accepted, refused, drawn, and came to no end."""
    counts = Counter()
    for place, schema in schemas.items():
        wanted = schema if isinstance(schema, dict) else {"allOf": [schema]}
        try:
            source = reply_grammar(response=ResponseFormat("json_schema", wanted))
        except GrammarError as error:  # before anything runs, and it says where
            counts["refused"] += str(error).startswith("response_format.json_schema.schema")
            continue
        world.define(source)  # none of these is too large
        counts["accepted"] += 1
        judge = validator(schema)
        for seed in range(draws):
            text = world.drawer.text(world.start(), np.random.default_rng(seed))
            if text is None:
                counts["endless"] += 1
                continue
            value = json.loads(text)
            counts["drawn"] += 1
            if judge is not None:
                problems = [problem.message for problem in judge.iter_errors(value)]
                assert not problems, (place, schema, text, problems[:3])
    assert counts["accepted"] + counts["refused"] == len(schemas)
    return counts


@pytest.fixture(scope="module")
def bytes_world():
    return World(BYTES, EOS, VOCAB)


@pytest.fixture(scope="module")
def smollm2():
    data, eos = smollm2_vocabulary()
    return World(data, eos, len(data))


@NEEDS_SUITE
def test_the_whole_test_suite(bytes_world):
    counts = check(bytes_world, suite(), 2)
    assert counts["accepted"] + counts["refused"] == 1160
    assert counts["accepted"] >= 750
    assert counts["endless"] < 0.05 * counts["drawn"]


def test_schemas_with_every_keyword(bytes_world):
    counts = check(bytes_world, made(400), 2)
    assert counts["accepted"] > 250
    assert counts["endless"] < 0.05 * counts["drawn"]


def test_without_strict_schemas_are_taken_and_held_by_the_letter_where_they_can_be():
    counts = Counter()
    for schema in made(400).values():
        wanted = schema if isinstance(schema, dict) else {"allOf": [schema]}
        loose = reply_grammar(response=ResponseFormat("json_schema", wanted, strict=False))
        try:
            strict = reply_grammar(response=ResponseFormat("json_schema", wanted, strict=True))
        except GrammarError:
            counts["loosened"] += 1
            assert loose.left_out, schema
        else:
            counts["held"] += 1
            assert (loose.text, loose.left_out) == (strict.text, ()), schema
    assert min(counts["loosened"], counts["held"]) > 50


@pytest.mark.model
def test_a_real_vocabulary(smollm2):
    picked = dict(random.Random(5).sample(sorted(suite().items()), 20)) if SUITE.exists() else {}
    counts = check(smollm2, picked | made(20, 10_000), 1)
    assert counts["accepted"] > 10


@pytest.mark.model
def test_what_a_real_vocabulary_draws_is_of_the_patterns_categories(smollm2):
    drawn = 0
    for pattern, valid, *_ in HELD[:6:2]:
        schema = {"type": "string", "pattern": pattern}
        smollm2.define(reply_grammar(response=ResponseFormat("json_schema", schema)))
        for seed in range(3):
            text = smollm2.drawer.text(smollm2.start(), np.random.default_rng(seed))
            if text is not None:
                assert valid(json.loads(text)), (pattern, text)
                drawn += 1
    assert drawn > 3


@pytest.mark.prove
@pytest.mark.model
@NEEDS_SUITE
def test_all_of_them_with_a_real_vocabulary(smollm2):
    counts = check(smollm2, suite(), 3)
    assert counts["accepted"] >= 750
    counts = check(smollm2, made(1000, 20_000), 3)
    assert counts["accepted"] > 700


@pytest.mark.prove
def test_many_made_schemas(bytes_world):
    assert check(bytes_world, made(10_000, 30_000), 4)["accepted"] > 7000


def _parameters(count, first):
    return [Maker(seed).parameters() for seed in range(first, first + count)]


@pytest.fixture(scope="module")
def marks_world():
    data = [*BYTES, b"", *(mark.encode() for mark in MARKS)]
    return World(data, EOS, len(data), [mark.encode() for mark in MARKS])


def _twice(text):
    """Whether some object in the JSON has a name twice."""
    found = []

    def look(pairs):
        found.append(len({name for name, _ in pairs}) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return any(found)


def _check_family(world, name, schemas, draws, rng):
    form = reply_form("", name)
    counts = Counter()
    refusals = []
    for schema in schemas:
        tool = ToolSpec("f", schema, strict=True)
        try:
            world.define(reply_grammar([tool], ToolChoice("required"), parallel=False, syntax=form.syntax))
        except GrammarError as error:
            refusals.append(str(error))
            continue
        counts["accepted"] += 1
        judge = validator(schema)
        for seed in range(draws):
            tokens, ended = world.drawer.tokens(world.start(), np.random.default_rng(seed))
            text = world.drawer.written(tokens)
            if ended:
                parsed = read(form.parser([tool]), [text])
                if parsed.calls[0].error == "malformed" and not schema.get("properties"):
                    # No grammar can say that a name which is free comes once.
                    assert form.syntax.calls.style != "json" or _twice(parsed.calls[0].arguments), text
                    counts["twice"] += 1
                    continue
                assert [call.complete for call in parsed.calls] == [True], (schema, text, parsed)
                value = json.loads(parsed.calls[0].arguments)
                problems = [problem.message for problem in judge.iter_errors(value)] if judge else []
                assert not problems, (schema, text, value, problems[:3])
                counts["drawn"] += 1
            for _ in range(4):  # cut by a budget of tokens: no call that is told as whole is none
                part = world.drawer.written(tokens[: rng.randrange(len(tokens))])
                for call in read(form.parser([tool]), [part], cut=True).calls:
                    if call.complete:
                        assert not (judge and list(judge.iter_errors(json.loads(call.arguments)))), part
                    counts["cut"] += 1
    assert [told for told in refusals if not told.startswith(("tools.f.parameters", "the schema"))] == []
    return counts


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_is_valid_or_told_as_cut(marks_world, name):
    counts = _check_family(marks_world, name, _parameters(16, 0), 2, random.Random(name))
    assert counts["accepted"] >= 4
    assert counts["drawn"] > counts["accepted"]


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_many_forced_calls(marks_world, name):
    counts = _check_family(marks_world, name, _parameters(500, 1000), 3, random.Random(name))
    assert counts["accepted"] >= 125
    assert counts["drawn"] > counts["accepted"]
