"""Masks of grammars in the sampler, over a vocabulary of bytes."""

import json
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentserve.core.plan import SampleSpec
from agentserve.executor.sampler import NotSampled, Sampler
from agentserve.types import ReasoningCap, Sampling, SessionId, TurnId
from kernels.ops import Logits
from tests.grammar_rig import BYTES, EOS, NOW, REQUIRED, VOCAB, WEATHER, call, sources_of_bytes
from tools_bridge.grammar import ResponseFormat, ToolChoice, reply_grammar
from tools_bridge.registry import ReplyForm
from tools_bridge.source_compiler import SourceCompiler


@pytest.fixture(scope="module")
def compiler():
    return sources_of_bytes()


def sampler_with(compiler, source, **kwargs):
    sampler = Sampler(VOCAB, BYTES, [EOS], **kwargs)
    sampler.define_grammar("g", compiler.compile(source))
    return sampler


def step(sampler, sampling, tokens, prompt, logits):
    request = SampleSpec(sampling, tokens, prompt, len(tokens))
    return sampler.sample(Logits.of(torch.tensor(logits[None])), [(SessionId("s"), TurnId(1), request)])[0]


def generate(sampler_at, sampling, limit=400, seed=0, wish=None):
    """Tokens of one turn on random logits; bytes of `wish` are made likely in their order."""
    tokens, rng = array("i", [1, 2, 3]), np.random.default_rng(seed)
    for n in range(limit):
        logits = rng.normal(size=VOCAB).astype(np.float32) * 3
        if wish is not None:
            logits[wish[n] if n < len(wish) else EOS] += 1000
        result = step(sampler_at(n), sampling, tokens, 3, logits)
        tokens.append(result.token)
        if result.ended:
            return tokens[3:], True
        if result.token == EOS:
            return tokens[3:], False
    return tokens[3:], False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_a_grammar_ends_the_turn_without_another_token(compiler, temperature):
    sampler = sampler_with(compiler, reply_grammar([WEATHER], ToolChoice.named("weather")))
    sampling = Sampling(temperature=temperature, grammar="g")
    tokens, ended = generate(lambda n: sampler, sampling, wish=call().encode())
    assert bytes(list(tokens)).decode() == call()
    assert ended


def test_where_more_calls_may_follow_the_model_ends_by_eos(compiler):
    sampler = sampler_with(compiler, reply_grammar([WEATHER], REQUIRED))
    tokens, ended = generate(lambda n: sampler, Sampling(temperature=0.0, grammar="g"), wish=call().encode())
    assert bytes(list(tokens[:-1])).decode() == call()
    assert tokens[-1] == EOS
    assert ended


@pytest.mark.parametrize(
    "knobs",
    [
        {"logit_bias": {ord("x"): 1e9, ord("y"): float("inf"), EOS: 1e9}},
        {"logit_bias": dict.fromkeys(range(256), float("-inf"))},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0},
        {"min_tokens": 10_000},
        {"min_tokens": 10_000, "ignore_eos": True},
        {"top_k": 1, "top_p": 0.1, "min_p": 0.9},
        {"temperature": 100.0},
        {"temperature": 0.0, "logit_bias": dict.fromkeys(range(256), -1e9)},
    ],
)
def test_nothing_lifts_the_mask(compiler, knobs):
    source = reply_grammar(
        response=ResponseFormat(
            "json_schema",
            {"type": "object", "properties": {"k": {"enum": ["aa", "ab", 17]}}, "required": ["k"]},
        )
    )
    sampler = sampler_with(compiler, source)
    for seed in range(5):
        tokens, ended = generate(lambda n: sampler, Sampling(grammar="g", seed=seed, **knobs), seed=seed)
        assert json.loads(bytes(list(tokens)))["k"] in ("aa", "ab", 17)
        assert ended


def test_min_tokens_keeps_a_grammar_going_while_it_can(compiler):
    source = reply_grammar(response=ResponseFormat("json_schema", {"type": "integer"}))
    sampler = sampler_with(compiler, source)
    sampling = Sampling(temperature=0.0, grammar="g", min_tokens=6)
    tokens, ended = generate(lambda n: sampler, sampling, wish=[ord("7")])
    assert ended
    assert len(tokens) == 7  # six digits, then EOS
    assert tokens[-1] == EOS


def test_a_grammar_state_rebuilt_equals_the_incremental_one(compiler):
    source = reply_grammar([WEATHER, NOW], REQUIRED)
    sampling = Sampling(grammar="g", seed=3, frequency_penalty=0.2, stop=("never seen",))
    kept = sampler_with(compiler, source)
    incremental = generate(lambda n: kept, sampling, limit=150)
    assert generate(lambda n: sampler_with(compiler, source), sampling, limit=150) == incremental
    two = [sampler_with(compiler, source) for _ in range(2)]
    assert generate(lambda n: two[n % 2], sampling, limit=150) == incremental


def test_the_fold_begins_after_the_prompt(compiler):
    source = reply_grammar(response=ResponseFormat("json_object"))
    sampler = sampler_with(compiler, source)
    prompt = array("i", list(b'{"a": 1}'))
    result = step(sampler, Sampling(grammar="g"), prompt, len(prompt), np.zeros(VOCAB, dtype=np.float32))
    assert result.token == ord("{")


def test_tokens_without_bytes_and_beyond_the_tokenizer_are_never_allowed(compiler):
    sampler = sampler_with(compiler, reply_grammar(response=ResponseFormat("json_object")))
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[257:] = 1000
    assert step(sampler, Sampling(grammar="g"), array("i", [1]), 1, logits).token == ord("{")


def test_a_row_that_cannot_be_sampled_says_why(compiler):
    sampler = sampler_with(compiler, reply_grammar(response=ResponseFormat("json_object")))
    ok = SampleSpec(Sampling(grammar="g"), array("i", list(b"..{")), 2, 3)
    unknown = SampleSpec(Sampling(grammar="h"), array("i", [1]), 1, 1)
    outside = SampleSpec(Sampling(grammar="g"), array("i", list(b"..x")), 2, 3)
    over = SampleSpec(Sampling(grammar="g"), array("i", list(b"..{}")), 2, 4)
    session, turn = SessionId("s"), TurnId(1)
    plain = SampleSpec(Sampling(), array("i", [1]), 1, 1)
    rows = [(session, turn, spec) for spec in (ok, unknown, plain, outside, over)]
    found = sampler.sample(Logits.of(torch.zeros(5, VOCAB)), rows)
    assert [result.error if isinstance(result, NotSampled) else "" for result in found] == [
        "",
        "grammar 'h' is not defined on this worker",
        "",
        "token 120 does not continue grammar 'g'",
        "grammar 'g' is already complete",
    ]
    sampler.drop_grammar("g")
    sampler.drop_grammar("never known")
    [gone] = sampler.sample(Logits.of(torch.zeros(1, VOCAB)), [(session, TurnId(2), ok)])
    assert gone == NotSampled("grammar 'g' is not defined on this worker")


def test_reasoning_is_closed_inside_a_grammar_and_the_call_follows():
    """With tokens for the marks: the grammar lets the one through that has to come."""
    close = EOS + 1
    compiler = SourceCompiler([*BYTES, b"", b"</think>"], VOCAB, [EOS])
    syntax = replace(ReplyForm().syntax, think=("<think>", "</think>"))
    source = reply_grammar([WEATHER], ToolChoice.named("weather"), syntax=syntax, thinking="inside")
    sampler = Sampler(VOCAB, [*BYTES, b"", b"</think>"], [EOS])
    sampler.define_grammar("g", compiler.compile(source))
    sampling = Sampling(temperature=0.0, grammar="g", reasoning=ReasoningCap(4, close, inside=True))
    wish = [*b"hmmm", close, *b"\n\n", *call().encode()]
    wanted = [*b"hmmm", *b"m", *b"\n\n", *call().encode()]  # the model would go on
    tokens, ended = generate(lambda n: sampler, sampling, wish=wanted)
    assert (list(tokens), ended) == (wish, True)
    cut = Sampling(temperature=0.0, grammar="g", reasoning=ReasoningCap(0, ord("!"), inside=False))
    tokens, _ = generate(lambda n: sampler, cut, wish=wish)
    assert list(tokens) == wish
