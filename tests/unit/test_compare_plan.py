"""Comparison with peers: what is run in which order, on which inputs, and what is made of the figures."""

from __future__ import annotations

from collections import Counter

import pytest

from agentserve.bench.compare import libraries, vllm
from agentserve.bench.compare.plan import (
    WARM_UP,
    WARM_UP_TOKENS,
    Scenario,
    text_prompts,
    token_prompts,
    turns,
)
from agentserve.bench.compare.result import Figure, notes, scenario_ratios

DECODE = Scenario("decode", 2, 16, 32)
PREFILL = Scenario("prefill", 1, 100)


@pytest.mark.parametrize("contestants", [("peer", "ours"), ("peer", "float", "int8")])
def test_turns_alternate_and_are_balanced(contestants: tuple[str, ...]) -> None:
    order = list(turns(contestants, 4))
    assert Counter(name for _, name in order) == dict.fromkeys(contestants, 4)
    names = [name for _, name in order]
    assert names[: 2 * len(contestants)] == [*contestants, *reversed(contestants)]
    # The sum of positions is the same for all: a drift that is linear in time favours nobody.
    places = {who: sum(at for at, name in enumerate(names) if name == who) for who in contestants}
    assert len(set(places.values())) == 1
    assert [number for number, _ in order] == sorted(number for number, _ in order)


def test_prompts_are_equal_for_all_and_new_for_every_run() -> None:
    seen = set()
    for scenario in (*libraries.SCENARIOS, *vllm.SCENARIOS, *vllm.CHUNKED):
        for number in (WARM_UP, 0, 1):
            prompts = token_prompts(scenario, number)
            assert prompts == token_prompts(scenario, number)
            assert [len(prompt) for prompt in prompts] == [scenario.length] * scenario.rows
            seen |= {tuple(prompt[:4]) for prompt in prompts}
            texts = text_prompts(scenario, number)
            assert texts == text_prompts(scenario, number)
            assert {len(text.split()) for text in texts} == {scenario.length}
    runs = sum(3 * scenario.rows for scenario in (*libraries.SCENARIOS, *vllm.SCENARIOS, *vllm.CHUNKED))
    # The same scenario of both lists has the same prompts; no other two have a beginning in common.
    again = {s.name for s in libraries.SCENARIOS} & {s.name for s in vllm.SCENARIOS}
    assert len(seen) == runs - sum(3 * s.rows for s in vllm.SCENARIOS if s.name in again)


def test_warm_up_has_the_same_shapes_on_other_prompts() -> None:
    warm = DECODE.shortened()
    assert (warm.rows, warm.length, warm.tokens) == (2, 16, WARM_UP_TOKENS)
    assert PREFILL.shortened() == PREFILL
    assert token_prompts(warm, WARM_UP) != token_prompts(DECODE, 0)


def test_medians_and_ratios() -> None:
    figures = {
        "peer": [Figure(rate, 100) for rate in (10.0, 30.0, 20.0)],
        "ours": [Figure(rate, 100) for rate in (50.0, 41.0, 10.0, 39.0)],
    }
    found = scenario_ratios("decode", 8, True, "peer", figures)
    assert found.medians == {"peer": 20.0, "ours": 40.0}
    assert found.ratios == {"ours": 2.0}
    assert found.runs["peer"] == [10.0, 30.0, 20.0]
    assert found.milliseconds("ours") == 200.0
    assert scenario_ratios("prefill", 1, False, "peer", figures).milliseconds("ours") is None


def test_notes_say_what_casts_doubt() -> None:
    counted = scenario_ratios("a", 1, True, "peer", {"peer": [Figure(1, 5)], "ours": [Figure(1, 6)]})
    alike = scenario_ratios("b", 1, True, "peer", {"peer": [Figure(1, 5)], "ours": [Figure(1, 5)]})
    assert notes([alike], {"peer": 0.01}) == []
    first, second = notes([counted, alike], {"peer": 0.5, "ours": 0.01})
    assert first.startswith("a: ")
    assert "5" in first
    assert "6" in first
    assert second == "peer took 50% of a core while others ran: it disturbed them"
