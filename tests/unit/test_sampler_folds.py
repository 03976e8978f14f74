"""What the sampler folds up of a turn's past: kept, lost, rebuilt, and stop strings in it."""

from array import array

import numpy as np
import pytest
import torch

from agentserve.core.plan import SampleSpec
from agentserve.executor.sampler import Sampler
from agentserve.types import Sampling, SessionId, TurnId
from kernels.ops import Logits
from tests.sampler_rig import VOCAB, make, one, row, spec

FOLDED = Sampling(
    seed=11, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.4, stop=("zz",), min_tokens=2
)


def generate(sampler_at, steps=40, prompt=(5, 6, 7, 8, 5)):
    """Sampled tokens of one turn; `sampler_at(step)` is the sampler that step uses."""
    tokens, results = array("i", prompt), []
    for step in range(steps):
        logits = row(1000 + step % 3)  # few distinct rows, so that penalties decide
        request = SampleSpec(FOLDED, tokens, len(prompt), len(tokens))
        results.append(one(sampler_at(step), logits, request))
        tokens.append(results[-1].token)
    return results


def test_folds_rebuilt_after_a_lost_cache_equal_incremental_ones():
    kept = make()
    incremental = generate(lambda step: kept)
    assert len({r.token for r in incremental}) > 3
    assert generate(lambda step: make()) == incremental
    two = [make(), make()]  # each sees every other token only
    assert generate(lambda step: two[step % 2]) == incremental


def test_a_bounded_cache_changes_nothing():
    sampler = make(max_sessions=2)
    wide = make()
    tokens = {n: array("i", [5, 6, 7]) for n in range(5)}
    for step in range(12):
        for n, history in tokens.items():
            request = SampleSpec(FOLDED, history, 3, len(history))
            result = one(sampler, row(step), request, session=f"s{n}")
            assert result == one(wide, row(step), request, session=f"s{n}")
            history.append(result.token)
    assert len(sampler._folds) == 2


def test_the_cache_is_not_fooled_by_another_past_of_the_same_length():
    sampler = make()
    for tokens in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 6, 7, 8, 9, 10], [5, 6, 7]):
        request = spec(Sampling(temperature=0.0, frequency_penalty=2.0), tokens, 2)
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[4:12] = 1.0
        assert one(sampler, logits, request) == one(make(), logits, request)


def test_asking_again_gives_the_same_answer():
    sampler = make()
    request = spec(FOLDED, [5, 6, 7, 8, 9], 2)
    assert one(sampler, row(1), request) == one(sampler, row(1), request)


def force(token):
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[token] = 100
    return logits


def letter(char):
    return 4 + ord(char) - 97


@pytest.mark.parametrize("min_tokens", [0, 4, 5, 9])
def test_a_stop_string_ends_the_turn_at_its_last_token(min_tokens):
    sampling = Sampling(temperature=0.0, stop=("bcd", "zz"), min_tokens=min_tokens)
    sampler, tokens, ended = make(), array("i", [letter("b"), letter("c")]), []
    for char in "dabcd":  # the prompt's "bc" must not help
        result = one(sampler, force(letter(char)), SampleSpec(sampling, tokens, 2, len(tokens)))
        assert result.token == letter(char)
        tokens.append(result.token)
        ended.append(result.ended)
    assert ended == [False, False, False, False, min_tokens <= 5]


def test_stop_strings_in_bytes_of_half_characters():
    token_bytes = [b"", b"\xf0\x9f", b"\x98\x80x", b"\x98\x81", b"y"]
    sampler = Sampler(6, token_bytes, [0])  # one id has no bytes at all
    tokens, ended = array("i", [4]), []
    for token in (1, 3, 5, 1, 2):
        logits = np.zeros(6, dtype=np.float32)
        logits[token] = 9
        request = SampleSpec(Sampling(temperature=0.0, stop=("😀",)), tokens, 1, len(tokens))
        result = sampler.sample(
            Logits.of(torch.tensor(logits[None])), [(SessionId("s"), TurnId(1), request)]
        )[0]
        tokens.append(result.token)
        ended.append(result.ended)
    assert list(tokens[1:]) == [1, 3, 5, 1, 2]
    assert ended == [False, False, False, False, True]


def test_a_history_of_another_length_than_the_live_array():
    # The array may have grown beyond `length`; only what lies before counts.
    long = array("i", [5, 6, 7, 8, 9, 10])
    cut = SampleSpec(FOLDED, long, 2, 4)
    assert one(make(), row(1), cut) == one(make(), row(1), spec(FOLDED, [5, 6, 7, 8], 2))
    long.append(11)  # and no view of it is kept
