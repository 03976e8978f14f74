"""Reasoning that has to end: counted from the tokens alone, and closed by the one token that does so."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from agentserve.core.plan import SampleSpec
from agentserve.executor.sampler import Sampler
from agentserve.types import ReasoningCap, Sampling
from tests.sampler_rig import VOCAB, make, one, row

OPEN, CLOSE, WORD = 7, 8, 9


def generate(
    cap: ReasoningCap,
    rows: Callable[[int], np.ndarray],
    sampler_at: Callable[[int], Sampler],
    steps: int = 12,
) -> list[int]:
    tokens = array("i", [5, 6])
    sampling = Sampling(temperature=0.0, reasoning=cap)
    for step in range(steps):
        request = SampleSpec(sampling, tokens, 2, len(tokens))
        tokens.append(one(sampler_at(step), rows(step), request).token)
    return tokens[2:].tolist()


def wants(*tokens: int) -> Callable[[int], np.ndarray]:
    """Rows whose best token is the next of these; the last goes on."""

    def at(step: int) -> np.ndarray:
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[tokens[min(step, len(tokens) - 1)]] = 9.0
        return logits

    return at


@pytest.mark.parametrize(
    ("cap", "wanted", "said"),
    [
        (ReasoningCap(3, CLOSE, OPEN, inside=True), [WORD], [WORD] * 3 + [CLOSE] + [WORD] * 8),
        (ReasoningCap(0, CLOSE, OPEN, inside=True), [WORD], [CLOSE] + [WORD] * 11),
        (ReasoningCap(2, CLOSE, OPEN), [OPEN, WORD], [OPEN, WORD, WORD, CLOSE] + [WORD] * 8),
        (ReasoningCap(2, CLOSE, OPEN), [WORD, OPEN, WORD], [WORD, OPEN] + [WORD] * 10),  # it is said
        (ReasoningCap(2, CLOSE, OPEN), [WORD], [WORD] * 12),
        (ReasoningCap(2, CLOSE), [OPEN, WORD], [OPEN] + [WORD] * 11),
        (  # what closes it in time needs no help, and what is opened later is said
            ReasoningCap(3, CLOSE, OPEN, inside=True),
            [WORD, WORD, CLOSE, OPEN, WORD],
            [WORD, WORD, CLOSE, OPEN] + [WORD] * 8,
        ),
        (
            ReasoningCap(1, CLOSE, OPEN, inside=True),
            [WORD, OPEN, OPEN, OPEN, OPEN, WORD],
            [WORD, CLOSE, OPEN, OPEN, OPEN] + [WORD] * 7,
        ),
    ],
)
def test_reasoning_ends_where_it_has_to(cap: ReasoningCap, wanted: list[int], said: list[int]) -> None:
    kept = make()
    assert generate(cap, wants(*wanted), lambda step: kept) == said
    assert generate(cap, wants(*wanted), lambda step: make()) == said  # nothing is known but the tokens


def test_other_tokens_are_drawn_as_without_a_limit() -> None:
    kept, plain = make(), make()
    tokens = array("i", [5])
    capped = Sampling(seed=3, reasoning=ReasoningCap(4, CLOSE, inside=True))
    for step in range(10):
        request = SampleSpec(capped, tokens, 1, len(tokens))
        got = one(kept, row(step), request).token
        alone = one(plain, row(step), SampleSpec(Sampling(seed=3), tokens, 1, len(tokens))).token
        assert got == (CLOSE if step == 4 else alone)
        tokens.append(got)


def test_a_token_that_no_row_has_is_not_asked_for() -> None:
    cap = ReasoningCap(1, VOCAB + 5, OPEN, inside=True)
    kept = make()
    assert generate(cap, wants(WORD), lambda step: kept, steps=3) == [WORD] * 3


def test_its_log_probability_is_what_the_model_gave_it() -> None:
    sampling = Sampling(temperature=0.0, logprobs=1, reasoning=ReasoningCap(0, CLOSE, inside=True))
    result = one(make(), wants(WORD)(0), SampleSpec(sampling, array("i", [5]), 1, 1))
    assert result.token == CLOSE
    assert result.logprob == pytest.approx(-np.log(VOCAB - 1 + np.exp(9.0)), abs=1e-3)
