"""Grammars in a worker: how many are in memory, and one that takes too long for a token."""

from array import array

import pytest

from agentserve.core.plan import SampleSpec
from agentserve.executor.folds import FoldCache
from agentserve.executor.grammars import SLOW_SECONDS, GrammarStore
from agentserve.types import Sampling, SessionId, TurnId
from tests.grammar_rig import BYTES, EOS, VOCAB, sources_of_bytes
from tools_bridge.grammar import ResponseFormat, reply_grammar

NAMES = tuple(f"g{n}" for n in range(6))


@pytest.fixture(scope="module")
def texts():
    compiler = sources_of_bytes()
    made = [
        compiler.compile(reply_grammar(response=ResponseFormat("choice", choices=(f"{n}x", f"{n}yy"))))
        for n in range(len(NAMES))
    ]
    return dict(zip(NAMES, made, strict=True))


def store_of(texts, **settings):
    store = GrammarStore(BYTES, VOCAB, [EOS], **settings)
    for name, text in texts.items():
        store.define(name, text)
    return store


def size_of(texts):
    return store_of(texts).start("g0").size


def test_those_used_last_are_in_memory_and_all_can_be_used(texts):
    store = store_of(texts, max_bytes=3 * size_of(texts) + 100)
    assert len(store) == 3
    for n, name in enumerate(NAMES):
        fold = store.start(name)
        assert fold.push(ord(str(n)))
        assert fold.push(ord("x"))
        assert fold.over
        assert len(store) == 3


def test_one_larger_than_the_bound_is_used_all_the_same(texts):
    store = store_of(texts, max_bytes=1)
    assert len(store) == 1
    assert store.start("g0").push(ord("0"))
    store.drop("g0")
    assert len(store) == 0
    with pytest.raises(ValueError, match="not defined"):
        store.start("g0")
    store.define("g0", texts["g0"])
    store.define("g0", texts["g0"])  # again
    assert store._bytes == size_of(texts)


def test_turns_of_the_past_do_not_keep_their_grammars(texts):
    store = store_of(texts, max_bytes=3 * size_of(texts) + 100)
    cache = FoldCache(8, BYTES, store)
    for n, name in enumerate(NAMES):
        spec = SampleSpec(Sampling(grammar=name), array("i", [1, ord(str(n))]), 1, 2)
        cache.at(SessionId(name), TurnId(1), spec)
    assert len(cache) == 3
    few = FoldCache(20, BYTES, store_of(texts, max_bytes=1))
    few.expect(2)  # in one step, and as many in the next
    for n, name in enumerate(NAMES):
        spec = SampleSpec(Sampling(grammar=name), array("i", [1, ord(str(n))]), 1, 2)
        few.at(SessionId(name), TurnId(1), spec)
    assert len(few) == 4


def test_a_token_that_takes_too_long_is_the_end_of_its_turn(texts):
    now, takes = [0.0], [0.0]

    def clock():
        now[0] += takes[0]
        return now[0]

    fold = store_of(texts, clock=clock).start("g0")
    assert fold.push(ord("0"))
    takes[0] = SLOW_SECONDS * 1.01
    with pytest.raises(ValueError, match="too ambiguous"):
        fold.push(ord("x"))
    takes[0] = 0.0
    with pytest.raises(ValueError, match="too ambiguous"):
        fold.allowed()
