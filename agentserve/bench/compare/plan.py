"""What is run, on which inputs, and in which order: pure functions of the arguments."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

WARM_UP = -1  # the number of the run that does not count
WARM_UP_TOKENS = 8  # of a decode there
UNSTEADY = 2  # decode steps right after a prefill that are not counted: buffers are made, caches refilled

# Ids that are ordinary words in any vocabulary this is used with: neither bytes nor control tokens.
IDS = range(100, 40_000)
# Words that byte-level vocabularies have as one token each, so that n words are about n tokens.
WORDS = (
    *("the", "river", "runs", "past", "old", "stone", "walls", "and", "small", "green", "fields", "where"),
    *("people", "work", "from", "early", "morning", "until", "late", "night", "some", "carry", "water"),
    *("others", "cut", "wood", "build", "new", "roads", "or", "sell", "bread", "in", "market", "square"),
    *("while", "children", "learn", "to", "read", "count", "draw", "maps", "of", "distant", "lands"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of work: `rows` prompts of `length` tokens, then `tokens` generated for each.

    A prefill is timed to its first token (`tokens` is 1), a decode only while every row decodes.
    """

    kind: Literal["decode", "prefill"]
    rows: int
    length: int
    tokens: int = 1
    note: str = ""

    @property
    def name(self) -> str:
        size = f"{self.length} tokens" if self.kind == "prefill" else f"{self.rows} x {self.length} tokens"
        return f"{self.kind}, {size}{self.note}"

    def shortened(self) -> Scenario:
        """The same shapes, fewer tokens: enough to warm up."""
        return replace(self, tokens=min(self.tokens, WARM_UP_TOKENS))


def turns(contestants: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """(number of the run, who runs), every second round in reverse: a drift of the machine, or what one
    leaves behind for the next, falls on all of them alike."""
    for number in range(runs):
        for name in contestants if number % 2 == 0 else reversed(contestants):
            yield number, name


def token_prompts(scenario: Scenario, number: int) -> list[list[int]]:
    """The prompts of one run as token ids: the same for every contestant, never those of another run."""
    dice = _dice(scenario, number)
    return [dice.choices(IDS, k=scenario.length) for _ in range(scenario.rows)]


def text_prompts(scenario: Scenario, number: int) -> list[str]:
    """The same as texts, of about `length` tokens each."""
    dice = _dice(scenario, number)
    return [" ".join(dice.choices(WORDS, k=scenario.length)) for _ in range(scenario.rows)]


def _dice(scenario: Scenario, number: int) -> random.Random:
    return random.Random(f"{scenario.name}, run {number}")
